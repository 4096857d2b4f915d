"""Sufficient statistics of output matching for grouped quadratic kernels.

For a fixed query the numerator and denominator are linear in ``M = L Lᵀ`` with moments
``T_p = Σ_j (s̄_g s̄_h)_j [v_j; 1]``, one for each pair ``p = (g ≥ h)``. With the target y, the error of
the normalised output is ``mᵀ A m / (dᵀ m)²``: ``d_p`` is the denominator of ``T_p`` and ``A`` the Gram
matrix of the residuals ``T_p[:dv] − y d_p``. Only A and d are kept, so the size of a fitting position
depends on the number of groups alone. Keys kept exact enter as one further moment of coefficient 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.fitting.data import Activations, sample_positions, softmax_outputs
from linearize.ops.partial import exact_partial, log_held, with_ones
from linearize.ops.quadratic import feature_count, quadratic_features

__all__ = ["Moments", "pair_indices"]

BUDGET = 2**23  # numbers in A of one head; positions are thinned for heads with very many groups
CHUNK = 512


def pair_indices(groups: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the lower triangle of ``M [G+1, G+1]``, row by row."""
    rows, columns = torch.tril_indices(groups + 1, groups + 1)
    return rows, columns


@dataclass(frozen=True)
class Moments:
    """Statistics of heads that share a group count G, with ``P = (G+1)(G+2)/2`` pairs.

    Attributes:
        gram: ``A``, ``[H, n, P + 1, P + 1]``, divided by the value dimension; fp64.
        mass: ``d``, ``[H, n, P + 1]``; fp64. The last index is the exact part (zero if none).
        groups: G.
    """

    gram: Tensor
    mass: Tensor
    groups: int

    @staticmethod
    def collect(
        data: Activations,
        kernel_k: Tensor,
        groups: Tensor,
        heads: list[int],
        *,
        scale: float,
        sinks: int,
        window: int,
        saturation: int | None,
        positions: int,
        generator: torch.Generator,
    ) -> Moments:
        """Gather the statistics at random query positions of every sequence.

        Args:
            data: activations with the model's own keys (targets and exact part).
            kernel_k: keys as the kernel sees them, shaped like ``data.k``.
            groups: ``[Hq, d]``; heads: the query heads to gather, all of one group count.
            scale: logit scale; sinks, window: keys kept exact; saturation: see the pairwise definition.
            positions: query positions per sequence.
            generator: source of the positions.
        """
        count = int(groups[heads[0]].max()) + 1
        pairs = (count + 1) * (count + 2) // 2
        fitting = max(32, min(positions, BUDGET // ((pairs + 1) ** 2 * len(data))))
        statistics = []
        for block in range(len(data)):
            at = sample_positions(data.q.shape[2], fitting, generator)
            target = softmax_outputs(data, scale, block)[:, at]
            by_head = [
                _sequence_moments(
                    data, kernel_k, groups[head], block, head, at, scale, sinks, window, saturation
                )
                for head in heads
            ]
            statistics.append(
                [_statistics(one, target[head]) for one, head in zip(by_head, heads, strict=True)]
            )
        gram, mass = (
            torch.stack(
                [torch.cat([block[row][i] for block in statistics]) for row in range(len(heads))]
            )
            for i in range(2)
        )
        return Moments(gram, mass, count)

    def pooled(self) -> Moments:
        """The statistics of the learned global kernel: all groups summed into one."""
        rows, columns = pair_indices(self.groups)
        pool = torch.zeros(4, len(rows) + 1, dtype=self.gram.dtype)
        kind = (rows > 0).long() + (columns > 0).long()  # 0: constant, 1: linear, 2: quadratic
        twice = (kind == 2) & (rows != columns)
        pool[kind, torch.arange(len(rows))] = torch.where(twice, 2.0, 1.0).double()
        pool[3, -1] = 1
        return Moments(pool @ self.gram @ pool.T, self.mass @ pool.T, 1)


def _sequence_moments(
    data: Activations,
    kernel_k: Tensor,
    groups: Tensor,
    block: int,
    head: int,
    at: Tensor,
    scale: float,
    sinks: int,
    window: int,
    saturation: int | None,
) -> Tensor:
    """Moments of one sequence and head at positions ``at``: ``[n, P + 1, dv + 1]``, exact part last.

    As in the chunked engine: keys that left the window before a chunk are met through the packed
    state, those that leave inside it pair by pair.
    """
    kv = head // (data.q.shape[1] // data.k.shape[1])
    q, k = data.q[block, head].float(), data.k[block, kv].float()
    seen, u = kernel_k[block, kv].float(), with_ones(data.v[block, kv].float())
    tokens, width = u.shape
    outside_sinks = (torch.arange(tokens) >= sinks)[:, None]
    readout = _PairReadout(groups, scale)
    state = torch.zeros(readout.features, width)
    absorbed = 0
    parts = []
    for start in range(0, tokens, CHUNK):
        stop = min(start + CHUNK, tokens)
        here = at[(at >= start) & (at < stop)]
        gone = max(0, start - window + 1)
        if gone > absorbed:
            new = slice(absorbed, gone)
            state += quadratic_features(seen[new]).T @ (u[new] * outside_sinks[new])
            absorbed = gone
        if not len(here):
            continue
        distance = here[:, None] - torch.arange(stop)
        moments = readout(q[here], state)
        near = slice(absorbed, stop)
        through = (distance[:, near] >= window) & (distance[:, near] >= 0) & outside_sinks[near, 0]
        moments = moments + _local_moments(q[here], seen[near], u[near], through, groups, scale)
        exact = torch.zeros_like(moments[:, :1])
        if sinks or window:
            kept = (distance >= 0) & ((distance < window) | ~outside_sinks[:stop, 0])
            part = exact_partial(
                q[here][None, None], k[:stop][None, None], u[:stop][None, None], kept, scale
            )
            assert part.log_scale is not None
            log_scale = part.log_scale[0, 0, :, :, None]
            reference = log_scale.clamp(min=0)
            exact = part.sums[0, 0][:, None] * torch.exp(log_scale - reference)
            moments = moments * torch.exp(-reference)
            if saturation is not None:
                held = log_held(here + 1 - kept.sum(1), saturation, moments.dtype).exp()
                moments = moments * held[:, None, None]
        parts.append(torch.cat([moments, exact], 1))
    return torch.cat(parts)


class _PairReadout:
    """Reads the moments of all pairs from one packed state: the pairs partition its features."""

    def __init__(self, groups: Tensor, scale: float) -> None:
        dim = len(groups)
        self.features = feature_count(dim)
        member = torch.cat([torch.zeros(1, dtype=torch.long), groups.long() + 1])
        rows, columns = torch.triu_indices(dim, dim)
        zero = torch.zeros(dim + 1, dtype=torch.long)
        first = torch.cat([member, torch.maximum(member[rows + 1], member[columns + 1])])
        second = torch.cat([zero, torch.minimum(member[rows + 1], member[columns + 1])])
        self._columns = [
            ((first == g) & (second == h)).nonzero()[:, 0]
            for g, h in zip(*pair_indices(int(groups.max()) + 1), strict=True)
        ]
        # s_g s_h sums ordered pairs: two for r ≠ t of one group; across groups each pair is once
        twice = (rows != columns) & (groups[rows] == groups[columns])
        power = torch.cat(
            [torch.ones(1), torch.full((dim,), scale), torch.full((len(rows),), scale**2)]
        )
        power[1 + dim :][twice] *= 2
        self._factor = power

    def __call__(self, q: Tensor, state: Tensor) -> Tensor:
        """``q [n, d]``, ``state [F, dv + 1]`` -> ``[n, P, dv + 1]``."""
        features = quadratic_features(q) * self._factor
        return torch.stack([features[:, c] @ state[c] for c in self._columns], 1)


def _local_moments(
    q: Tensor, k: Tensor, u: Tensor, mask: Tensor, groups: Tensor, scale: float
) -> Tensor:
    """``q [n, d]``, ``k [m, d]``, ``u [m, dv + 1]``, ``mask [n, m]`` -> ``T [n, P, dv + 1]``."""
    count = int(groups.max()) + 1
    member = torch.nn.functional.one_hot(groups.long(), count).T.to(q.dtype)
    scores = (q[None] * member[:, None] * scale) @ k.T
    scores = torch.cat([mask[None].to(q.dtype), scores * mask])
    pairs = zip(*pair_indices(count), strict=True)
    return torch.stack([(scores[g] * scores[h]) @ u for g, h in pairs], 1)


def _statistics(moments: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, P + 1, dv + 1]`` and ``[n, dv]`` -> ``A [n, P+1, P+1]`` per channel, ``d [n, P+1]``."""
    moments = moments.double()
    moments = moments / moments[..., -1].abs().amax(1)[:, None, None].clamp(min=1e-300)
    mass = moments[..., -1]
    residual = moments[..., :-1] - target.double()[:, None] * mass[..., None]
    return residual @ residual.transpose(-1, -2) / target.shape[-1], mass
