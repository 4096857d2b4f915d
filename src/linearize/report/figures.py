"""The figures of a report, as SVG text to be placed inside a page.

Text and axes take the colour of the surrounding page (``currentColor``), the background is
transparent and all other colours are mid-tones, so that a figure reads on paper and on a dark screen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from linearize.convert import ConversionReport, LayerReport
from linearize.report.data import Memory
from linearize.report.drawing import (
    CONVERTED,
    FLOOR,
    INK,
    NEUTRAL,
    SOFTMAX,
    STYLE,
    byte_text,
    group_colour,
    log_axis,
    svg_text,
)

__all__ = [
    "Profiles",
    "error_chart",
    "fitting_chart",
    "memory_chart",
    "profiles",
]


@dataclass(frozen=True)
class Profiles:
    """The sorted contribution profile of every head, on common axes.

    Attributes:
        svg: the chart with the chosen head's bars; a bar path per group, ``class="bars"``.
        paths: the ``d`` attribute of every group's bars, ``[layer][head][group]``.
        layer, head: the positions of the chosen head in ``paths``.
    """

    svg: str
    paths: list[list[list[str]]]
    layer: int
    head: int


def error_chart(report: ConversionReport) -> str:
    """Relative output error on the validation blocks: one dot a head, a line through the means."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(7.2, 2.9)
        position = range(len(report.layers))
        for at, layer in enumerate(report.layers):
            values = [max(value, FLOOR) for value in layer.validation_relative]
            axes.plot([at] * len(values), values, "o", color=NEUTRAL, alpha=0.6, markersize=3.5)
        means = [_mean(layer.validation_relative) for layer in report.layers]
        axes.plot(position, means, "o-", color=CONVERTED, linewidth=1.6, markersize=5)
        _layers_axis(axes, report)
        axes.set_ylabel("relative error")
        log_axis(axes, [e for layer in report.layers for e in layer.validation_relative])
        return svg_text(figure, "errors", "Relative output error per layer and head")


def fitting_chart(report: ConversionReport) -> str | None:
    """Mean square error per layer, fitting positions against validation blocks; heads averaged.

    ``None`` for kernels that have nothing to fit.
    """
    if not any(layer.fit_mse for layer in report.layers):
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(7.2, 2.6)
        fit = [_mean(layer.fit_mse) for layer in report.layers]
        validation = [_mean(layer.validation_mse) for layer in report.layers]
        position = range(len(report.layers))
        axes.plot(position, fit, "s--", color=SOFTMAX, linewidth=1.2, markersize=4, label="fitting")
        axes.plot(
            position,
            validation,
            "o-",
            color=CONVERTED,
            linewidth=1.6,
            markersize=5,
            label="validation",
        )
        _layers_axis(axes, report)
        axes.set_ylabel("mean square error")
        log_axis(axes, fit + validation)
        axes.legend(loc="best")
        return svg_text(figure, "fitting", "Fitting and validation error per layer")


def memory_chart(memory: Memory) -> str:
    """Decoding memory against context length, both axes logarithmic."""
    last = 2 ** max(17, math.ceil(math.log2((memory.crossover or 1) * 8)))
    lengths = [2**power for power in range(4, int(math.log2(last)) + 1)]
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(7.2, 3.2)
        before = [memory.before(tokens) for tokens in lengths]
        after = [memory.after(tokens) for tokens in lengths]
        axes.plot(lengths, before, "--", color=SOFTMAX, linewidth=2, label="softmax everywhere")
        axes.plot(lengths, after, "-", color=CONVERTED, linewidth=2, label="converted")
        if memory.crossover is not None:
            axes.axvline(memory.crossover, color=INK, alpha=0.45, linewidth=0.9, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_text(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("context length in tokens")
        axes.set_ylabel("memory of one sequence")
        axes.legend(loc="upper left")
        return svg_text(figure, "memory", "Decoding memory against context length")


def profiles(report: ConversionReport) -> Profiles | None:
    """The profiles of all heads, with the head of most groups chosen (of these the steepest).

    ``None`` if the report holds no profile.
    """
    values = [v for layer in report.layers for head in layer.profile for v in head if v > 0]
    if not values:
        return None
    dim = max(len(head) for layer in report.layers for head in layer.profile)
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(7.2, 2.9)
        axes.set_xlim(0.2, dim + 0.8)
        log_axis(axes, values)
        axes.set_xlabel("dimension of the head, by contribution")
        axes.set_ylabel("mean contribution to a logit")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(False, axis="x")
        figure.canvas.draw()  # settles the layout
        figure.set_layout_engine("none")
        paths = [
            [_bars(axes, layer, head) for head in range(len(layer.profile))]
            for layer in report.layers
        ]
        svg = svg_text(figure, "profile", "Sorted contribution profile")
    at_layer, at_head = max(
        ((i, h) for i, layer in enumerate(paths) for h in range(len(layer))),
        key=lambda at: (len(paths[at[0]][at[1]]), _steepness(report.layers[at[0]].profile[at[1]])),
    )
    most = max(len(head) for layer in paths for head in layer)
    chosen = paths[at_layer][at_head]
    bars = "".join(
        f'<path class="bars" style="fill:{group_colour(group)}" '
        f'd="{chosen[group] if group < len(chosen) else ""}"/>'
        for group in range(most)
    )
    return Profiles(svg.replace("</svg>", bars + "</svg>"), paths, at_layer, at_head)


def _bars(axes: Axes, layer: LayerReport, head: int) -> list[str]:
    """SVG path data of every group's bars of one head, bulk first."""
    profile = layer.profile[head]
    order = sorted(range(len(profile)), key=lambda r: profile[r])
    groups = layer.groups[head] if layer.groups else [list(range(len(profile)))]
    owner = {r: group for group, members in enumerate(groups) for r in members}
    parts: list[list[str]] = [[] for _ in groups]
    height = axes.figure.bbox.height  # SVG counts downwards
    floor, top = axes.get_ylim()
    for rank, r in enumerate(order, 1):
        value = min(max(profile[r], floor), top)
        left, low = axes.transData.transform((rank - 0.4, floor))
        right, high = axes.transData.transform((rank + 0.4, value))
        if high > low:
            parts[owner[r]].append(
                f"M{left:.1f} {height - low:.1f}H{right:.1f}V{height - high:.1f}H{left:.1f}Z"
            )
    return ["".join(part) for part in parts]


def _steepness(profile: list[float]) -> float:
    ordered = sorted(profile)
    middle = ordered[len(ordered) // 2]
    return ordered[-1] / middle if middle > 0 else 0.0


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=72, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _layers_axis(axes: Axes, report: ConversionReport) -> None:
    step = math.ceil(len(report.layers) / 24)
    axes.set_xticks(
        range(0, len(report.layers), step), [str(layer.layer) for layer in report.layers[::step]]
    )
    axes.set_xlim(-0.6, len(report.layers) - 0.4)
    axes.set_xlabel("layer")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
