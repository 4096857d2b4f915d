"""The figure of a fidelity comparison, as an SVG file that stands alone."""

from __future__ import annotations

import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from linearize.evaluate import Fidelity, KernelFidelity
from linearize.report.drawing import CONVERTED, GROUP_COLOURS, INK, SOFTMAX, STYLE, alone, svg_text

__all__ = ["fidelity_chart"]

MEASURES = (  # attribute of Errors, title, colour
    ("relative", "RelMSE before $W_o$", CONVERTED),
    ("relative_after", "RelMSE after $W_o$", SOFTMAX),
    ("mse", "MSE before $W_o$", CONVERTED),
    ("mse_after", "MSE after $W_o$", SOFTMAX),
)
AXES_HEIGHT, LINE = 190.0, 9.5  # of the upper panel and of a label in it, roughly, in points
CLIP = 3.0  # bars end at this multiple of the median, with their number beside them


def fidelity_chart(result: Fidelity) -> str:
    """Error against state size, one marker a kernel, above bars of the four measures.

    Kernels that keep every key have no state of constant size and no error; they are left out. Long
    bars are cut and marked; every bar carries its number.
    """
    shown = sorted(
        (one for one in result.kernels if not one.exact),
        key=lambda one: (math.isnan(one.errors.relative), one.errors.relative),
    )
    style = STYLE | {"mathtext.fontset": "dejavusans"}
    with matplotlib.rc_context(style):
        rows = max(len(shown), 1)
        figure = Figure(figsize=(7.2, 4.0 + 0.24 * rows), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.add_gridspec(2, 1, height_ratios=[3.3, 0.9 + 0.24 * rows])
        _scatter(figure.add_subfigure(grid[0]).subplots(), shown)
        panels = figure.add_subfigure(grid[1]).subplots(1, len(MEASURES), sharey=True)
        for axes, (name, title, colour) in zip(panels, MEASURES, strict=True):
            _bars(axes, shown, name, title, colour)
        return alone(svg_text(figure, "fidelity", "Error of every kernel, and its state size"))


def _scatter(axes: Axes, shown: list[KernelFidelity]) -> None:
    """RelMSE before ``W_o`` against the state of one layer in bytes."""
    points = [one for one in shown if one.state_bytes and math.isfinite(one.errors.relative)]
    axes.set_xscale("log")
    axes.set_xlabel("decoding state of one layer and sequence, bytes")
    axes.set_ylabel("RelMSE before $W_o$")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if not points:
        return
    states = [one.state_bytes for one in points]
    axes.set_xlim(min(states) / 1.5, max(states) * 3)
    errors = [one.errors.relative for one in points]
    if min(errors) > 0 and max(errors) > 10 * min(errors):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(min(errors) / 1.3, max(errors) * 1.3)
    else:
        axes.set_ylim(0, max(errors) * 1.15 or 1)
    markers = "os^Dv<>Ph*X"
    for at, one in enumerate(points):
        axes.plot(
            one.state_bytes,
            one.errors.relative,
            markers[at % len(markers)],
            color=GROUP_COLOURS[at % len(GROUP_COLOURS)],
            markersize=6,
        )
    for one, (right, height) in zip(points, _labels(axes, points), strict=True):
        axes.annotate(
            one.title,
            (one.state_bytes, one.errors.relative),
            xytext=(7 if right else -7, height),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            fontsize=8,
        )


def _labels(axes: Axes, points: list[KernelFidelity]) -> list[tuple[bool, float]]:
    """Whether a label stands right of its marker, and how far above, so that close ones stay apart."""
    low, high = axes.get_ylim()
    scale: Any = math.log if axes.get_yscale() == "log" else float

    def height(value: float) -> float:  # in points
        base = scale(low)
        return AXES_HEIGHT * (scale(value) - base) / (scale(high) - base)

    where = [(one.state_bytes, height(one.errors.relative)) for one in points]
    labels = [(True, 0.0)] * len(points)
    placed: list[tuple[bool, float, float]] = []
    for at in sorted(range(len(points)), key=lambda i: where[i][1]):
        state, natural = where[at]
        right = not any(
            1.05 < other / state < 2.5 and abs(level - natural) < LINE for other, level in where
        )
        wanted = natural
        for side, other, taken in placed:
            if side == right and 1 / 4 < state / other < 4 and wanted < taken + LINE:
                wanted = taken + LINE
        labels[at] = (right, wanted - natural)
        placed.append((right, state, wanted))
    return labels


def _bars(axes: Axes, shown: list[KernelFidelity], name: str, title: str, colour: str) -> None:
    """One measure of every kernel, lowest RelMSE on top."""
    values = [getattr(one.errors, name) for one in shown]
    finite = sorted(value for value in values if math.isfinite(value))
    top = min(finite[-1], CLIP * finite[len(finite) // 2]) if finite else 1.0
    top = top or 1.0
    lengths = [min(value, top) if math.isfinite(value) else top for value in values]
    axes.barh(range(len(shown)), lengths, color=colour, height=0.68)
    for at, (value, length) in enumerate(zip(values, lengths, strict=True)):
        axes.annotate(
            f"{value:.3g}" if value <= top else f"{value:.3g} ›",
            (length, at),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, top * 1.55)
    axes.set_xticks([])
    axes.set_yticks(range(len(shown)), [one.title for one in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, fontsize=9, color=INK)


def _bytes(count: float) -> str:
    """``50 kB``, without needless digits."""
    return f"{count / 1e6:g} MB" if count >= 1e6 else f"{count / 1e3:g} kB"
