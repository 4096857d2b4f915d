"""What to convert, chosen by measurement: layers or single KV heads whose conversion costs most stay.

Everything is converted first. Then each unit (a layer, or a KV head with its query heads) is given its
softmax back alone, and the divergence of the model's predictions from the original's is measured. The
units that help most keep their softmax, and the rest is measured again beside them, round by round,
because errors of different layers add up in ways no single measurement shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention import LinearAttention
from linearize.errors import PlanError
from linearize.interface import use_interface
from linearize.plan import Plan

__all__ = ["Candidate", "Selection", "check_memory", "choose"]

TOKENS = 512  # of each measured block
STRIDE = 4  # every fourth position is compared
ROUNDS = 3  # measurements of all units on the way to a given number
STEP = 1 / 12  # share of the units restored between measurements on the way to a divergence

Unit = tuple[int, tuple[int, ...]]  # a layer and some of its KV heads
Heads = dict[int, tuple[int, ...]]  # layer -> KV heads
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Candidate:
    """A layer or KV head that could keep its softmax.

    Attributes:
        layer: zero-based. heads: its KV heads.
        divergence: of the model in which it has its softmax back, when last measured; nats per token.
        gain: how much lower that is than the divergence of the model it was measured in.
        kept: whether it keeps its softmax.
    """

    layer: int
    heads: tuple[int, ...]
    divergence: float
    gain: float
    kept: bool


@dataclass(frozen=True)
class Selection:
    """How the choice was made.

    Attributes:
        unit: ``"layer"`` or ``"head"``.
        candidates: kept ones in the order they were chosen, then the others, most helpful first.
        curve: (units kept, divergence) from nothing kept to the final choice.
        decode_bytes: decoding memory of one sequence of ``context`` tokens, all layers, fp32.
        tokens: how many tokens every measurement took.
    """

    unit: str
    candidates: list[Candidate]
    curve: list[tuple[int, float]]
    decode_bytes: int
    context: int
    tokens: int


def choose(
    model: PreTrainedModel,
    fitted: dict[int, LinearAttention],
    names: dict[int, str],
    plan: Plan,
    blocks: Sequence[Tensor],
    *,
    retained: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[int, LinearAttention], Selection]:
    """Keep the softmax of as much as the plan asks for.

    Args:
        model: the original model; it is left as it was.
        fitted: the fitted layers, all heads of each. names: their modules.
        plan: with ``layers`` or ``heads`` set to ``"auto"``.
        blocks: token ids to measure on; the first ``TOKENS`` of each.
        retained: layers of the model that are not candidates, for the memory.
        progress: called with (measurements done, in all at most, message).

    Returns:
        the layers that stay converted, cut to their converted heads, and the account.

    Raises:
        PlanError: nothing would remain converted, or more is to be kept than there is.
    """
    by_head = plan.heads == "auto"
    units: list[Unit] = [
        (layer, heads)
        for layer, linear in sorted(fitted.items())
        for heads in (
            [(h,) for h in range(linear.shape.kv_heads)]
            if by_head
            else [tuple(range(linear.shape.kv_heads))]
        )
    ]
    limit = _limit(plan, len(units), "KV heads" if by_head else "layers")
    sample = [block[:TOKENS] for block in blocks]
    with _measuring(model, fitted, names, sample) as divergence:
        search = _Search(units, divergence, progress)
        if limit is not None:
            search.run(-(-limit // ROUNDS), limit=limit)
        else:
            search.run(
                max(1, round(len(units) * STEP)),
                until=plan.max_kl,
                fits=lambda kept: (
                    plan.memory_budget is None
                    or _bytes(fitted, _together(kept), plan.context, retained) <= plan.memory_budget
                ),
            )
    exact = _together(search.kept)
    remaining = _remaining(fitted, exact)
    if not remaining:
        raise PlanError(
            f"a divergence of at most {plan.max_kl} nats per token",
            "that only the unconverted model comes so close",
            f"Allow max_kl={search.curve[-2][1]:.3g}, which leaves some of it converted.",
        )
    return remaining, Selection(
        unit="head" if by_head else "layer",
        candidates=search.candidates(),
        curve=search.curve,
        decode_bytes=_bytes(fitted, exact, plan.context, retained),
        context=plan.context,
        tokens=sum(len(block) for block in sample),
    )


class _Search:
    """Greedy restoring, with all remaining units measured again between two steps."""

    def __init__(
        self, units: list[Unit], divergence: Callable[[Heads], float], progress: Progress | None
    ) -> None:
        self.kept: list[Unit] = []
        self.curve = [(0, divergence({}))]
        self._units, self._divergence, self._progress = units, divergence, progress
        self._latest: dict[Unit, tuple[float, float]] = {}  # divergence and gain when last measured
        self._done = 0

    def run(
        self,
        step: int,
        *,
        limit: int | None = None,
        until: float | None = None,
        fits: Callable[[list[Unit]], bool] = lambda kept: True,
    ) -> None:
        """Keep up to ``step`` units after every measurement of all, until one of the ends is met."""
        rounds = -(-(limit or len(self._units)) // step)
        while True:
            added = 0
            for unit in self._ranked(rounds):
                if added == step or self._over(limit, until):
                    break
                if fits([*self.kept, unit]):
                    self.kept.append(unit)
                    added += 1
                    self.curve.append((len(self.kept), self._divergence(_together(self.kept))))
            if not added or self._over(limit, until):
                break

    def candidates(self) -> list[Candidate]:
        """The kept ones in the order they were chosen, then the others, most helpful first."""
        others = [unit for unit in self._units if unit not in self.kept]
        others.sort(key=lambda unit: self._latest[unit][0])
        return [
            Candidate(*unit, *self._latest[unit], kept=unit in self.kept)
            for unit in [*self.kept, *others]
        ]

    def _over(self, limit: int | None, until: float | None) -> bool:
        kept = len(self.kept)
        return kept == len(self._units if limit is None else self._units[:limit]) or (
            until is not None and self.curve[-1][1] <= until
        )

    def _ranked(self, rounds: int) -> list[Unit]:
        """Measure every unit that is not kept, beside those that are; most helpful first."""
        rest = [unit for unit in self._units if unit not in self.kept]
        current = self.curve[-1][1]
        for unit in rest:
            value = self._divergence(_together([*self.kept, unit]))
            self._latest[unit] = (value, current - value)
            self._done += 1
            if self._progress is not None:
                message = f"measuring layer {unit[0]}: {value:.3f} of {current:.3f} nats"
                self._progress(self._done, rounds * len(self._units), message)
        return sorted(rest, key=lambda unit: self._latest[unit][0])


def check_memory(plan: Plan, layers: Sequence[LinearAttention], retained: int) -> None:
    """Refuse a memory budget that full conversion cannot meet, or that needs no conversion.

    Raises:
        PlanError: with the least and the most that make sense.
    """
    if plan.memory_budget is None:
        return
    candidates = dict(enumerate(layers))
    every = {index: tuple(range(linear.shape.kv_heads)) for index, linear in candidates.items()}
    least = _bytes(candidates, {}, plan.context, retained)
    most = _bytes(candidates, every, plan.context, retained)
    asked = f"a decoding memory of {plan.memory_budget:,} bytes at {plan.context:,} tokens"
    if plan.memory_budget < least:
        raise PlanError(
            asked,
            f"{least:,} bytes when everything chosen is converted",
            f"Allow at least {least:,}, choose more layers, or a smaller state (state_rank).",
        )
    if plan.memory_budget >= most:
        raise PlanError(
            asked,
            f"{most:,} bytes without any conversion",
            f"Allow less than {most:,}, or plan for a longer context.",
        )


def _limit(plan: Plan, units: int, what: str) -> int | None:
    """How many units the plan keeps, if it says a number."""
    if plan.keep is None:
        return None
    share = plan.keep.endswith("%")
    number = max(1, int(units * float(plan.keep[:-1]) / 100)) if share else int(plan.keep)
    if number >= units:
        raise PlanError(
            f"keeping {plan.keep} of the {what} exact",
            f"{units} that could be converted",
            f"Keep at most {units - 1}.",
        )
    return number


@contextmanager
def _measuring(
    model: PreTrainedModel,
    fitted: dict[int, LinearAttention],
    names: dict[int, str],
    blocks: Sequence[Tensor],
) -> Iterator[Callable[[Heads], float]]:
    """The divergence from the original, as a function of which KV heads are exact."""
    modules = {index: model.get_submodule(name) for index, name in names.items()}
    original = [_predictions(model, block) for block in blocks]

    def divergence(exact: Heads) -> float:
        remaining = _remaining(fitted, exact)
        for index, module in modules.items():
            module.linear_attention = remaining.get(index)  # type: ignore[assignment]
        pairs = zip(blocks, original, strict=True)
        values = [_divergence(wanted, _predictions(model, block)) for block, wanted in pairs]
        return sum(values) / len(values)

    training = model.training
    model.eval()
    try:
        with use_interface(model):
            yield divergence
    finally:
        for module in modules.values():
            if hasattr(module, "linear_attention"):
                del module.linear_attention
        model.train(training)


@torch.no_grad()
def _predictions(model: PreTrainedModel, block: Tensor) -> Tensor:
    """Log-probabilities at some positions of a block, ``[n, vocabulary]``."""
    logits = model(input_ids=block[None].to(model.device), use_cache=False).logits[0, ::STRIDE]
    return torch.log_softmax(logits.float(), -1)


def _divergence(wanted: Tensor, found: Tensor) -> float:
    """``KL(original ‖ converted)``, nats per token."""
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def _together(units: Sequence[Unit]) -> Heads:
    """Units as the exact KV heads of every layer."""
    heads: Heads = {}
    for layer, some in units:
        heads[layer] = tuple(sorted((*heads.get(layer, ()), *some)))
    return heads


def _remaining(fitted: dict[int, LinearAttention], exact: Heads) -> dict[int, LinearAttention]:
    """The fitted layers cut to the heads that stay converted."""
    remaining = {}
    for index, linear in fitted.items():
        gone = exact.get(index, ())
        heads = [h for h in range(linear.shape.kv_heads) if h not in gone]
        if heads:
            remaining[index] = linear.select(heads) if gone else linear
    return remaining


def _bytes(fitted: dict[int, LinearAttention], exact: Heads, context: int, retained: int) -> int:
    """Decoding memory of one sequence: states, and the keys and values of everything exact, in fp32."""
    shape = next(iter(fitted.values())).shape
    head = 4 * (shape.head_dim + shape.value_dim) * context
    states = sum(linear.state_bytes for linear in _remaining(fitted, exact).values())
    return states + head * (sum(len(h) for h in exact.values()) + retained * shape.kv_heads)
