"""The randomization test's replicates: the hybrid on a thousand random subsets, as fast as it goes.

The output error of a replicate is a sum over heads, and a head's error depends on its own subset
alone. So every distinct subset of a head is evaluated once, however many replicates hold it, and
nothing is approximated: all heads, sequences, positions and replicates are there. Kernels that
begin with a linear map need only the columns of the selected coordinates; those are written out
below, in fp32, for one head at a time. Any other kernel goes through the definition in
:mod:`linearize.diagnose.hybrid`, and so does a subset whose fp32 sums overflow or vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from linearize.diagnose.hybrid import Sampled, hybrid_outputs
from linearize.errors import PlanError
from linearize.kernels import Kernel
from linearize.kernels.dijiang import DiJiang
from linearize.kernels.performer import Performer
from linearize.kernels.spectraformer import OFFSET, SpectraFormer, _Map
from linearize.kernels.taylorshift import TaylorShift

__all__ = ["Subsets", "control_errors", "draw_subsets", "has_fast_path"]

SEGMENT = 1024  # keys at a time: features and weights stay in the processor's cache
BATCH = 2**18  # numbers of one intermediate result
VANISHED = 1e-30


@dataclass(frozen=True)
class Subsets:
    """What the replicates select in one head.

    Attributes:
        distinct: the distinct subsets, coordinates ascending, ``[U, c]``.
        replicate: which of them each replicate has, ``[replicates]``.
    """

    distinct: Tensor
    replicate: Tensor


def draw_subsets(selected: Tensor, count: int, source: torch.Generator) -> list[Subsets]:
    """Random subsets of every head's unselected coordinates, as large as its selection.

    Args:
        selected: boolean ``[Hq, d]``. count: replicates, drawn independently and uniformly.

    Raises:
        PlanError: a head has selected more coordinates than it has left.
    """
    found = []
    for head, row in enumerate(selected):
        bulk, size = (~row).nonzero().flatten(), int(row.sum())
        if size > len(bulk):
            raise PlanError(
                f"random subsets of {size} coordinates in head {head}",
                f"only {len(bulk)} in its bulk",
                "Set alpha to 0.5 or less, or leave the randomization test out.",
            )
        drawn = torch.rand(count, len(bulk), generator=source).argsort(1)[:, :size]
        distinct, replicate = bulk[drawn].sort(1).values.unique(dim=0, return_inverse=True)
        found.append(Subsets(distinct, replicate))
    return found


def has_fast_path(kernel: Kernel) -> bool:
    """Whether the replicates of this kernel avoid the definition."""
    return type(kernel) in _RESTRICTIONS


@torch.no_grad()
def control_errors(
    kernel: Kernel,
    data: Sampled,
    subsets: list[Subsets],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Mean square output error of every replicate over heads, positions and channels.

    Args:
        subsets: of every query head. progress: called with (tasks done, tasks in all).

    Returns:
        ``[replicates, B]`` in fp64.
    """
    run = _by_restriction if has_fast_path(kernel) else _by_definition
    errors = run(kernel, data, subsets, progress)
    return torch.stack([errors[head][each.replicate] for head, each in enumerate(subsets)]).mean(0)


def _by_definition(
    kernel: Kernel, data: Sampled, subsets: list[Subsets], progress: Callable[[int, int], None]
) -> list[Tensor]:
    """``[U, B]`` of every head, the u-th subsets of all heads at once."""
    heads, dim = data.q.shape[1], data.q.shape[3]
    errors = [torch.zeros(len(each.distinct), len(data), dtype=torch.float64) for each in subsets]
    most = max(len(each) for each in errors)
    for row in range(most):
        selected = torch.zeros(heads, dim, dtype=torch.bool)
        for head, each in enumerate(subsets):
            selected[head, each.distinct[row % len(each.distinct)]] = True
        for sequence in range(len(data)):
            error = _definition(kernel, data, sequence, selected)
            for head, found in enumerate(errors):
                if row < len(found):
                    found[row, sequence] = error[head]
        progress(row + 1, most)
    return errors


def _definition(kernel: Kernel, data: Sampled, sequence: int, selected: Tensor) -> Tensor:
    """``[Hq]``."""
    q, k, v = (x[sequence : sequence + 1] for x in (data.q, data.k, data.v))
    output = hybrid_outputs(kernel, q, k, v, selected, scale=data.scale, query_at=data.at[sequence])
    return (output[0] - data.target[sequence]).square().mean((1, 2))


