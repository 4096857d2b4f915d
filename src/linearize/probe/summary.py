"""A sweep's rows summed up: every mixer at every size, at its best learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linearize.probe.sweep import Row

__all__ = ["Cell", "cells"]


@dataclass(frozen=True)
class Cell:
    """One mixer at one length and width.

    The learning rate is the one with the highest validation accuracy, mean over seeds, among those
    run with the most seeds; everything else is measured on test sequences at that rate.

    Attributes:
        mixer, length, width: what was trained; pairs: of a sequence.
        lr: the learning rate chosen; seeds: how many runs it was chosen from and is averaged over.
        accuracy, spread: mean over seeds and its standard deviation (0 for one seed).
        iou, soft_iou: attention overlap, mean over seeds; ``None`` without attention.
        parameters, state_numbers: as in a row.
        chance: accuracy of guessing.
        steps, core_seconds: mean over seeds.
        solved: seeds whose training ended because the task was solved.
    """

    mixer: str
    length: int
    width: int
    pairs: int
    lr: float
    seeds: int
    accuracy: float
    spread: float
    iou: float | None
    soft_iou: float | None
    parameters: int
    state_numbers: int | None
    chance: float
    steps: float
    core_seconds: float
    solved: int


def cells(rows: Sequence[Row]) -> list[Cell]:
    """One cell for every mixer, length and width, in the order they first appear."""
    keys = dict.fromkeys((row.mixer, row.length, row.width) for row in rows)
    return [
        _cell([row for row in rows if (row.mixer, row.length, row.width) == key]) for key in keys
    ]


def _cell(rows: list[Row]) -> Cell:
    rates = dict.fromkeys(row.lr for row in rows)
    runs = max(
        ([row for row in rows if row.lr == lr] for lr in rates),
        key=lambda found: (len(found), _mean(found, lambda row: row.validation)),
    )
    first = runs[0]
    accuracy = _mean(runs, lambda row: row.test)
    squares = sum((row.test - accuracy) ** 2 for row in runs)
    attends = first.iou is not None
    return Cell(
        mixer=first.mixer,
        length=first.length,
        width=first.width,
        pairs=first.pairs,
        lr=first.lr,
        seeds=len(runs),
        accuracy=accuracy,
        spread=math.sqrt(squares / (len(runs) - 1)) if len(runs) > 1 else 0.0,
        iou=_mean(runs, lambda row: row.iou or 0.0) if attends else None,
        soft_iou=_mean(runs, lambda row: row.soft_iou or 0.0) if attends else None,
        parameters=first.parameters,
        state_numbers=first.state_numbers,
        chance=first.chance,
        steps=_mean(runs, lambda row: row.steps),
        core_seconds=_mean(runs, lambda row: row.core_seconds),
        solved=sum(row.ended == "solved" for row in runs),
    )


def _mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return sum(value(row) for row in rows) / len(rows)
