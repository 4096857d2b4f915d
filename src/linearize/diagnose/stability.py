"""Whether the profile of a head depends on the input or its length (figure 6 and table 4)."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.stats import spearmanr
from torch import Tensor

from linearize.diagnose.data import (
    TOP,
    Progress,
    check_head,
    prepare,
    silent,
    stream,
)
from linearize.grouping import contributions
from linearize.models import Loaded
from linearize.plan import Plan
from linearize.text import Source, evenly

__all__ = ["HeadStability", "Prefix", "Stability", "prefix_lengths", "spearman", "stability"]


@dataclass(frozen=True)
class Prefix:
    """The profile on the first ``length`` tokens of a sequence, against the whole sequence.

    Attributes:
        shares: ``χ_r / Σ χ`` of the whole sequence's largest dimensions, in their order.
        spearman: rank correlation of the two profiles. overlap: how many of the largest they share.
    """

    length: int
    shares: list[float]
    spearman: float
    overlap: int


@dataclass(frozen=True)
class HeadStability:
    """One query head.

    Attributes:
        layer, head: zero-based.
        spearman: rank correlation of the profiles on calibration and on held-out prompts.
        overlap: how many of the five largest dimensions they share.
        calibration, heldout: the two profiles ``χ``; only for the head asked for, else empty.
        top: the largest dimensions of the whole evaluation sequence.
        prefixes: by ascending length.
    """

    layer: int
    head: int
    spearman: float
    overlap: int
    calibration: list[float]
    heldout: list[float]
    top: list[int]
    prefixes: list[Prefix]


@dataclass(frozen=True)
class Stability:
    """Every query head of the chosen layers.

    Attributes:
        head: the head shown in detail, the same in every layer.
        prompts, prompt_length: of the calibration and the held-out prompts alike.
        lengths: of the prefixes. top: how many dimensions an overlap counts.
    """

    head: int
    prompts: int
    prompt_length: int
    lengths: list[int]
    top: int
    heads: list[HeadStability]


def stability(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    head: int = 0,
    progress: Progress = silent,
) -> Stability:
    """Compare profiles on calibration prompts, held-out prompts and prefixes of one sequence.

    Held-out prompts are taken evenly from the evaluation blocks, as many and as long as the
    calibration prompts; the sequence is the first evaluation block.

    Raises:
        PlanError: a layer or the head does not exist. TextError: the text is too short.
    """
    plan = plan or Plan()
    inputs = prepare(loaded, text, plan)
    check_head(inputs, head)
    evaluation, _, _ = inputs.blocks()
    held_out = inputs.tokens[: len(evaluation) * plan.block]
    prompts = evenly(held_out, len(inputs.prompts), len(inputs.prompts[0]))
    lengths = prefix_lengths(plan.block)
    found: list[HeadStability] = []
    parts = [inputs.prompts, prompts, evaluation[:1]]
    for done, (layer, (calibration, heldout, sequence)) in enumerate(stream(inputs, parts), 1):
        scale = layer.shape.scale
        before = contributions(calibration.q, calibration.k, scale).mean(0)
        after = contributions(heldout.q, heldout.k, scale).mean(0)
        by_length = [
            contributions(sequence.q[:, :, :n], sequence.k[:, :, :n], scale)[0] for n in lengths
        ]
        for each in range(layer.shape.query_heads):
            detail = each == head
            found.append(
                HeadStability(
                    layer=layer.index,
                    head=each,
                    spearman=spearman(before[each], after[each]),
                    overlap=_overlap(before[each], after[each]),
                    calibration=before[each].tolist() if detail else [],
                    heldout=after[each].tolist() if detail else [],
                    top=_largest(by_length[-1][each]),
                    prefixes=[
                        _prefix(n, profile[each], by_length[-1][each])
                        for n, profile in zip(lengths, by_length, strict=True)
                    ],
                )
            )
        progress(done, len(inputs.layers), f"layer {layer.index}")
    return Stability(head, len(prompts), len(prompts[0]), lengths, min(TOP, len(before[0])), found)


def prefix_lengths(block: int) -> list[int]:
    """The paper's lengths as fractions of the block: 128, 512, 1024, 2048 and 4096 of 4096."""
    return sorted({max(1, block // part) for part in (32, 8, 4, 2, 1)})


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation of two profiles ``[d]``; ties take their mean rank."""
    return float(spearmanr(first.numpy(), second.numpy()).statistic)


def _prefix(length: int, profile: Tensor, whole: Tensor) -> Prefix:
    shares = (profile / profile.sum())[_largest(whole)]
    return Prefix(length, shares.tolist(), spearman(profile, whole), _overlap(profile, whole))


def _overlap(first: Tensor, second: Tensor) -> int:
    return len(set(_largest(first)) & set(_largest(second)))


def _largest(profile: Tensor) -> list[int]:
    return profile.argsort(descending=True, stable=True)[:TOP].tolist()
