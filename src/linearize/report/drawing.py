"""How figures are drawn: colours, style, axes, and SVG text as the result.

Text and axes take the colour of the surrounding page (``currentColor``) or, in a file that stands
alone, a mid-tone; the background is transparent and all other colours are mid-tones, so that a
figure reads on paper and on a dark screen.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

__all__ = [
    "CONVERTED",
    "FLOOR",
    "GREY",
    "GROUP_COLOURS",
    "INK",
    "LINE_COLOURS",
    "NEUTRAL",
    "SOFTMAX",
    "STYLE",
    "alone",
    "byte_text",
    "canvas",
    "group_colour",
    "log_axis",
    "svg_text",
]

INK = "#010203"  # becomes currentColor
GREY = "#767676"  # the ink of figures that stand alone: 4.5:1 on white and on black
FLOOR = 1e-12  # where an error of zero is drawn
SOFTMAX, CONVERTED, NEUTRAL = "#d9772b", "#3b7de0", "#868c97"
# The bulk first; more groups than colours start again after the bulk.
GROUP_COLOURS = (NEUTRAL, CONVERTED, SOFTMAX, "#2a9d64", "#9a63d8", "#d14b5a", "#1798a5")
LINE_COLOURS = GROUP_COLOURS[1:]

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


@contextmanager
def canvas(width: float, height: float, rows: int = 0, columns: int = 0) -> Iterator[Any]:
    """A figure that stands alone, and its axes: one, or a grid ``[rows][columns]``."""
    with matplotlib.rc_context(STYLE | {"axes.labelsize": 9, "font.size": 9}):
        figure = Figure(figsize=(width, height), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        axes: Axes | Any = figure.add_subplot() if not rows else None
        yield figure, figure.subplots(rows, columns, squeeze=False) if rows else axes


def alone(drawn: str) -> str:
    """Give a figure the ink and font that it would take from a page."""
    return drawn.replace("<svg", f'<svg style="color: {GREY}; font-family: sans-serif"', 1) + "\n"


def log_axis(axes: Axes, values: list[float]) -> None:
    """A logarithmic y axis around ``values`` with plain numbers, also where it spans no decade."""
    seen = [max(value, FLOOR) for value in values if math.isfinite(value)] or [1.0]
    low, high = min(seen) / 1.4, max(seen) * 1.4
    axes.set_ylim(low, high)
    axes.set_yscale("log")
    subs = (1.0,) if math.log10(high / low) > 3 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def svg_text(figure: Figure, name: str, title: str) -> str:
    """The figure as an ``<svg>`` element whose ids are its own."""
    buffer = io.StringIO()
    nothing: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    salt: Any = {"svg.hashsalt": name}
    with matplotlib.rc_context(salt):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{name}-", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = text.replace(INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()


def group_colour(group: int) -> str:
    """The colour of a group, the bulk being 0."""
    return GROUP_COLOURS[0 if group == 0 else 1 + (group - 1) % (len(GROUP_COLOURS) - 1)]


def byte_text(count: float) -> str:
    """``1.5 MB``; decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return (
                f"{count:.0f} {unit}" if count >= 100 or unit == "bytes" else f"{count:.3g} {unit}"
            )
        count /= 1000
    return f"{count:,.3g} TB"
