"""Several converted folders side by side: what each keeps exact, what it loses, what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linearize.errors import PlanError
from linearize.plan import Plan
from linearize.report.data import Memory, ReportData, read

__all__ = ["CONTEXT", "Comparison", "Row", "compare"]

CONTEXT = Plan().context


@dataclass(frozen=True)
class Row:
    """One model of a comparison.

    Attributes:
        name: of its folder (the whole path where two would be the same), or ``"softmax"``.
        settings: how it was made, in words.
        perplexity: per token. ratio: over that of softmax, where this was measured beside it.
        memory: decoding memory of one sequence at the comparison's length, in bytes, fp32.
        state: the part of it that no token adds to.
        parts: perplexity with a part of a hybrid taken away, by name.
        recalled: perplexity on tokens whose bigram occurred earlier in their block.
        accuracies: of tasks, by title.
        best: no other model of the comparison has less perplexity with at most its memory.
    """

    name: str
    settings: str
    perplexity: float
    ratio: float | None
    memory: int
    state: int
    parts: dict[str, float] = field(default_factory=dict)
    recalled: float | None = None
    accuracies: dict[str, float] = field(default_factory=dict)
    best: bool = False


@dataclass(frozen=True)
class Comparison:
    """Models measured on the same text.

    Attributes:
        rows: ascending in memory. tokens: the length the memory is for.
        text: names of the files. block, blocks: tokens per block, and how many of these.
    """

    rows: list[Row]
    tokens: int
    text: list[str]
    block: int
    blocks: int


def compare(folders: Sequence[str | Path], tokens: int = CONTEXT) -> Comparison:
    """Read what is stored in folders of converted models; nothing is computed again.

    Args:
        folders: written by ``linearize convert`` or ``adapt``, each with a perplexity of ``linearize
            eval``, all on the same blocks. tokens: the length to give the memory for.

    Raises:
        CheckpointError: see :func:`linearize.report.read`. PlanError: no perplexity is stored, or
            not on the same blocks of the same text.
    """
    found = {str(folder): read(folder) for folder in folders}
    if not found:
        raise PlanError("a comparison", "no folder", "Name the folders to compare.")
    measured = {name: _measured(name, data) for name, data in found.items()}
    first, reference = next(iter(measured.items()))
    for name, one in measured.items():
        if _blocks(one) != _blocks(reference):
            raise PlanError(
                f"comparing {name} with {first}",
                f"{_blocks_in_words(one)} in one, {_blocks_in_words(reference)} in the other",
                "Run linearize eval on both with the same --text, --block and --blocks.",
            )
    last = [Path(name).name for name in found]
    rows = [
        _row(end if last.count(end) == 1 else name, found[name], measured[name], tokens)
        for name, end in zip(found, last, strict=True)
    ]
    rows += _softmax(found, measured, tokens)
    rows.sort(key=lambda row: (row.memory, row.perplexity))
    return Comparison([_judged(row, rows) for row in rows], tokens, *_blocks(reference))


def _measured(name: str, data: ReportData) -> dict[str, Any]:
    """The stored evaluation, if it holds a perplexity."""
    if "perplexity" not in (data.evaluation or {}):
        raise PlanError(
            f"comparing {name}",
            "no perplexity in it",
            f"Run linearize eval {name} --text FILE, as for the others.",
        )
    assert data.evaluation is not None
    return data.evaluation


def _row(name: str, data: ReportData, measured: dict[str, Any], tokens: int) -> Row:
    memory = Memory.of(data.conversion)
    return Row(
        name,
        _settings(data),
        measured["perplexity"],
        measured.get("ratio"),
        memory.after(tokens),
        memory.state,
        {part: one["value"] for part, one in measured.get("parts", {}).items()},
        *_scores(measured, "model"),
    )


def _softmax(
    found: dict[str, ReportData], measured: dict[str, dict[str, Any]], tokens: int
) -> list[Row]:
    """The reference that was measured beside a model that is not adapted, if there is one."""
    for name, one in measured.items():
        data, value = found[name], one.get("softmax_perplexity")
        if value is not None and data.adaptation is None:
            base = data.conversion.base or "the original model"
            memory = Memory.of(data.conversion).before(tokens)
            return [Row("softmax", base, value, 1.0, memory, 0, {}, *_scores(one, "softmax"))]
    return []


def _scores(measured: dict[str, Any], variant: str) -> tuple[float | None, dict[str, float]]:
    """Perplexity on recalled tokens, and accuracies by task: of ``"model"`` or ``"softmax"``."""
    recall = measured.get("recall", {}).get(variant)
    tasks = measured.get("tasks", {}).values()
    return (
        None if recall is None else recall["recalled"]["value"],
        {task["title"]: task[variant]["accuracy"] for task in tasks if task[variant] is not None},
    )


def _judged(row: Row, rows: list[Row]) -> Row:
    beaten = any(
        other.memory <= row.memory
        and other.perplexity <= row.perplexity
        and (other.memory, other.perplexity) != (row.memory, row.perplexity)
        for other in rows
    )
    return replace(row, best=not beaten)


def _settings(data: ReportData) -> str:
    """``"oal, 24 of 30 layers, 4 sinks, window 64, centred, rank 8, adapted"``."""
    report = data.conversion
    plan = report.plan
    ranks = sorted({layer.rank for layer in report.layers if layer.rank is not None})
    kept = sum(len(layer.kept) for layer in report.layers)
    said = [
        plan["kernel"],
        f"{len(report.layers)} of {report.model_layers} layers",
        f"{kept} KV heads of these kept" if kept else "",
        f"{plan['sinks']} sinks" if plan["sinks"] else "",
        f"window {plan['window']}" if plan["window"] else "",
        f"saturation {plan['saturation']}" if plan.get("saturation") else "",
        "centred" if plan["center"] else "",
        f"rank {'-'.join(str(rank) for rank in dict.fromkeys((ranks[0], ranks[-1])))}"
        if ranks
        else "",
        "fitted in sequence" if plan["fitting"] == "sequential" else "",
        "adapted" if data.adaptation is not None else "",
    ]
    return ", ".join(part for part in said if part)


def _blocks(measured: dict[str, Any]) -> tuple[list[str], int, int]:
    """Which tokens a perplexity is over; files count by their names."""
    names = [Path(name).name for name in measured["text"]]
    return names, measured["block"], measured["blocks"]


def _blocks_in_words(measured: dict[str, Any]) -> str:
    names, block, blocks = _blocks(measured)
    return f"{blocks} blocks of {block:,} tokens of {', '.join(names)}"
