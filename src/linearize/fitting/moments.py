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
from linearize.ops.partial import exact_partial, with_ones

__all__ = ["Moments", "pair_indices"]

BUDGET = 2**25  # numbers in A of one head; positions are thinned for heads with very many groups


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
        positions: int,
        generator: torch.Generator,
    ) -> Moments:
        """Gather the statistics at random query positions of every sequence.

        Args:
            data: activations with the model's own keys (targets and exact part).
            kernel_k: keys as the kernel sees them, shaped like ``data.k``.
            groups: ``[Hq, d]``; heads: the query heads to gather, all of one group count.
            scale: logit scale; sinks, window: keys kept exact.
            positions: query positions per sequence.
            generator: source of the positions.
        """
        count = int(groups[heads[0]].max()) + 1
        pairs = (count + 1) * (count + 2) // 2
        fitting = max(32, min(positions, BUDGET // ((pairs + 1) ** 2 * len(data))))
        ratio = data.q.shape[1] // data.k.shape[1]
        grams, masses = [], []
        for block in range(len(data)):
            at = sample_positions(data.q.shape[2], fitting, generator)
            target = softmax_outputs(data, scale, block, at)
            causal, exact = _masks(data.q.shape[2], at, sinks, window)
            by_head = []
            for head in heads:
                kv = head // ratio
                moments = _head_moments(
                    data.q[block, head, at],
                    kernel_k[block, kv],
                    data.v[block, kv],
                    groups[head],
                    causal & ~exact,
                    scale,
                )
                outside = torch.zeros_like(moments[:, :1])
                if sinks or window:
                    part = exact_partial(
                        data.q[block, head, at][None, None].float(),
                        data.k[block, kv][None, None].float(),
                        with_ones(data.v[block, kv].float())[None, None],
                        exact,
                        scale,
                    )
                    assert part.log_scale is not None
                    reference = part.log_scale[0, 0, :, :, None].clamp(min=0)
                    shift = torch.exp(part.log_scale[0, 0, :, :, None] - reference)
                    outside = part.sums[0, 0][:, None] * shift
                    moments = moments * torch.exp(-reference)
                by_head.append(_statistics(torch.cat([moments, outside], 1), target[head]))
            grams.append(torch.stack([gram for gram, _ in by_head]))
            masses.append(torch.stack([mass for _, mass in by_head]))
        return Moments(torch.cat(grams, 1), torch.cat(masses, 1), count)

    def pooled(self) -> Moments:
        """The statistics of the learned global kernel: all groups summed into one."""
        rows, columns = pair_indices(self.groups)
        pool = torch.zeros(4, len(rows) + 1, dtype=self.gram.dtype)
        kind = (rows > 0).long() + (columns > 0).long()  # 0: constant, 1: linear, 2: quadratic
        twice = (kind == 2) & (rows != columns)
        pool[kind, torch.arange(len(rows))] = torch.where(twice, 2.0, 1.0).double()
        pool[3, -1] = 1
        return Moments(pool @ self.gram @ pool.T, self.mass @ pool.T, 1)


def _masks(tokens: int, at: Tensor, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    key = torch.arange(tokens)
    causal = at[:, None] >= key
    return causal, causal & ((key < sinks) | (at[:, None] - key < window))


def _head_moments(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """``q [n, d]``, ``k [N, d]``, ``v [N, dv]``, ``mask [n, N]`` -> ``T [n, P, dv + 1]``."""
    count = int(groups.max()) + 1
    member = torch.nn.functional.one_hot(groups.long(), count).T.to(torch.float32)
    scores = (q.float()[None] * member[:, None] * scale) @ k.float().T
    scores = torch.cat([torch.ones_like(scores[:1]), scores])
    u = with_ones(v.float())
    pairs = zip(*pair_indices(count), strict=True)
    return torch.stack([(scores[g] * scores[h] * mask) @ u for g, h in pairs], 1)


def _statistics(moments: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, P + 1, dv + 1]`` and ``[n, dv]`` -> ``A [n, P+1, P+1]`` per channel, ``d [n, P+1]``."""
    moments = moments.double()
    moments = moments / moments[..., -1].abs().amax(1)[:, None, None].clamp(min=1e-300)
    mass = moments[..., -1]
    residual = moments[..., :-1] - target.double()[:, None] * mass[..., None]
    return residual @ residual.transpose(-1, -2) / target.shape[-1], mass
