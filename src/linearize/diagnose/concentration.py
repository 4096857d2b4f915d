"""How much of a head's score a few dimensions carry, against isotropic Gaussians (figure 5)."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.diagnose.data import (
    TOP,
    Progress,
    gaussian_like,
    generator,
    prepare,
    silent,
    stream,
    top_share,
)
from linearize.grouping import contributions
from linearize.models import Loaded
from linearize.plan import Plan
from linearize.text import Source

__all__ = ["Concentration", "LayerConcentration", "concentration"]


@dataclass(frozen=True)
class LayerConcentration:
    """One layer; lists run over the query heads.

    Attributes:
        layer: zero-based.
        pretrained: share of the largest contributions in the sum of all.
        gaussian: the same for queries and keys from N(0, 1), with their own largest dimensions.
        gaussian_same: the share, there, of the dimensions that are largest in the pretrained head.
    """

    layer: int
    pretrained: list[float]
    gaussian: list[float]
    gaussian_same: list[float]


@dataclass(frozen=True)
class Concentration:
    """Shares of the ``top`` largest of ``dimensions``; equal contributions would give ``uniform``."""

    top: int
    dimensions: int
    uniform: float
    prompts: int
    prompt_length: int
    layers: list[LayerConcentration]


def concentration(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    progress: Progress = silent,
) -> Concentration:
    """Top-5 shares of every query head in the plan's layers, on the calibration prompts.

    The controls have the same shapes, statistic and GQA mapping; only the queries and keys differ.

    Raises:
        PlanError: a layer does not exist. TextError: the text is too short.
    """
    plan = plan or Plan()
    inputs = prepare(loaded, text, plan)
    found = []
    for layer, (prompts,) in stream(inputs, [inputs.prompts]):
        control = gaussian_like(prompts, generator(plan.seed, layer.index, "gauss"))
        pretrained, gaussian = (
            contributions(each.q, each.k, layer.shape.scale).mean(0) for each in (prompts, control)
        )
        largest = pretrained.topk(min(TOP, pretrained.shape[-1]), dim=-1).indices
        same = gaussian.gather(-1, largest).sum(-1) / gaussian.sum(-1)
        found.append(
            LayerConcentration(
                layer.index,
                top_share(pretrained).tolist(),
                top_share(gaussian).tolist(),
                same.tolist(),
            )
        )
        progress(len(found), len(inputs.layers), f"layer {layer.index}")
    dim = inputs.layers[0].shape.head_dim
    top = min(TOP, dim)
    return Concentration(top, dim, top / dim, len(inputs.prompts), len(inputs.prompts[0]), found)
