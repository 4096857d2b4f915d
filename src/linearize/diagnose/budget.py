"""Output error against the number of groups for one head (figure 2b)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from linearize.attention import LinearAttention
from linearize.diagnose.data import (
    Progress,
    calibrate,
    check_head,
    prepare,
    silent,
    stream,
)
from linearize.fitting import Activations
from linearize.kernels import HeadShape
from linearize.kernels.oal import OAL
from linearize.models import AttentionLayer, Loaded
from linearize.plan import Plan
from linearize.text import Source

__all__ = ["BudgetPoint", "GroupBudget", "group_budget"]

BUDGETS = 8


@dataclass(frozen=True)
class BudgetPoint:
    """OAL with a fixed number of groups, fitted to one head.

    Attributes:
        groups: G. parameters: ``(G + 1)(G + 2) / 2``, learned.
        members: dimensions of every group, bulk first.
        heldout_mse: mean square error of the outputs on the evaluation blocks, over all tokens and
            channels; it decides nothing. heldout_relative: the same over the mean square output.
        validation_mse, fit_mse: on the validation blocks, which choose, and on the fitting positions.
        seconds: time to fit and measure.
    """

    groups: int
    parameters: int
    members: list[list[int]]
    heldout_mse: float
    heldout_relative: float
    validation_mse: float
    fit_mse: float
    seconds: float


@dataclass(frozen=True)
class GroupBudget:
    """The curve of one head and what it was measured on; blocks of ``block`` tokens."""

    layer: int
    head: int
    block: int
    fit_blocks: int
    validation_blocks: int
    heldout_blocks: int
    solver: str
    points: list[BudgetPoint]


def group_budget(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    head: int = 0,
    budgets: int = BUDGETS,
    progress: Progress = silent,
) -> GroupBudget:
    """Fit OAL with G = 1 … ``budgets`` groups to one head of the plan's first layer.

    Groups are cut at the largest gaps of the sorted profile (appendix C, group-budget diagnostic),
    so a larger budget only subdivides. Data, solver and selection are the same for all.

    Raises:
        PlanError: a layer or the head does not exist. TextError: the text is too short.
    """
    plan = plan or Plan()
    inputs = prepare(loaded, text, plan)
    check_head(inputs, head)
    evaluation, fit, validation = inputs.blocks()
    parts = [inputs.prompts, fit, validation, evaluation]
    layer, data = next(stream(inputs, parts, [inputs.layers[0].index]))
    data = [_one_head(each, head, layer.shape.ratio) for each in data]
    points = []
    for count in range(1, min(budgets, layer.shape.head_dim) + 1):
        points.append(_point(layer, plan, count, *data))
        progress(
            len(points), budgets, f"G={count}: held-out error {points[-1].heldout_relative:.4f}"
        )
    return GroupBudget(
        layer.index,
        head,
        plan.block,
        len(fit),
        len(validation),
        len(evaluation),
        plan.solver,
        points,
    )


def _point(
    layer: AttentionLayer,
    plan: Plan,
    count: int,
    prompts: Activations,
    fit: Activations,
    validation: Activations,
    evaluation: Activations,
) -> BudgetPoint:
    started = time.perf_counter()
    whole = layer.shape
    kernel = OAL(HeadShape(1, 1, whole.head_dim, whole.value_dim, whole.scale), eps=plan.eps)
    fixed = plan.model_copy(update={"groups": count})
    result = kernel.fit(calibrate(layer, fixed, prompts, fit, validation))
    linear = LinearAttention(kernel)
    heldout, validated = linear.error(evaluation), linear.error(validation)
    return BudgetPoint(
        groups=count,
        parameters=kernel.trainable_numbers,
        members=[(kernel.groups[0] == g).nonzero().flatten().tolist() for g in range(count)],
        heldout_mse=heldout.mse[0],
        heldout_relative=heldout.relative[0],
        validation_mse=validated.mse[0],
        fit_mse=result.fit_mse[0],
        seconds=time.perf_counter() - started,
    )


def _one_head(data: Activations, head: int, ratio: int) -> Activations:
    """The activations of one query head and its KV head."""

    def only(x: Tensor, at: int) -> Tensor:
        return x[:, at : at + 1].contiguous()

    kv = head // ratio
    return Activations(only(data.q, head), only(data.k, kv), only(data.v, kv))
