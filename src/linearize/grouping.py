"""Which dimensions belong together: contribution profiles and the groups cut from them.

OAL paper, equation 2 and appendix B; SPEC section 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["bootstrap_groups", "contributions", "fixed_groups"]

TINY = 1e-12


def contributions(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Mean ``|q_ir k_jr · scale|`` over the causal pairs of every sequence, in O(N d).

    Args:
        q: ``[P, Hq, N, d]``; k: ``[P, Hkv, N, d]``; scale: logit scale.

    Returns:
        ``[P, Hq, d]`` in fp64.
    """
    tokens = q.shape[2]
    prefix = k.double().abs().cumsum(2).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    total = (q.double().abs() * prefix).sum(2)
    return total * abs(scale) / (tokens * (tokens + 1) / 2)


def bootstrap_groups(
    profile: Tensor,
    *,
    alpha: float,
    gamma: float,
    tau: float,
    min_groups: int,
    bootstrap: int,
    generator: torch.Generator,
) -> Tensor:
    """Cut each head's sorted profile where gaps are large and stable under resampled prompts.

    Args:
        profile: per-prompt contributions ``[P, Hq, d]``.
        alpha: fraction of dimensions whose upper boundaries are candidates.
        gamma: bootstrap support a cut needs; tau: ratio a gap needs.
        min_groups: cuts are added by descending (support, gap) until this many groups.
        bootstrap: replicates; generator: source of the resampled prompts.

    Returns:
        integers ``[Hq, d]``; group 0 is the low-contribution bulk.
    """
    prompts, _, dim = profile.shape
    mean = profile.mean(0)
    order = mean.argsort(dim=-1, stable=True)
    first = max(1, dim - math.ceil(alpha * dim))
    gap, _ = _separation(mean.gather(-1, order)[None], first)
    drawn = torch.randint(prompts, (bootstrap, prompts), generator=generator)
    counts = torch.zeros(bootstrap, prompts, dtype=profile.dtype)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=profile.dtype))
    resampled = torch.einsum("bp,phd->bhd", counts / prompts, profile)
    _, ratio = _separation(resampled.gather(-1, order.expand_as(resampled)), first)
    support = (ratio >= tau).to(profile.dtype).mean(0)

    kept = (gap[0] >= tau) & (support >= gamma)
    for head in range(len(kept)):
        missing = min_groups - 1 - int(kept[head].sum())
        unused = [i for i in range(kept.shape[1]) if not kept[head, i]]
        unused.sort(key=lambda i: (-float(support[head, i]), -float(gap[0, head, i])))
        kept[head, unused[: max(0, missing)]] = True
    cuts = torch.nn.functional.pad(kept, (first, 0))
    return _from_cuts(cuts, order)


def fixed_groups(profile: Tensor, count: int) -> Tensor:
    """Split every head at the ``count - 1`` largest adjacent gaps (ratios) of its sorted profile.

    Args:
        profile: contributions ``[Hq, d]``; count: groups per head, at most ``d``.

    Returns:
        integers ``[Hq, d]``; more groups only subdivide fewer.
    """
    order = profile.argsort(dim=-1, stable=True)
    gap, _ = _separation(profile.gather(-1, order)[None], 1)
    best = gap[0].argsort(dim=-1, descending=True, stable=True)[:, : count - 1]
    cuts = torch.zeros_like(gap[0], dtype=torch.bool).scatter_(1, best, True)
    return _from_cuts(torch.nn.functional.pad(cuts, (1, 0)), order)


def _separation(ordered: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Adjacent gaps, and smallest-above over largest-below, at the cuts ``first … d-1`` (last axis)."""
    adjacent = ordered[..., 1:] / ordered[..., :-1].clamp(min=TINY)
    below = ordered.cummax(-1).values[..., :-1]
    above = ordered.flip(-1).cummin(-1).values.flip(-1)[..., 1:]
    return adjacent[..., first - 1 :], (above / below.clamp(min=TINY))[..., first - 1 :]


def _from_cuts(cuts: Tensor, order: Tensor) -> Tensor:
    """``cuts[h, k]``: a boundary before the k-th smallest dimension of ``order``."""
    return torch.empty_like(order).scatter_(-1, order, cuts.long().cumsum(-1))
