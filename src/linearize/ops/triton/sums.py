"""Causal sums of the grouped quadratic kernel on Triton kernels, with their gradients.

``y_i = φ(q_i)ᵀ A S_0 + Σ_{j≤i} κ(q_i, k_j) u_j`` and ``S = S_0 + Σ_j φ(k_j) u_jᵀ`` with the packed products
φ. Two passes: the sums of every chunk at once, added up by one cumulative sum into the state before
each chunk; then all outputs at once, each from its chunk's state and the pairs inside the chunk. Heads
may have different numbers of groups. All sums are in fp32; memory beyond inputs and outputs is one
state a chunk. The backward pass keeps only the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from linearize.ops.triton.backward import (
    coefficient_kernel,
    feature_kernel,
    pair_key_kernel,
    pair_row_kernel,
)
from linearize.ops.triton.decode import decode_kernel
from linearize.ops.triton.forward import output_kernel, sum_kernel

__all__ = ["Numbers", "decode_sums", "grouped_sums"]

CHUNK = 256  # tokens between two states
BLOCKS = (64, 32, 16)  # rows, keys and features of a tile; the largest that fits
PRECISION = {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}  # as torch is told
TILE = 16  # what a matrix product takes at least


class Numbers(NamedTuple):
    """The numbers of a grouped quadratic kernel, per query head.

    Attributes:
        coefficients: of the packed products, multiplicities and scale included, ``[H, F]``.
        slope: of every component of ``Lᵀ s̄`` in every ``q_r k_r``, ``[H, G+1, d]``.
        offset: its constant, ``[H, G+1]``.
        counts: how many components the heads of a state use, ``[states]``, int32.
        eps: the floor ε.
    """

    coefficients: Tensor
    slope: Tensor
    offset: Tensor
    counts: Tensor
    eps: float

    @staticmethod
    def of(
        groups: Tensor, lower: Tensor, coefficients: Tensor, eps: float, scale: float, states: int
    ) -> Numbers:
        """From the groups ``[H, d]`` and the factor ``L [H, G+1, G+1]``, lower-triangular."""
        heads = torch.arange(groups.shape[0], device=groups.device)[:, None]
        slope = lower[heads, groups.long() + 1] * scale  # [H, d, G+1]
        counts = groups.amax(1).view(states, -1).amax(1) + 2
        return Numbers(
            coefficients.float().contiguous(),
            slope.float().transpose(1, 2).contiguous(),
            lower[:, 0].float().contiguous(),
            counts.int(),
            eps,
        )


def grouped_sums(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    numbers: Numbers,
    *,
    state: Tensor | None = None,
    keep_state: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """See the module.

    Args:
        q: ``[H, N, d]``; k: ``[states, N, d]``, u: ``[states, N, c]``; query head ``h`` reads state
            ``h // (H / states)``. Rows of ``u`` are zero for keys that do not take part.
        state: ``S_0``, ``[states, F, c]`` in fp32; ``None`` for zero.
        keep_state: whether the state after the last token is wanted.
        chunk: tokens between two states.

    Returns:
        ``y [H, N, c]`` in fp32 and ``S`` (``None`` unless wanted).
    """
    sums, after = _GroupedSums.apply(q, k, u, *numbers[:3], state, numbers, keep_state, chunk)
    return sums, after


def decode_sums(
    q: Tensor, k: Tensor, u: Tensor, numbers: Numbers, state: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`grouped_sums` for one token, in one pass over the state; without gradients.

    ``q [H, d]``, ``k [states, d]``, ``u [states, c]`` -> ``y [H, c]`` and the state after the token.
    """
    q, k, u, state = (x.contiguous() for x in (q, k, u, state))
    call = _Call(q[:, None], k[:, None], u[:, None], numbers, 1)
    blocks = triton.cdiv(call.features, call.block)
    parts = q.new_empty(blocks, call.heads, call.channels, dtype=torch.float32)
    after = torch.empty_like(state)
    decode_kernel[(blocks, call.states)](
        q,
        k,
        u,
        state,
        numbers.coefficients,
        numbers.slope,
        numbers.offset,
        numbers.counts,
        call.left,
        call.right,
        after,
        parts,
        call.r,
        call.channels,
        call.features,
        numbers.offset.shape[1],
        numbers.eps,
        dim=call.dim,
        wide=call.wide,
        heads=_tile(call.r),
        block_features=call.block,
        width=call.width,
        tail=call.tail,
        precision=call.precision,
    )
    return parts.sum(0), after


