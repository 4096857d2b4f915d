"""What the diagnostics share: the parts of a text, one layer's activations, seeds, rank statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.capture import capture
from linearize.convert import check_layers, check_reach
from linearize.errors import PlanError
from linearize.fitting import Activations, Calibration
from linearize.kernels import HeadShape
from linearize.kernels.oal import OAL
from linearize.models import AttentionLayer, Loaded, attention_layers
from linearize.plan import Plan
from linearize.text import Source, divide, split_blocks, tokenize

__all__ = [
    "TOP",
    "Inputs",
    "Progress",
    "calibrate",
    "check_head",
    "gaussian_like",
    "generator",
    "oal_groups",
    "prepare",
    "silent",
    "stream",
    "top_share",
]

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what was done

TOP = 5  # how many dimensions the concentration and the overlap look at, as in the paper


@dataclass(frozen=True)
class Inputs:
    """A model, its layers under examination and a text, divided as for a conversion.

    Attributes:
        loaded: the model. plan: the settings. layers: the chosen attention layers, ascending.
        tokens: the text. prompts: the calibration prompts, ``[n]`` each.
    """

    loaded: Loaded
    plan: Plan
    layers: list[AttentionLayer]
    tokens: Tensor
    prompts: list[Tensor]

    def blocks(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Evaluation, fitting and validation blocks: exactly as many as the plan says.

        Raises:
            TextError: the text is too short, with the number of tokens missing.
        """
        plan = self.plan
        first, second = plan.skip_blocks, plan.skip_blocks + plan.fit_blocks
        need = second + plan.validation_blocks
        if not first:
            raise PlanError(
                "an evaluation on held-out blocks",
                "skip_blocks=0, which leaves none",
                "Set skip_blocks to the number of evaluation blocks.",
            )
        blocks = split_blocks(self.tokens, plan.block, need=need)
        return blocks[:first], blocks[first:second], blocks[second:need]


def prepare(loaded: Loaded, text: Source | None, plan: Plan) -> Inputs:
    """Check the layers and divide the text (the standard library's documentation by default).

    Raises:
        PlanError: layers outside the model, converted, or with attention that is not plain causal.
        TextError: the text has fewer than two blocks.
    """
    layers = check_layers(loaded.model, attention_layers(loaded.model), plan)
    check_reach(plan)
    tokens = tokenize(text, loaded.tokenizer)
    return Inputs(loaded, plan, layers, tokens, divide(tokens, plan).prompts)


def stream(
    inputs: Inputs, parts: Sequence[Sequence[Tensor]], layers: Sequence[int] | None = None
) -> Iterator[tuple[AttentionLayer, list[Activations]]]:
    """One layer after the other, with the activations of every part (sequences of one length).

    ``layers`` restricts it to some of the chosen ones.
    """
    chosen = {each.index: each for each in inputs.layers if layers is None or each.index in layers}
    everything = [block for part in parts for block in part]
    for arrived in capture(inputs.loaded.model, everything, sorted(chosen)):
        start, made = 0, []
        for part in parts:
            made.append(arrived.activations(start, start + len(part)))
            start += len(part)
        yield chosen[arrived.index], made


def check_head(inputs: Inputs, head: int) -> int:
    """The head, if every chosen layer has it.

    Raises:
        PlanError: one has not.
    """
    fewest = min(layer.shape.query_heads for layer in inputs.layers)
    if not 0 <= head < fewest:
        raise PlanError(f"head {head}", f"query heads 0-{fewest - 1}", "Choose one of these.")
    return head


def calibrate(
    layer: AttentionLayer,
    plan: Plan,
    prompts: Activations,
    fit: Activations | None = None,
    validation: Activations | None = None,
) -> Calibration:
    """The calibration of one layer; without fitting blocks, the prompts stand for them."""
    fit, validation = fit or prompts, validation or prompts
    return Calibration.plain(
        prompts, fit, validation, scale=layer.shape.scale, layer=layer.index, plan=plan
    )


def oal_groups(calibration: Calibration, shape: HeadShape) -> Tensor:
    """The groups ``[Hq, d]`` that a conversion with OAL finds on the calibration's prompts."""
    return OAL(shape).find_groups(calibration)


def generator(seed: int, layer: int, purpose: str) -> torch.Generator:
    """A source of random numbers that depends on these three alone."""
    number = int.from_bytes(purpose.encode()[:6], "little")
    mixed = (seed * 1_000_003 + layer) * 281_474_976_710_597 + number
    return torch.Generator().manual_seed(mixed % 2**63)


def gaussian_like(data: Activations, source: torch.Generator) -> Activations:
    """The same values with queries and keys drawn from N(0, 1), independently."""
    q = torch.randn(data.q.shape, generator=source)
    k = torch.randn(data.k.shape, generator=source)
    return Activations(q, k, data.v)


def top_share(profile: Tensor, count: int = TOP) -> Tensor:
    """The share of the ``count`` largest contributions in all of them, over the last axis."""
    return profile.topk(min(count, profile.shape[-1]), dim=-1).values.sum(-1) / profile.sum(-1)


def silent(done: int, total: int, message: str) -> None:
    """Progress that nobody sees."""
