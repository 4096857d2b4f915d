"""What to convert, chosen by measurement: layers or single KV heads whose conversion costs most stay.

Everything is converted first. Then each unit (a layer, or a KV head with its query heads) is given its
softmax back alone, and the divergence of the model's predictions from the original's is measured, on
text and on text that is repeated: few tokens of a text need what was read long ago, so text alone
hardly shows which heads look things up. Each of the two counts as a share of what it was when
everything was converted. The unit that takes most away keeps its softmax. What the others are worth
beside it may have changed, so the most promising is measured again, until one is still ahead of all
others after that: it comes next (lazy greedy selection; Minoux 1978). That sees what has become worth
less; what has become worth more shows when, on the way, all are measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from linearize.attention import LinearAttention
from linearize.divergence import Divergence, Heads, Samples, measuring, remaining
from linearize.errors import PlanError
from linearize.plan import Plan

__all__ = ["Candidate", "Selection", "check_memory", "choose"]

ROUNDS = 3  # measurements of all units on the way to a number of them

Unit = tuple[int, tuple[int, ...]]  # a layer and some of its KV heads
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Candidate:
    """A layer or KV head that could keep its softmax.

    Attributes:
        layer: zero-based. heads: its KV heads.
        divergence: on text, of the model in which it has its softmax back, when last measured; nats
            per token. recall: the same on repeated text.
        gain: the share of what conversion costs that it brings back, as far as the units kept before
            have left it: mean of text and repeated text.
        kept: whether it keeps its softmax.
    """

    layer: int
    heads: tuple[int, ...]
    divergence: float
    recall: float
    gain: float
    kept: bool


@dataclass(frozen=True)
class Selection:
    """How the choice was made.

    Attributes:
        unit: ``"layer"`` or ``"head"``.
        candidates: kept ones in the order they were chosen, then the others, most helpful first.
        curve: (units kept, divergence on text, on repeated text) from nothing kept to the final choice.
        decode_bytes: decoding memory of one sequence of ``context`` tokens, all layers, fp32.
        tokens: of text, how many every measurement took. repeated: tokens read twice, the same.
    """

    unit: str
    candidates: list[Candidate]
    curve: list[tuple[int, float, float]]
    decode_bytes: int
    context: int
    tokens: int
    repeated: int


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
        blocks: token ids to measure on, see :meth:`Samples.of`.
        retained: layers of the model that are not candidates, for the memory.
        progress: called with (units measured or kept so far, units to measure or keep, message).

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
    samples = Samples.of(blocks)
    with measuring(model, fitted, names, samples) as divergence:
        search = _Search(units, divergence, progress)
        search.run(
            len(units) if limit is None else limit,
            until=plan.max_kl,
            fits=lambda kept: (
                plan.memory_budget is None
                or _bytes(fitted, _together(kept), plan.context, retained) <= plan.memory_budget
            ),
        )
    exact = _together(search.kept)
    converted = remaining(fitted, exact)
    if not converted:
        raise PlanError(
            f"a divergence of at most {plan.max_kl} nats per token",
            "that only the unconverted model comes so close",
            f"Allow max_kl={search.curve[-2][1]:.3g}, which leaves some of it converted.",
        )
    return converted, Selection(
        unit="head" if by_head else "layer",
        candidates=search.candidates(),
        curve=search.curve,
        decode_bytes=_bytes(fitted, exact, plan.context, retained),
        context=plan.context,
        tokens=sum(len(ids) for ids in samples.text),
        repeated=sum(len(ids) // 2 for ids in samples.repeated),
    )


class _Search:
    """Lazy greedy restoring of units, all of them measured again now and then."""

    def __init__(
        self,
        units: list[Unit],
        divergence: Callable[[Heads], Divergence],
        progress: Progress | None,
    ) -> None:
        self.kept: list[Unit] = []
        self._start = self._reached = divergence({})
        self.curve = [(0, *self._start)]
        self._units, self._divergence = units, divergence
        self._progress = progress or (lambda done, total, message: None)
        self._latest: dict[Unit, tuple[Divergence, float]] = {}  # and gain, when last measured
        self._current: set[Unit] = set()  # measured beside all that are kept now

    def run(self, limit: int, *, until: float | None, fits: Callable[[list[Unit]], bool]) -> None:
        """Keep units until there are ``limit``, none fits beside them, or the divergence is reached."""
        self._measure_all()
        while len(self.kept) < limit and (until is None or self._reached.text > until):
            if self.kept and len(self.kept) % -(-limit // ROUNDS) == 0:
                self._measure_all()
            best = self._next(fits)
            if best is None:
                break
            self.kept.append(best)
            self._current.clear()
            self._reached = self._latest[best][0]
            self.curve.append((len(self.kept), *self._reached))
            self._progress(len(self.kept), limit, f"kept {self._account(best)}")

    def candidates(self) -> list[Candidate]:
        """The kept ones in the order they were chosen, then the others, most helpful first."""
        others = [unit for unit in self._units if unit not in self.kept]
        return [
            Candidate(*unit, *value, gain, kept=unit in self.kept)
            for unit in [*self.kept, *sorted(others, key=self._gain, reverse=True)]
            for value, gain in [self._latest[unit]]
        ]

    def _next(self, fits: Callable[[list[Unit]], bool]) -> Unit | None:
        """The unit that is ahead of the others' last measurements in one beside all kept ones."""
        rest = [unit for unit in self._units if unit not in self.kept and fits([*self.kept, unit])]
        while rest:
            best = max(rest, key=self._gain)
            if best in self._current:
                return best
            self._measure(best)
        return None

    def _measure_all(self) -> None:
        rest = [unit for unit in self._units if unit not in self.kept]
        for done, unit in enumerate(rest, 1):
            self._measure(unit)
            self._progress(done, len(rest), f"measured {self._account(unit)}")

    def _measure(self, unit: Unit) -> None:
        value = self._divergence(_together([*self.kept, unit]))
        shares = [
            (before - after) / start
            for start, before, after in zip(self._start, self._reached, value, strict=True)
            if start > 0
        ]
        self._latest[unit] = (value, sum(shares) / max(1, len(shares)))
        self._current.add(unit)

    def _gain(self, unit: Unit) -> float:
        return self._latest[unit][1]

    def _account(self, unit: Unit) -> str:
        (layer, _), (value, gain) = unit, self._latest[unit]
        return f"layer {layer}: {gain:.1%} back, {value.text:.3f} nats left, {value.recall:.3f} repeated"


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


def _together(units: Sequence[Unit]) -> Heads:
    """Units as the exact KV heads of every layer."""
    heads: Heads = {}
    for layer, some in units:
        heads[layer] = tuple(sorted((*heads.get(layer, ()), *some)))
    return heads


def _bytes(fitted: dict[int, LinearAttention], exact: Heads, context: int, retained: int) -> int:
    """Decoding memory of one sequence: states, and the keys and values of everything exact, in fp32."""
    shape = next(iter(fitted.values())).shape
    head = 4 * (shape.head_dim + shape.value_dim) * context
    states = sum(linear.state_bytes for linear in remaining(fitted, exact).values())
    return states + head * (sum(len(h) for h in exact.values()) + retained * shape.kv_heads)
