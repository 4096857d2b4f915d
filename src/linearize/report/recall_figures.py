"""The figures of a recall sweep, as SVG files that stand alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from linearize.probe.catalogue import mixer_title
from linearize.probe.summary import Cell
from linearize.probe.sweep import Row
from linearize.report.drawing import (
    CONVERTED,
    GROUP_COLOURS,
    NEUTRAL,
    SOFTMAX,
    alone,
    canvas,
    svg_text,
)

__all__ = ["recall_figures"]

COLOURS = (SOFTMAX, *(c for c in GROUP_COLOURS if c not in (SOFTMAX, NEUTRAL)), NEUTRAL)
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
DEEPEST = "55"  # opacity of the full colour, hexadecimal: numbers stay readable on it


def recall_figures(rows: Sequence[Row], summed: Sequence[Cell]) -> dict[str, str]:
    """The figures of a sweep by file name: heat maps of accuracy and overlap, accuracy against
    width, and accuracy over training."""
    if not summed:
        return {}
    figures = {
        "accuracy": _heat_map(summed, "accuracy", "Accuracy at the best learning rate"),
        "widths": _widths(summed),
        "learning": _learning(rows, summed),
    }
    attending = [cell for cell in summed if cell.soft_iou is not None]
    if attending:
        title = "Soft IoU of attention with the true positions"
        figures["overlap"] = _heat_map(attending, "soft_iou", title)
    return figures


def _heat_map(summed: Sequence[Cell], name: str, title: str) -> str:
    """A row for every mixer, best first, a column for every size, the number in its field."""
    found = {one: [getattr(c, name) for c in summed if c.mixer == one] for one in _mixers(summed)}
    mixers = sorted(found, key=lambda one: -sum(found[one]) / len(found[one]))
    sizes = sorted({(cell.length, cell.width) for cell in summed})
    colours = LinearSegmentedColormap.from_list("depth", [CONVERTED + "00", CONVERTED + DEEPEST])
    with canvas(2.4 + 0.75 * len(sizes), 1.0 + 0.3 * len(mixers)) as (figure, axes):
        values = [[math.nan] * len(sizes) for _ in mixers]
        for cell in summed:
            row, column = mixers.index(cell.mixer), sizes.index((cell.length, cell.width))
            values[row][column] = value = float(getattr(cell, name))
            middle = (column + 0.5, row + 0.5)
            axes.annotate(f"{value:.3f}", middle, ha="center", va="center", fontsize=8.5)
        axes.pcolormesh(values, cmap=colours, vmin=0, vmax=1)
        labels = [f"{length:,} tokens\nwidth {width}" for length, width in sizes]
        axes.set_xticks([at + 0.5 for at in range(len(sizes))], labels, fontsize=8)
        titles = [mixer_title(one) for one in mixers]
        axes.set_yticks([at + 0.5 for at in range(len(mixers))], titles, fontsize=8.5)
        axes.invert_yaxis()
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return alone(svg_text(figure, name, title))


def _widths(summed: Sequence[Cell]) -> str:
    """Accuracy against width, a panel for every length; bars are the deviation over seeds."""
    lengths = sorted({cell.length for cell in summed})
    widths = sorted({cell.width for cell in summed})
    mixers = _mixers(summed)
    with canvas(1.2 + 2.2 * len(lengths), 3.4, 1, len(lengths)) as (figure, grid):
        for axes, length in zip(grid[0], lengths, strict=True):
            for at, mixer in enumerate(mixers):
                found = [c for c in summed if (c.mixer, c.length) == (mixer, length)]
                axes.errorbar(
                    [widths.index(cell.width) for cell in found],
                    [cell.accuracy for cell in found],
                    yerr=[cell.spread for cell in found],
                    fmt=f"o{_line(at)[1]}",
                    color=_line(at)[0],
                    linewidth=1.4,
                    markersize=3.5,
                    elinewidth=0.8,
                )
            axes.set_xticks(range(len(widths)), [str(width) for width in widths])
            axes.set_xlim(-0.3, len(widths) - 0.7)
            axes.set_xlabel("width")
            _accuracy_axis(axes, f"{length:,} tokens")
        _finish(figure, grid, mixers)
        return alone(svg_text(figure, "widths", "Accuracy against width"))


def _learning(rows: Sequence[Row], summed: Sequence[Cell]) -> str:
    """Validation accuracy over training at the best learning rate: a line for every seed."""
    sizes = sorted({(cell.length, cell.width) for cell in summed})
    mixers = _mixers(summed)
    columns = min(len(sizes), 3)
    lines = math.ceil(len(sizes) / columns)
    with canvas(1.2 + 2.2 * columns, 0.9 + 2.2 * lines, lines, columns) as (figure, grid):
        panels = [axes for row in grid for axes in row]
        for axes in panels[len(sizes) :]:
            axes.set_visible(False)
        for axes, (length, width) in zip(panels, sizes, strict=False):
            rates = {c.mixer: c.lr for c in summed if (c.length, c.width) == (length, width)}
            for row in rows:
                if (row.length, row.width) == (length, width) and row.lr == rates[row.mixer]:
                    colour, style = _line(mixers.index(row.mixer))
                    steps, _, values = zip(*row.checks, strict=True) if row.checks else ((), (), ())
                    axes.plot(steps, values, style, color=colour, linewidth=1.0, alpha=0.8)
            axes.set_xlabel("steps")
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            _accuracy_axis(axes, f"{length:,} tokens, width {width}")
        _finish(figure, grid, mixers)
        return alone(svg_text(figure, "learning", "Validation accuracy over training"))


def _accuracy_axis(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_ylim(-0.03, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, 0))


def _finish(figure: Any, grid: Any, mixers: list[str]) -> None:
    """The label of the left panels and one legend for all."""
    for row in grid:
        row[0].set_ylabel("right answers")
    keys = [
        Line2D([], [], color=_line(at)[0], linestyle=_line(at)[1], label=mixer_title(mixer))
        for at, mixer in enumerate(mixers)
    ]
    figure.legend(handles=keys, loc="outside right upper", fontsize=8)


def _mixers(summed: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.mixer for cell in summed))


def _line(at: int) -> tuple[str, Any]:
    """Colour and style of the at-th mixer; colours repeat with another style."""
    return COLOURS[at % len(COLOURS)], STYLES[at // len(COLOURS) % len(STYLES)]