class _GroupedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        coefficients: Tensor,
        slope: Tensor,
        offset: Tensor,
        state: Tensor | None,
        numbers: Numbers,
        keep_state: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        numbers = Numbers(coefficients, slope, offset, numbers.counts, numbers.eps)
        call = _Call(q, k, u, numbers, chunk)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, u, coefficients, slope, offset, numbers.counts, state)
        ctx.settings = numbers.eps, chunk
        states = call.states_before(state)
        y = call.outputs(states, state is not None)
        return y, states[:, -1].clone() if keep_state else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, u, coefficients, slope, offset, counts, state = ctx.saved_tensors
        eps, chunk = ctx.settings
        call = _Call(q, k, u, Numbers(coefficients, slope, offset, counts, eps), chunk)
        grad_y, grad_after = grads
        if grad_y is None:
            grad_y = q.new_zeros(*q.shape[:2], u.shape[2], dtype=torch.float32)
        found = call.backward(state, grad_y.contiguous().float(), grad_after)
        return (*found, None, None, None)


class _Call:
    """One call's tensors and sizes, and its kernels."""

    def __init__(self, q: Tensor, k: Tensor, u: Tensor, numbers: Numbers, chunk: int) -> None:
        self.q, self.k, self.u = q.contiguous(), k.contiguous(), u.contiguous()
        self.numbers = numbers
        self.heads, self.tokens, self.dim = q.shape
        self.states, self.channels = k.shape[0], u.shape[2]
        self.r = self.heads // self.states
        self.chunk = min(chunk, self.tokens)
        self.chunks = triton.cdiv(self.tokens, self.chunk)
        self.left, self.right = _factors(self.dim, q.device)
        self.features = len(self.left)
        self.wide = _tile(self.dim)
        self.width, self.tail = _split(self.channels)
        self.block = _block(max(self.wide, self.width), q.device)
        self.precision = PRECISION[torch.get_float32_matmul_precision()]

    def states_before(self, state: Tensor | None) -> Tensor:
        """The state before every chunk and after the last, ``[states, chunks + 1, F, c]``."""
        return self._sums(self.k, self.u, 1, None, state).cumsum_(1)

    def outputs(self, states: Tensor, has_state: bool) -> Tensor:
        """``y [H, N, c]`` from the states and the pairs inside chunks."""
        y = self.q.new_empty(self.heads, self.tokens, self.channels, dtype=torch.float32)
        self._outputs(self.q, self.r, states, y, has_state, pairs=True)
        return y

    def backward(
        self, state: Tensor | None, grad_y: Tensor, grad_after: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, u, coefficients, slope, offset and the state before."""
        states = self.states_before(state)
        # of the state before every chunk; shifted by one, of the sums of the chunk before it
        reads = self._sums(self.q, grad_y, self.r, self.numbers.coefficients, None)
        reads = torch.cat([reads[:, 1:], reads[:, :1]], dim=1)
        if grad_after is not None:
            reads[:, -1] += grad_after
        of_states = reads.flip(1).cumsum_(1).flip(1)
        of_sums = of_states[:, 1:]

        grad_u = self.k.new_empty(self.states, self.tokens, self.channels, dtype=torch.float32)
        self._outputs(self.k, 1, of_sums, grad_u, True, pairs=False)
        grad_k = self._pairs_by_key(grad_y, grad_u)
        grad_q, grad_slope, grad_offset = self._pairs_by_row(grad_y)
        self._through_features(self.k, self.u, 1, None, of_sums, grad_k)
        coefficients = self.numbers.coefficients
        self._through_features(self.q, grad_y, self.r, coefficients, states, grad_q)
        return (
            grad_q.to(self.q.dtype),
            grad_k.to(self.k.dtype),
            grad_u.to(self.u.dtype),
            self._coefficients(grad_y, states),
            grad_slope,
            grad_offset,
            None if state is None else of_states[:, 0],
        )

    def _sums(
        self, x: Tensor, w: Tensor, r: int, coefficients: Tensor | None, first: Tensor | None
    ) -> Tensor:
        """``[states, chunks + 1, F, c]``: ``first``, then the sums over every chunk."""
        out = x.new_empty(
            self.states, self.chunks + 1, self.features, self.channels, dtype=torch.float32
        )
        out[:, 0] = 0 if first is None else first
        sum_kernel[(triton.cdiv(self.features, self.block), self.chunks, self.states)](
            x,
            w,
            coefficients,
            self.left,
            self.right,
            out[:, 1:],
            self.tokens,
            self.chunk,
            r,
            self.channels,
            self.features,
            out.stride(0),
            out.stride(1),
            weighted=coefficients is not None,
            block_rows=self.block,
            block_features=self.block,
            **self._shape,
        )
        return out

    def _outputs(
        self, x: Tensor, r: int, states: Tensor, y: Tensor, has_state: bool, *, pairs: bool
    ) -> None:
        numbers, tiles = self.numbers, self._tiles(r)
        output_kernel[(self.chunks * tiles, self.states)](
            x,
            self.k,
            self.u,
            states,
            numbers.coefficients,
            numbers.slope,
            numbers.offset,
            numbers.counts,
            self.left,
            self.right,
            y,
            self.tokens,
            self.chunk,
            tiles,
            r,
            self.channels,
            self.features,
            numbers.offset.shape[1],
            states.stride(0),
            states.stride(1),
            int(has_state),
            numbers.eps,
            wide=self.wide,
            weighted=pairs,
            pairs=pairs,
            block_rows=self.block,
            block_keys=self.block,
            block_features=self.block,
            **self._shape,
        )

    def _through_features(
        self,
        x: Tensor,
        w: Tensor,
        r: int,
        coefficients: Tensor | None,
        states: Tensor,
        grad: Tensor,
    ) -> None:
        tiles = self._tiles(r)
        feature_kernel[(self.chunks * tiles, self.states)](
            x,
            w,
            states,
            coefficients,
            self.left,
            self.right,
            grad,
            self.tokens,
            self.chunk,
            tiles,
            r,
            self.channels,
            self.features,
            states.stride(0),
            states.stride(1),
            wide=self.wide,
            weighted=coefficients is not None,
            block_rows=self.block,
            block_features=self.block,
            **self._shape,
        )

    def _coefficients(self, grad_y: Tensor, states: Tensor) -> Tensor:
        parts = grad_y.new_empty(self.states, self.chunks, self.r, self.features)
        coefficient_kernel[(triton.cdiv(self.features, self.block), self.chunks, self.states)](
            self.q,
            grad_y,
            states,
            self.left,
            self.right,
            parts,
            self.tokens,
            self.chunk,
            self.chunks,
            self.r,
            self.channels,
            self.features,
            states.stride(0),
            states.stride(1),
            heads=_tile(self.r),
            block_rows=self.block,
            block_features=self.block,
            **self._shape,
        )
        return parts.sum(1).flatten(0, 1)

    def _pairs_by_row(self, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers, tiles = self.numbers, self._tiles(self.r)
        grid = (self.chunks * tiles, self.states)
        components = numbers.offset.shape[1]
        grad_q = torch.empty_like(self.q, dtype=torch.float32)
        slopes = grad_y.new_zeros(self.states, grid[0], self.r, components, self.dim)
        offsets = grad_y.new_zeros(self.states, grid[0], self.r, components)
        pair_row_kernel[grid](
            self.q,
            self.k,
            self.u,
            grad_y,
            numbers.slope,
            numbers.offset,
            numbers.counts,
            grad_q,
            slopes,
            offsets,
            self.tokens,
            self.chunk,
            tiles,
            self.r,
            self.channels,
            components,
            wide=self.wide,
            heads=_tile(self.r),
            block_rows=self.block,
            block_keys=self.block,
            **self._shape,
        )
        return grad_q, slopes.sum(1).flatten(0, 1), offsets.sum(1).flatten(0, 1)

    def _pairs_by_key(self, grad_y: Tensor, grad_u: Tensor) -> Tensor:
        numbers, tiles = self.numbers, self._tiles(1)
        grad_k = torch.empty_like(self.k, dtype=torch.float32)
        pair_key_kernel[(self.chunks * tiles, self.states)](
            self.q,
            self.k,
            self.u,
            grad_y,
            numbers.slope,
            numbers.offset,
            numbers.counts,
            grad_k,
            grad_u,
            self.tokens,
            self.chunk,
            tiles,
            self.r,
            self.channels,
            numbers.offset.shape[1],
            numbers.eps,
            wide=self.wide,
            block_rows=self.block,
            block_keys=self.block,
            **self._shape,
        )
        return grad_k

    def _tiles(self, r: int) -> int:
        """Tiles that the rows of a chunk take."""
        return int(triton.cdiv(self.chunk * r, self.block))

    @property
    def _shape(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "width": self.width,
            "tail": self.tail,
            "precision": self.precision,
        }


def _factors(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which coordinates each packed feature multiplies, ``dim`` standing for the one before them."""
    rows, columns = torch.triu_indices(dim, dim, device=device, dtype=torch.int32)
    line = torch.arange(dim, device=device, dtype=torch.int32)
    one = line.new_full((1,), dim)
    return torch.cat([one, line, rows]), torch.cat([one, one.expand(dim), columns])


def _split(channels: int) -> tuple[int, bool]:
    """Channels as a power of two and, where that saves more than half, a tail of one tile."""
    whole = _tile(channels)
    half = whole // 2
    return (half, True) if half >= TILE and channels - half <= TILE else (whole, False)


def _block(width: int, device: torch.device) -> int:
    """The largest tile whose kernels fit into a block's shared memory for vectors of this width.

    They take at most ``4 block (6 block + 4 width)`` bytes, as the compiler says for widths 64 and 128.
    """
    if device.type != "cuda":
        return BLOCKS[-1]
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks this one
    held = properties.shared_memory_per_block_optin
    fit = [block for block in BLOCKS if 4 * block * (6 * block + 4 * width) <= held]
    return fit[0] if fit else BLOCKS[-1]


def _tile(size: int) -> int:
    """The next power of two, at least a tile."""
    return max(TILE, int(triton.next_power_of_2(size)))
