"""Groups of a head, with the cuts that were possible and why some were made (figure 2a)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.diagnose.data import (
    Progress,
    calibrate,
    check_head,
    oal_groups,
    prepare,
    silent,
    stream,
)
from linearize.grouping import TINY, contributions
from linearize.models import Loaded
from linearize.plan import Plan
from linearize.text import Source

__all__ = ["Cut", "Groups", "HeadGroups", "candidate_cuts", "groups"]


@dataclass(frozen=True)
class Cut:
    """A possible boundary: it separates the ``below`` smallest dimensions from the others.

    Attributes:
        gap: ``ρ_k``, the contribution above the cut over the one below it.
        support: ``S_k``, share of the bootstrap replicates in which everything above exceeds
            everything below by the ratio τ.
        natural: ρ and S reach the plan's τ and γ.
        made: it separates two groups: it is natural, or was added to reach the least number of
            groups, or the plan fixes their number.
    """

    below: int
    gap: float
    support: float
    natural: bool
    made: bool


@dataclass(frozen=True)
class HeadGroups:
    """One query head.

    Attributes:
        layer, head: zero-based.
        order: dimensions by ascending contribution; sorted_contribution: ``χ`` in that order.
        groups: dimensions of every group, the low-contribution bulk first.
        cuts: the candidates, from the lowest.
    """

    layer: int
    head: int
    order: list[int]
    sorted_contribution: list[float]
    groups: list[list[int]]
    cuts: list[Cut]


@dataclass(frozen=True)
class Groups:
    """The bootstrap grouping of one head in every chosen layer, and the settings it depends on."""

    prompts: int
    prompt_length: int
    alpha: float
    gamma: float
    tau: float
    min_groups: int
    bootstrap: int
    heads: list[HeadGroups]


def groups(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    head: int = 0,
    progress: Progress = silent,
) -> Groups:
    """Groups of query head ``head`` in the plan's layers, as a conversion with OAL finds them.

    Raises:
        PlanError: a layer or the head does not exist. TextError: the text is too short.
    """
    plan = plan or Plan()
    inputs = prepare(loaded, text, plan)
    check_head(inputs, head)
    found = []
    for layer, (prompts,) in stream(inputs, [inputs.prompts]):
        calibration = calibrate(layer, plan, prompts)
        member = oal_groups(calibration, layer.shape)[head]
        profile = contributions(prompts.q, prompts.k, layer.shape.scale)[:, head]
        found.append(_describe(layer.index, head, profile, member, plan, calibration.generator(3)))
        progress(len(found), len(inputs.layers), f"layer {layer.index}")
    return Groups(
        len(inputs.prompts),
        len(inputs.prompts[0]),
        plan.alpha,
        plan.gamma,
        plan.tau,
        plan.min_groups,
        plan.bootstrap,
        found,
    )


def candidate_cuts(
    profile: Tensor, *, alpha: float, tau: float, bootstrap: int, source: torch.Generator
) -> list[tuple[int, float, float]]:
    """``(k, ρ_k, S_k)`` of every candidate, from per-prompt contributions ``[P, d]`` of one head.

    Written as in appendix B, one cut at a time; :func:`linearize.grouping.bootstrap_groups` decides
    by the same numbers for all heads at once. ``source`` must be fresh and seeded as it is there.
    """
    prompts, dim = profile.shape
    mean = profile.mean(0)
    order = mean.argsort(stable=True)
    drawn = torch.randint(prompts, (bootstrap, prompts), generator=source)
    resampled = torch.stack([profile[row].mean(0) for row in drawn])[:, order]
    found = []
    for k in range(max(1, dim - math.ceil(alpha * dim)), dim):
        gap = float(mean[order[k]] / mean[order[k - 1]].clamp(min=TINY))
        ratio = resampled[:, k:].amin(1) / resampled[:, :k].amax(1).clamp(min=TINY)
        found.append((k, gap, float((ratio >= tau).double().mean())))
    return found


def _describe(
    layer: int, head: int, profile: Tensor, member: Tensor, plan: Plan, source: torch.Generator
) -> HeadGroups:
    mean = profile.mean(0)
    order = mean.argsort(stable=True)
    sorted_member = member[order]
    candidates = candidate_cuts(
        profile, alpha=plan.alpha, tau=plan.tau, bootstrap=plan.bootstrap, source=source
    )
    return HeadGroups(
        layer=layer,
        head=head,
        order=order.tolist(),
        sorted_contribution=mean[order].tolist(),
        groups=[(member == g).nonzero().flatten().tolist() for g in range(int(member.max()) + 1)],
        cuts=[
            Cut(
                below=k,
                gap=gap,
                support=support,
                natural=gap >= plan.tau and support >= plan.gamma,
                made=bool(sorted_member[k] != sorted_member[k - 1]),
            )
            for k, gap, support in candidates
        ],
    )
