"""Several converted folders side by side: what each keeps exact, what it loses, what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linearize.errors import PlanError
from linearize.report.data import Memory, ReportData, read

__all__ = ["Comparison", "Row", "compare"]


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


def compare(folders: Sequence[str | Path], tokens: int = 8192) -> Comparison:
    """Read what is stored in folders of converted models; nothing is computed again.

    Args:
        folders: written by ``linearize convert`` or ``adapt``, each with a perplexity of ``linearize
            eval``, all on the same blocks. tokens: the length to give the memory for.

    Raises:
        CheckpointError: see :func:`linearize.report.read`. PlanError: no perplexity is stored, or
            not on the same blocks of the same text.
    """
    found = {str(folder): read(folder) for folder in folders}
    first: tuple[str, dict[str, Any]] | None = None
    rows: list[Row] = []
    for name, data in found.items():
        measured = data.evaluation
        if measured is None or "perplexity" not in measured:
            raise PlanError(
                f"comparing {name}",
                "no perplexity in it",
                f"Run linearize eval {name} --text FILE, as for the others.",
            )
        first = first or (name, measured)
        if _blocks(measured) != _blocks(first[1]):
            raise PlanError(
                f"comparing {name} with {first[0]}",
                f"{_blocks_in_words(measured)} in one, {_blocks_in_words(first[1])} in the other",
                "Run linearize eval on both with the same --text, --block and --blocks.",
            )
        alone = [Path(other).name for other in found].count(Path(name).name) == 1
        rows.append(_row(Path(name).name if alone else name, data, measured, tokens))
    reference = _softmax(found, tokens)
    if reference is not None:
        rows.append(reference)
    if first is None:
        raise PlanError("a comparison", "no folder", "Name the folders to compare.")
    rows.sort(key=lambda row: (row.memory, row.perplexity))
    return Comparison(
        [_judged(row, rows) for row in rows],
        tokens,
        _blocks(first[1])[0],
        first[1]["block"],
        first[1]["blocks"],
    )


def _row(name: str, data: ReportData, measured: dict[str, Any], tokens: int) -> Row:
    memory = Memory.of(data.conversion)
    recall = measured.get("recall")
    return Row(
        name,
        _settings(data),
        measured["perplexity"],
        measured.get("ratio"),
        memory.after(tokens),
        memory.state,
        {part: one["value"] for part, one in measured.get("parts", {}).items()},
        None if recall is None else recall["model"]["recalled"]["value"],
        {task["title"]: task["model"]["accuracy"] for task in measured.get("tasks", {}).values()},
    )


def _softmax(found: dict[str, ReportData], tokens: int) -> Row | None:
    """The reference that was measured beside a model that is not adapted, if there is one."""
    for data in found.values():
        measured = data.evaluation or {}
        value = measured.get("softmax_perplexity")
        if value is not None and data.adaptation is None:
            recall = (measured.get("recall") or {}).get("softmax")
            tasks = {
                task["title"]: task["softmax"]["accuracy"]
                for task in measured.get("tasks", {}).values()
                if task["softmax"] is not None
            }
            return Row(
                "softmax",
                data.conversion.base or "the original model",
                value,
                1.0,
                Memory.of(data.conversion).before(tokens),
                0,
                recalled=None if recall is None else recall["recalled"]["value"],
                accuracies=tasks,
            )
    return None


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
