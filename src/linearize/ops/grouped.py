"""Causal sums of the grouped quadratic kernel in linear time, with their gradients in closed form.

``y_i = φ(q_i)ᵀ A S_0 + Σ_{j≤i} κ(q_i, k_j) u_j`` and ``S = S_0 + Σ_j φ(k_j) u_jᵀ`` with the packed products
φ and the coefficients A of every query head. Between chunks the state is read, inside a chunk weights
are formed pair by pair. The backward pass keeps nothing but the inputs: states are summed once more,
then one sweep from the last chunk to the first carries the gradient of the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from linearize.ops.packed import PackedProducts
from linearize.ops.scores import GroupLayout, PairWeights

__all__ = ["grouped_sums"]

BLOCK = 256  # tokens whose features exist at once, and
BLOCK_BYTES = 7 * 2**22  # of them, over which the block is smaller
TILE = (64, 256)  # queries and keys whose weights exist at once, and
TILE_BYTES = 2**23  # of their group scores, over which the tile is narrower


class _Plan(NamedTuple):
    """What a call is beside its tensors."""

    layout: GroupLayout
    eps: float
    scale: float
    chunk: int
    keep_state: bool


def grouped_sums(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    *,
    layout: GroupLayout,
    lower: Tensor,
    coefficients: Tensor,
    eps: float,
    scale: float,
    state: Tensor | None,
    chunk: int,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """See the module.

    Args:
        q: ``[H, N, d]``; k: ``[Hk, N, d]``; u: ``[Hk, N, c]``, zero for keys that do not take part.
        layout: the groups of all H heads. lower: L, ``[H, G+1, G+1]``.
        coefficients: A, ``[H, F]``, of the packed products, multiplicities included.
        eps, scale: numbers of the kernel.
        state: ``S_0``, ``[Hk, F, c]``; ``None`` for zero.
        chunk: tokens between two readings of the state.
        keep_state: whether the state after the last token is wanted.

    Returns:
        ``y [H, N, c]`` and ``S [Hk, F, c]`` (``None`` unless wanted).
    """
    plan = _Plan(layout, eps, scale, min(chunk, q.shape[1]), keep_state)
    sums, after = _GroupedSums.apply(q, k, u, lower, coefficients, state, plan)
    return sums, after


class _GroupedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        lower: Tensor,
        coefficients: Tensor,
        state: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, u, lower, coefficients, state)
        ctx.plan = plan
        call = _Call(q, k, u, lower, coefficients, plan)
        return call.forward(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, u, lower, coefficients, state = ctx.saved_tensors
        call = _Call(q, k, u, lower, coefficients, ctx.plan)
        return (*call.backward(state, grads[0], grads[1]), None)


class _Call:
    """One call's tensors and buffers. States are kept as ``[Hk, c, F]`` inside."""

    def __init__(
        self, q: Tensor, k: Tensor, u: Tensor, lower: Tensor, coefficients: Tensor, plan: _Plan
    ) -> None:
        self.q, self.k, self.u, self.plan = q, k, u, plan
        self.heads, self.kv_heads, self.tokens = q.shape[0], k.shape[0], q.shape[1]
        self.coefficients = coefficients.unflatten(0, (self.kv_heads, -1))[:, :, None]
        self.chunks = _cut(slice(0, self.tokens), plan.chunk)
        token = (self.heads + self.kv_heads) * coefficients.shape[1] * q.element_size()
        most = max(1, min(BLOCK, BLOCK_BYTES // token))
        self.block = math.ceil(plan.chunk / math.ceil(plan.chunk / most))
        rows = min(TILE[0], plan.chunk)
        column = rows * self.heads * lower.shape[1] * q.element_size()
        self.tile = (rows, max(1, min(TILE[1], plan.chunk, TILE_BYTES // column)))
        self.u_of_heads = u.repeat_interleave(self.heads // self.kv_heads, dim=0)
        self.pairs = PairWeights(q, k, plan.layout, lower, plan.eps, plan.scale, self.tile)
        self._made: PackedProducts | None = None
        self._buffers: dict[str, Tensor] = {}

    def forward(self, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = self.q.new_zeros(*self.q.shape[:2], self.u.shape[-1])
        now = None if state is None else state.transpose(1, 2).contiguous()
        for chunk in self.chunks:
            keep = self.plan.keep_state or chunk is not self.chunks[-1]
            ready = None if now is None else self._with_coefficients(now)
            if keep and now is None:
                now = self._empty_state()
            for block in _cut(chunk, self.block):
                if ready is not None and keep:
                    features = self._products.form(0, self.q[:, block], self.k[:, block])
                elif ready is not None:
                    features = self._products.form(0, self.q[:, block])
                elif keep:
                    features = self._products.form(self.heads, self.k[:, block])
                if ready is not None:
                    read = torch.bmm(ready, features[: self.heads])
                    y[:, block] += read[..., : block.stop - block.start].transpose(1, 2)
                if keep:
                    assert now is not None
                    key_features = features[-self.kv_heads :].transpose(1, 2)
                    now.baddbmm_(self._across(self.u, block), key_features)
            for rows, keys in self._tiles(chunk):
                y[:, rows] += torch.bmm(self._weights(rows, keys), self.u_of_heads[:, keys])
        if not self.plan.keep_state:
            return y, None
        assert now is not None
        return y, now.transpose(1, 2).contiguous()

    def backward(
        self, state: Tensor | None, grad_y: Tensor | None, grad_after: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, u, L, the coefficients and the state."""
        self.grad_q, self.grad_k = torch.zeros_like(self.q), torch.zeros_like(self.k)
        self.grad_u = torch.zeros_like(self.u)
        self.grad_coefficients = torch.zeros_like(self.coefficients)
        grad_y = torch.zeros_like(self.u_of_heads) if grad_y is None else grad_y.contiguous()
        grad_state = None if grad_after is None else grad_after.transpose(1, 2).contiguous()
        states = self._states(state)
        self.pairs.start_backward()
        for chunk, before in zip(reversed(self.chunks), reversed(states), strict=True):
            if grad_state is not None:
                self._sum_backward(chunk, grad_state)
            if before is not None:
                if grad_state is None:
                    grad_state = torch.zeros_like(before)
                self._read_backward(chunk, before, grad_y, grad_state)
            self._pairs_backward(chunk, grad_y)
        grad_q, grad_k, grad_lower = self.pairs.gradients()
        return (
            grad_q.add_(self.grad_q),
            grad_k.add_(self.grad_k),
            self.grad_u,
            grad_lower,
            self.grad_coefficients.flatten(0, 1).squeeze(1),
            None if state is None or grad_state is None else grad_state.transpose(1, 2),
        )

    def _states(self, state: Tensor | None) -> list[Tensor | None]:
        """The state before every chunk."""
        now = None if state is None else state.transpose(1, 2).contiguous()
        states = [now]
        for chunk in self.chunks[:-1]:
            now = self._empty_state() if now is None else now.clone()
            for block in _cut(chunk, self.block):
                features = self._products.form(self.heads, self.k[:, block])
                now.baddbmm_(self._across(self.u, block), features.transpose(1, 2))
            states.append(now)
        return states

    def _sum_backward(self, chunk: slice, grad_after: Tensor) -> None:
        """Through the sums: the keys' and values' gradients from that of the state after the chunk."""
        for block in _cut(chunk, self.block):
            tokens = block.stop - block.start
            features = self._products.form(self.heads, self.k[:, block])
            self.grad_u[:, block] += torch.bmm(grad_after, features)[..., :tokens].transpose(1, 2)
            grad = self._buffer("features", features.shape)
            torch.bmm(grad_after.transpose(1, 2), self._across(self.u, block), out=grad)
            self.grad_k[:, block] += self._products.backward(grad, self.heads)[:, :tokens]

    def _read_backward(
        self, chunk: slice, before: Tensor, grad_y: Tensor, grad_state: Tensor
    ) -> None:
        """Through the readings of one chunk; adds the gradient of the state before it."""
        ready = self._with_coefficients(before)
        outer = self._buffer("outer", ready.shape)
        by_head = outer.unflatten(0, (self.kv_heads, -1))
        for block in _cut(chunk, self.block):
            features = self._products.form(0, self.q[:, block])
            grad_read = self._across(grad_y, block)
            grad = self._buffer("features", features.shape)
            torch.bmm(ready.transpose(1, 2), grad_read, out=grad)
            grad = self._products.backward(grad, 0)
            self.grad_q[:, block] += grad[:, : block.stop - block.start]
            if block.start == chunk.start:
                torch.bmm(grad_read, features.transpose(1, 2), out=outer)
            else:
                outer.baddbmm_(grad_read, features.transpose(1, 2))
        product = torch.mul(by_head, before[:, None], out=ready.view_as(by_head))
        self.grad_coefficients += product.sum(2, keepdim=True)
        grad_state += by_head.mul_(self.coefficients).sum(1)

    def _pairs_backward(self, chunk: slice, grad_y: Tensor) -> None:
        for rows, keys in self._tiles(chunk):
            weights = self._weights(rows, keys)
            grad = torch.bmm(weights.transpose(1, 2), grad_y[:, rows])
            self.grad_u[:, keys] += grad.unflatten(0, (self.kv_heads, -1)).sum(1)
            torch.bmm(grad_y[:, rows], self.u_of_heads[:, keys].transpose(1, 2), out=weights)
            self.pairs.backward(rows, keys, weights.tril_(rows.start - keys.start))

    def _tiles(self, chunk: slice) -> list[tuple[slice, slice]]:
        """Tiles of queries and keys that cover the causal pairs of a chunk."""
        return [
            (rows, keys)
            for rows in _cut(chunk, self.tile[0])
            for keys in _cut(slice(chunk.start, rows.stop), self.tile[1])
        ]

    def _weights(self, rows: slice, keys: slice) -> Tensor:
        weights = self.pairs.tile(rows, keys)
        return weights if keys.stop <= rows.start else weights.tril_(rows.start - keys.start)

    @property
    def _products(self) -> PackedProducts:
        """Features of a block: the query heads first, then the key heads."""
        if self._made is None:
            heads, dim = self.heads + self.kv_heads, self.q.shape[-1]
            self._made = PackedProducts(heads, dim, self.block, self.q)
        return self._made

    def _across(self, x: Tensor, block: slice) -> Tensor:
        """A block of ``[h, N, c]`` as ``[h, c, BLOCK]``, zeros behind its end."""
        part = x[:, block].transpose(1, 2)
        return pad(part, (0, self.block - part.shape[2])) if part.shape[2] < self.block else part

    def _empty_state(self) -> Tensor:
        count = self.coefficients.shape[-1]
        return self.u.new_zeros(self.kv_heads, self.u.shape[-1], count)

    def _with_coefficients(self, state: Tensor) -> Tensor:
        """``A ∘ S`` for every query head, ``[H, c, F]``, in a buffer that the next call overwrites."""
        ready = self._buffer("ready", (self.heads, *state.shape[1:]))
        by_head = ready.unflatten(0, (self.kv_heads, -1))
        torch.mul(state[:, None], self.coefficients, out=by_head)
        return ready

    def _buffer(self, name: str, shape: Sequence[int]) -> Tensor:
        """The buffer of that name, made once at its largest size."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.q.new_empty(size)
        return self._buffers[name][:size].view(shape)


def _cut(whole: slice, size: int) -> list[slice]:
    """``whole`` in slices of ``size``, the last one shorter."""
    return [
        slice(start, min(start + size, whole.stop))
        for start in range(whole.start, whole.stop, size)
    ]
