"""Output error against the size of the state: OAL on fewer and fewer directions of the keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from linearize.attention import LinearAttention
from linearize.diagnose.data import Progress, calibrate, prepare, silent, stream
from linearize.errors import PlanError
from linearize.fitting import Activations
from linearize.models import AttentionLayer, Loaded
from linearize.ops.quadratic import feature_count
from linearize.plan import Plan
from linearize.text import Source

__all__ = ["StateCurve", "StatePoint", "state_curve"]

RANKS = (4, 8, 16, 24, 32, 48)  # besides all directions


@dataclass(frozen=True)
class StatePoint:
    """One layer with one number of directions.

    Attributes:
        rank: directions; ``None`` stands for the untruncated kernel. features: of the state.
        state_bytes: what the layer keeps of one sequence, exact keys included, fp32.
        heldout_relative: error on the evaluation blocks over the energy of the softmax output, per
            query head; it decides nothing. validation_relative: the same on the validation blocks.
        seconds: time to fit and measure.
    """

    rank: int | None
    features: int
    state_bytes: int
    heldout_relative: list[float]
    validation_relative: list[float]
    seconds: float


@dataclass(frozen=True)
class StateCurve:
    """The curve of every layer, the untruncated kernel last, and what it was measured on."""

    kernel: str
    window: int
    sinks: int
    center: bool
    block: int
    fit_blocks: int
    validation_blocks: int
    heldout_blocks: int
    layers: list[int]
    points: list[list[StatePoint]]


def state_curve(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    ranks: Sequence[int] | None = None,
    progress: Progress = silent,
) -> StateCurve:
    """Fit the plan's kernel to every layer with ``ranks`` directions (some by default), and with all.

    Data and selection are the same for all; the coefficients are fitted anew for every rank.

    Raises:
        PlanError: a layer does not exist, the kernel's state cannot shrink, or no rank fits the keys.
        TextError: the text is too short.
    """
    plan = plan or Plan()
    inputs = prepare(loaded, text, plan.model_copy(update={"state_rank": 1}))
    evaluation, fit, validation = inputs.blocks()
    dim = inputs.layers[0].shape.head_dim
    if ranks is None:
        ranks = [rank for rank in RANKS if rank < dim] or range(1, dim)
    chosen: list[int | None] = [*sorted(ranks)]
    if not all(0 < rank < dim for rank in ranks):
        raise PlanError(
            f"ranks {list(ranks)}",
            f"keys of {dim} dimensions",
            f"Give some from 1 to {dim - 1}.",
        )
    chosen.append(None)
    curves = []
    done, total = 0, len(chosen) * len(inputs.layers)
    for layer, data in stream(inputs, [inputs.prompts, fit, validation, evaluation]):
        curve = []
        for rank in chosen:
            curve.append(_point(layer, plan, rank, *data))
            done += 1
            mean = sum(curve[-1].heldout_relative) / len(curve[-1].heldout_relative)
            progress(done, total, f"layer {layer.index}, rank {rank or dim}: {mean:.4f}")
        curves.append(curve)
    return StateCurve(
        plan.kernel,
        plan.window,
        plan.sinks,
        plan.center,
        plan.block,
        len(fit),
        len(validation),
        len(evaluation),
        [layer.index for layer in inputs.layers],
        curves,
    )


def _point(
    layer: AttentionLayer,
    plan: Plan,
    rank: int | None,
    prompts: Activations,
    fit: Activations,
    validation: Activations,
    evaluation: Activations,
) -> StatePoint:
    started = time.perf_counter()
    linear = LinearAttention.from_plan(plan, layer.shape, layer.index, {"rank": rank})
    linear.fit(calibrate(layer, plan, prompts, fit, validation))
    return StatePoint(
        rank=rank,
        features=linear.kernel.feature_count if rank is None else feature_count(rank),
        state_bytes=linear.state_bytes,
        heldout_relative=linear.error(evaluation).relative,
        validation_relative=linear.error(validation).relative,
        seconds=time.perf_counter() - started,
    )