def _by_restriction(
    kernel: Kernel, data: Sampled, subsets: list[Subsets], progress: Callable[[int, int], None]
) -> list[Tensor]:
    """``[U, B]`` of every head, a task for each head and sequence, as many at once as torch has threads."""
    heads, sequences = len(subsets), len(data)
    restrict = _RESTRICTIONS[type(kernel)](kernel)

    def task(number: int) -> Tensor:
        with torch.no_grad():
            head, sequence = divmod(number, sequences)
            return _head_errors(kernel, restrict, data, sequence, head, subsets[head].distinct)

    results = []
    with _one_thread_each() as workers, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(task, number) for number in range(heads * sequences)]
        try:
            for done, future in enumerate(futures, 1):
                results.append(future.result())
                progress(done, len(futures))
        finally:
            for future in futures:
                future.cancel()
    return [
        torch.stack(results[head * sequences : (head + 1) * sequences], 1) for head in range(heads)
    ]


def _head_errors(
    kernel: Kernel, restrict: Restrict, data: Sampled, sequence: int, head: int, subsets: Tensor
) -> Tensor:
    """Errors ``[U]`` of one head on one sequence."""
    kv = head // (data.q.shape[1] // data.k.shape[1])
    at, target = data.at[sequence], data.target[sequence, head]
    tokens = int(at[-1]) + 1
    q, k = data.q[sequence, head], data.k[sequence, kv, :tokens]
    logits = (q.double() * data.scale) @ k.double().T
    logits = logits.masked_fill(~data.causal(sequence)[:, :tokens], -torch.inf)
    logits = (logits - logits.amax(1, keepdim=True)).float()
    v = data.v[sequence, kv, :tokens].float()
    u = torch.cat([v, v.new_ones(tokens, 1)], 1)
    queries, keys = q.float().T.contiguous(), k.float().T.contiguous()  # by coordinate
    starts = range(0, tokens, SEGMENT)
    first = [int((at < start).sum()) for start in starts]  # earlier queries see none of these keys
    pieces = [
        logits[row:, start : start + SEGMENT] for row, start in zip(first, starts, strict=True)
    ]

    width = max(restrict(head, subsets[:1]).features, len(at)) * min(SEGMENT, tokens)
    errors = []
    for part in subsets.split(max(1, BATCH // width)):
        kernel_part = restrict(head, part)
        some_q = queries[part].transpose(1, 2)  # [R, n, c]
        part_keys = keys[part].transpose(1, 2)  # [R, N, c]
        features_q, negative = kernel_part.queries(some_q), some_q * -data.scale
        sums = u.new_zeros(len(part), len(at), u.shape[1])
        for piece, row, start in zip(pieces, first, starts, strict=True):
            some_k = part_keys[:, start : start + SEGMENT]
            features, log = kernel_part.keys(some_k)
            exponent = torch.baddbmm(piece, negative[:, row:], some_k.transpose(1, 2))
            if log is not None:
                exponent += log.transpose(1, 2)
            values = kernel_part.weights(features_q[:, row:] @ features.transpose(1, 2))
            weights = values.mul_(exponent.exp_())
            sums[:, row:] += weights @ u[start : start + SEGMENT]
        errors.append(_checked_errors(kernel, data, sequence, head, part, sums, target))
    return torch.cat(errors)


def _checked_errors(
    kernel: Kernel,
    data: Sampled,
    sequence: int,
    head: int,
    subsets: Tensor,
    sums: Tensor,
    target: Tensor,
) -> Tensor:
    """Errors from the sums ``[R, n, dv + 1]``; by definition where these left the range of fp32."""
    output = sums[..., :-1].double() / sums[..., -1:].double()
    errors = (output - target).square().mean((1, 2))
    sound = (sums[..., -1] > VANISHED).all(1) & errors.isfinite()
    for row in (~sound).nonzero().flatten().tolist():
        selected = torch.zeros(data.q.shape[1], data.q.shape[3], dtype=torch.bool)
        selected[head, subsets[row]] = True
        errors[row] = _definition(kernel, data, sequence, selected)[head]
    return errors


class Restriction(Protocol):
    """One head's kernel on R subsets of c coordinates each, without factors that cancel per query.

    Attributes:
        features: how many numbers describe a key.
    """

    features: int

    def queries(self, q: Tensor) -> Tensor:
        """``[R, n, c]`` -> ``[R, n, F]``."""
        ...

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[R, m, c]`` -> ``[R, m, F]`` and the logarithm of a factor of each key, ``[R, m, 1]``."""
        ...

    def weights(self, products: Tensor) -> Tensor:
        """The kernel from the inner products ``[R, n, m]``, which may be overwritten."""
        ...


Restrict = Callable[[int, Tensor], Restriction]  # (query head, subsets [R, c])


class _Exponential:
    """Positive features ``exp(x W)`` behind a query's maximum; ``matrix`` is ``[R, c, F]``."""

    def __init__(self, matrix: Tensor, half: float) -> None:
        self.matrix, self.half = matrix, half
        self.features = matrix.shape[-1]

    def queries(self, q: Tensor) -> Tensor:
        projected = q @ self.matrix
        return (projected - projected.amax(-1, keepdim=True)).exp_()

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return (k @ self.matrix).exp_(), k.square().sum(-1, keepdim=True) * -self.half

    def weights(self, products: Tensor) -> Tensor:
        return products


class _Softmax(_Exponential):
    """Features ``softmax(x W)``; those of the query are multiplied by ``weight [F]``."""

    def __init__(self, matrix: Tensor, weight: Tensor) -> None:
        super().__init__(matrix, 0.0)
        self.weight = weight

    def queries(self, q: Tensor) -> Tensor:
        return super().queries(q) * self.weight

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        features = (k @ self.matrix).exp_()
        return features, -features.sum(-1, keepdim=True).log_()


class _Offset(_Exponential):
    """Features ``exp(l − max l) + offset`` with ``l = x W + bias``."""

    def __init__(self, matrix: Tensor, bias: Tensor, offset: float) -> None:
        super().__init__(matrix, 0.0)
        self.bias, self.offset = bias, offset

    def queries(self, q: Tensor) -> Tensor:
        log = torch.baddbmm(self.bias, q, self.matrix)
        return (log - log.amax(-1, keepdim=True)).exp_().add_(self.offset)

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.queries(k), None


class _Sphere:
    """``(1 + t)² + 1`` of ``t = τ q̂·k̂``."""

    def __init__(self, temperature: float, size: int) -> None:
        self.temperature, self.features = temperature, size

    def queries(self, q: Tensor) -> Tensor:
        return self.keys(q)[0] * self.temperature

    def keys(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return k / k.square().sum(-1, keepdim=True).sqrt_().clamp_(min=1e-12), None

    def weights(self, products: Tensor) -> Tensor:
        return products.add_(1).square_().add_(1)


def _performer(kernel: Kernel) -> Restrict:
    kernel = cast(Performer, kernel)
    scale = kernel.shape.scale
    matrix = kernel.projection.float().transpose(1, 2) * scale**0.5  # [Hq, d, m]
    return lambda head, subsets: _Exponential(matrix[head][subsets], scale / 2)


def _dijiang(kernel: Kernel) -> Restrict:
    kernel = cast(DiJiang, kernel)
    matrix = kernel.projection.float() * kernel.shape.scale**0.5  # [d, F]
    weight = torch.exp(2 * kernel.theta.float())
    return lambda head, subsets: _Softmax(matrix[subsets], weight[head])


def _spectraformer(kernel: Kernel) -> Restrict:
    made = cast(_Map, kernel.map())
    matrix = made.omega.T * (made.slope * made.scale**0.5)
    matrix = torch.cat([matrix, torch.zeros_like(matrix[:, :1])], 1).float()  # [d, P + 1]
    bias = made.bias.clone()
    bias[-1] += made.slope
    offset = OFFSET / float(made.factor)
    return lambda head, subsets: _Offset(matrix[subsets], bias.float(), offset)


def _taylorshift(kernel: Kernel) -> Restrict:
    kernel = cast(TaylorShift, kernel)
    temperature = kernel.temperature.tolist()
    return lambda head, subsets: _Sphere(temperature[head], subsets.shape[1])


_RESTRICTIONS: dict[type[Kernel], Callable[[Kernel], Restrict]] = {
    Performer: _performer,
    DiJiang: _dijiang,
    SpectraFormer: _spectraformer,
    TaylorShift: _taylorshift,
}


@contextmanager
def _one_thread_each() -> Iterator[int]:
    """Torch with one thread, for as many workers of ours as it had."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
