"""Named points over a number of bytes, each with its name beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from linearize.report.drawing import GROUP_COLOURS, byte_text, log_axis

__all__ = ["Point", "scatter"]

AXES_HEIGHT, LINE = 190.0, 9.5  # of the panel and of a label in it, roughly, in points
MARKERS = "os^Dv<>Ph*X"


@dataclass(frozen=True)
class Point:
    """One marker: its place, in bytes and in the measure, and its name."""

    size: float
    value: float
    name: str


def scatter(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the points: bytes on a logarithmic axis, the measure on one from zero, or logarithmic
    where it spans more than a decade. Labels keep clear of each other."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if not points:
        return
    sizes = [point.size for point in points]
    axes.set_xlim(min(sizes) / 1.5, max(sizes) * 3)
    values = [point.value for point in points]
    if min(values) > 0 and max(values) > 10 * min(values):
        log_axis(axes, values)
    else:
        axes.set_ylim(0, max(values) * 1.15 or 1)
    for at, point in enumerate(points):
        axes.plot(
            point.size,
            point.value,
            MARKERS[at % len(MARKERS)],
            color=GROUP_COLOURS[at % len(GROUP_COLOURS)],
            markersize=6,
        )
    for point, (right, height) in zip(points, _labels(axes, points), strict=True):
        axes.annotate(
            point.name,
            (point.size, point.value),
            xytext=(7 if right else -7, height),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=8,
        )


def _labels(axes: Axes, points: Sequence[Point]) -> list[tuple[bool, float]]:
    """Whether a label stands right of its marker, and how far above, so that close ones stay apart."""
    low, high = axes.get_ylim()
    scale: Any = math.log if axes.get_yscale() == "log" else float

    def height(value: float) -> float:  # in points
        base = scale(low)
        return AXES_HEIGHT * (scale(value) - base) / (scale(high) - base)

    where = [(point.size, height(point.value)) for point in points]
    labels = [(True, 0.0)] * len(points)
    placed: list[tuple[bool, float, float]] = []
    for at in sorted(range(len(points)), key=lambda i: where[i][1]):
        size, natural = where[at]
        right = not any(
            1.05 < other / size < 2.5 and abs(level - natural) < LINE for other, level in where
        )
        wanted = natural
        for side, other, taken in placed:
            if side == right and 1 / 4 < size / other < 4 and wanted < taken + LINE:
                wanted = taken + LINE
        labels[at] = (right, wanted - natural)
        placed.append((right, size, wanted))
    return labels
