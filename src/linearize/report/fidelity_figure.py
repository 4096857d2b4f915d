"""The figure of a fidelity comparison, as an SVG file that stands alone."""

from __future__ import annotations

import math

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from linearize.evaluate import Fidelity, KernelFidelity
from linearize.report.drawing import CONVERTED, INK, SOFTMAX, STYLE, alone, svg_text
from linearize.report.scatter import Point, scatter

__all__ = ["fidelity_chart"]

MEASURES = (  # attribute of Errors, title, colour
    ("relative", "RelMSE before $W_o$", CONVERTED),
    ("relative_after", "RelMSE after $W_o$", SOFTMAX),
    ("mse", "MSE before $W_o$", CONVERTED),
    ("mse_after", "MSE after $W_o$", SOFTMAX),
)
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
    axes.set_xlabel("decoding state of one layer and sequence, bytes")
    axes.set_ylabel("RelMSE before $W_o$")
    scatter(
        axes,
        [
            Point(one.state_bytes, one.errors.relative, one.title)
            for one in shown
            if one.state_bytes and math.isfinite(one.errors.relative)
        ],
    )


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
