"""The figure of a retrieval probe, as an SVG file that stands alone."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from linearize.probe import Retrieval
from linearize.report.drawing import GROUP_COLOURS, NEUTRAL, alone, canvas, svg_text

__all__ = ["retrieval_chart"]

COLOURS = GROUP_COLOURS[1:]


def retrieval_chart(measured: Retrieval, softmax: Retrieval | None = None) -> str:
    """Accuracy against distance, a line for every number of pairs; softmax dashed, chance dotted.

    Left the answers that greedy decoding would write, right those that rank first among the values
    of their context.
    """
    with canvas(7.2, 3.1, 1, 2) as (figure, grid):
        left, right = grid[0]
        _panel(left, "exact", measured, softmax)
        _panel(right, "choice", measured, softmax)
        left.set_title("first in the vocabulary", fontsize=9)
        right.set_title("first among the values", fontsize=9)
        left.set_ylabel("right answers")
        keys = [
            Line2D([], [], color=COLOURS[at % len(COLOURS)], label=f"{pairs} pairs")
            for at, pairs in enumerate(_pairs(measured))
        ]
        if softmax is not None:
            keys.append(Line2D([], [], color=NEUTRAL, linestyle="--", label="softmax"))
        keys.append(Line2D([], [], color=NEUTRAL, linestyle=":", label="chance"))
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=8)
        return alone(svg_text(figure, "retrieval", "Retrieval accuracy against distance"))


def _panel(axes: Axes, name: str, measured: Retrieval, softmax: Retrieval | None) -> None:
    distances = sorted({cell.distance for cell in measured.cells})
    for at, pairs in enumerate(_pairs(measured)):
        colour = COLOURS[at % len(COLOURS)]
        for result, style in ((measured, "o-"), (softmax, "s--")):
            if result is None:
                continue
            cells = [cell for cell in result.cells if cell.pairs == pairs]
            axes.errorbar(
                [distances.index(cell.distance) for cell in cells],
                [getattr(cell, name) for cell in cells],
                yerr=[getattr(cell, f"{name}_error") for cell in cells],
                fmt=style,
                color=colour,
                linewidth=1.4,
                markersize=4,
                elinewidth=0.8,
            )
        if name == "choice":
            axes.axhline(1 / pairs, color=colour, linestyle=":", linewidth=0.9)
    axes.set_xticks(range(len(distances)), [f"{distance:,}" for distance in distances])
    axes.set_xlabel("tokens between pairs and questions")
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, 0))


def _pairs(result: Retrieval) -> list[int]:
    return sorted({cell.pairs for cell in result.cells})
