"""The whole model: prefill, training step and generation, converted over softmax."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.bench.measure import (
    Progress,
    Timing,
    clock,
    interleave,
    machine,
    memory_limit,
    silent,
)
from linearize.bench.target import Target, check_model
from linearize.converted import original_attention
from linearize.errors import PlanError
from linearize.models import vocabulary_and_width

__all__ = ["STAGES", "ModelBench", "ModelPoint", "model_benchmark"]

STAGES = {
    "prefill": "all layers over the prompt, with a cache, without the vocabulary's logits",
    "training": "loss and gradients of all weights, without optimizer",
    "generation": "prompt and new tokens through generate(), greedy",
}


@dataclass(frozen=True)
class ModelPoint:
    """One stage at one length.

    Attributes:
        stage: a name in :data:`STAGES`. tokens: of the prompt or training sequence.
        status, reason: ``"ok"``, ``"differs"`` or ``"skipped"``.
        converted, softmax: seconds.
        new_tokens: generated tokens, else 0.
        ratio: time of the converted model over that of softmax; below 1 is faster.
    """

    stage: str
    tokens: int
    status: str
    reason: str | None = None
    converted: Timing | None = None
    softmax: Timing | None = None
    new_tokens: int = 0
    ratio: float | None = None


@dataclass(frozen=True)
class ModelBench:
    """All stages and lengths of one run, and what they depend on."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    model_error: float
    points: list[ModelPoint]
    seconds: float


def model_benchmark(
    target: Target,
    *,
    lengths: Sequence[int],
    new_tokens: int = 32,
    repeats: int = 3,
    budget: float = 120.0,
    memory: int | None = None,
    progress: Progress = silent,
) -> ModelBench:
    """Time every stage at every length, converted and softmax in turn, on random tokens.

    Args:
        target: the model. lengths: tokens. new_tokens: how many are generated.
        repeats: timed rounds after one warm-up.
        budget: seconds a stage may take at one length; longer ones are predicted and left out.
        memory: bytes a training step may take; by default 60 % of what is free.
        progress: told after every stage.

    Raises:
        PlanError: no length, or one below 2.
    """
    started = time.perf_counter()
    if not lengths or min(lengths) < 2 or repeats < 1 or new_tokens < 1:
        raise PlanError(f"lengths {list(lengths)}", "no length of 2 or more", "Give some.")
    lengths = sorted(set(lengths))
    model = target.model
    limit = memory_limit(memory, model.device)
    described = machine(model.device)
    model_error, reason = check_model(target)
    points: list[ModelPoint] = []
    before: dict[str, tuple[int, float]] = {}
    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_and_width(model)[0]
    for tokens in lengths:
        ids = torch.randint(vocabulary, (1, tokens), generator=generator).to(model.device)
        for stage in STAGES:
            if reason is not None:
                point = ModelPoint(stage, tokens, "differs", reason)
            elif refusal := _too_much(target, stage, tokens, before.get(stage), budget, limit):
                point = ModelPoint(stage, tokens, "skipped", refusal)
            else:
                point, seconds = _point(target, stage, ids, new_tokens, repeats, budget)
                before[stage] = tokens, seconds
            points.append(point)
            progress(len(points), len(lengths) * len(STAGES), f"{stage}, {tokens:,} tokens")
    settings = target.settings() | {
        "lengths": list(lengths),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "budget": budget,
        "memory": limit,
        "stages": STAGES,
    }
    return ModelBench(settings, described, model_error, points, time.perf_counter() - started)


def _too_much(
    target: Target,
    stage: str,
    tokens: int,
    before: tuple[int, float] | None,
    budget: float,
    limit: int,
) -> str | None:
    """Why a stage is not tried, by what a shorter length took (growing at most with the square)."""
    needed = _training_bytes(target, tokens) if stage == "training" else 0
    if needed > limit:
        return f"would need {needed / 1e9:.1f} GB of memory; the limit is {limit / 1e9:.1f} GB"
    if before is not None:
        seconds = before[1] * (tokens / before[0]) ** 2
        if 2 * seconds > budget:
            return f"would take up to {seconds:.3g} s a round; the budget is {budget:.3g} s"
    return None


def _training_bytes(target: Target, tokens: int) -> int:
    """A generous estimate: gradients, logits three times over, activations of every layer."""
    vocabulary, hidden = vocabulary_and_width(target.model)
    weights = sum(p.numel() for p in target.model.parameters())
    return 4 * (weights + tokens * (3 * vocabulary + 24 * hidden * target.count))


def _point(
    target: Target, stage: str, ids: Tensor, new_tokens: int, repeats: int, budget: float
) -> tuple[ModelPoint, float]:
    """The measured point, and the seconds one round of both takes."""
    model = target.model
    run = {
        "prefill": lambda: _prefill(target, ids),
        "training": lambda: _train(target, ids),
        "generation": lambda: _generate(target, ids, new_tokens),
    }[stage]

    def turn(softmax: bool) -> Callable[[], dict[str, list[float]]]:
        def call() -> dict[str, list[float]]:
            with original_attention(model) if softmax else nullcontext():
                started = clock(model.device)
                run()
                return {"call": [clock(model.device) - started]}

        return call

    turns = {"converted": turn(False), "softmax": turn(True)}
    warm = sum(turn()["call"][0] for turn in turns.values())
    timed = interleave(turns, repeats=repeats, budget=budget / 2)
    converted, softmax = (timed[name]["call"] for name in turns)
    point = ModelPoint(
        stage,
        ids.shape[1],
        "ok",
        None,
        converted,
        softmax,
        new_tokens if stage == "generation" else 0,
        converted.median / softmax.median,
    )
    return point, warm


@torch.no_grad()
def _prefill(target: Target, ids: Tensor) -> None:
    target.model.base_model(input_ids=ids, use_cache=True)


def _train(target: Target, ids: Tensor) -> None:
    with torch.enable_grad():
        target.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    target.model.zero_grad(set_to_none=True)


def _generate(target: Target, ids: Tensor, new_tokens: int) -> None:
    model: Any = target.model
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
