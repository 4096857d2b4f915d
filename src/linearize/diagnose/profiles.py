"""Contribution profile of a head, with its queries and keys (OAL paper, figures 1 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.diagnose.data import (
    Progress,
    check_head,
    prepare,
    silent,
    stream,
    top_share,
)
from linearize.grouping import contributions
from linearize.models import Loaded
from linearize.plan import Plan
from linearize.text import Source

__all__ = ["HeadProfile", "Profiles", "profiles"]


@dataclass(frozen=True)
class HeadProfile:
    """One query head; lists run over its dimensions.

    Attributes:
        layer, head, kv_head: zero-based.
        query, key: mean ``|q_r|`` and ``|k_r|`` over all tokens, after position embedding.
        contribution: ``χ_r``, mean ``|q_r k_r · scale|`` over causal pairs, prompts weighing equally.
        order: dimensions by descending contribution.
        top_share: share of the five largest contributions in the sum of all.
    """

    layer: int
    head: int
    kv_head: int
    query: list[float]
    key: list[float]
    contribution: list[float]
    order: list[int]
    top_share: float


@dataclass(frozen=True)
class Profiles:
    """One head in every chosen layer, on ``prompts`` prompts of ``prompt_length`` tokens."""

    prompts: int
    prompt_length: int
    heads: list[HeadProfile]


def profiles(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    head: int = 0,
    progress: Progress = silent,
) -> Profiles:
    """Profiles of query head ``head`` in the plan's layers, on the calibration prompts.

    Raises:
        PlanError: a layer or the head does not exist. TextError: the text is too short.
    """
    inputs = prepare(loaded, text, plan or Plan())
    check_head(inputs, head)
    found = []
    for layer, (prompts,) in stream(inputs, [inputs.prompts]):
        kv_head = head // layer.shape.ratio
        profile = contributions(prompts.q, prompts.k, layer.shape.scale).mean(0)[head]
        found.append(
            HeadProfile(
                layer=layer.index,
                head=head,
                kv_head=kv_head,
                query=prompts.q[:, head].double().abs().mean((0, 1)).tolist(),
                key=prompts.k[:, kv_head].double().abs().mean((0, 1)).tolist(),
                contribution=profile.tolist(),
                order=profile.argsort(descending=True, stable=True).tolist(),
                top_share=float(top_share(profile)),
            )
        )
        progress(len(found), len(inputs.layers), f"layer {layer.index}")
    return Profiles(len(inputs.prompts), len(inputs.prompts[0]), found)
