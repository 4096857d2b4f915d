"""The figures of the benchmarks, as SVG files that stand alone; see `diagnose_figures`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from linearize.bench import DecodeBench, ModelBench, OperatorBench, OperatorRow
from linearize.bench.model import STAGES
from linearize.report.drawing import (
    CONVERTED,
    INK,
    LINE_COLOURS,
    SOFTMAX,
    alone,
    byte_text,
    canvas,
    log_axis,
    svg_text,
)

__all__ = ["decode_figures", "model_figures", "operator_figures"]

MARKERS = "osD^vP*X<>ph"


def operator_figures(result: OperatorBench) -> dict[str, str]:
    """Latency and memory against length for every precision: ``operator-fp32`` and so on."""
    return {
        f"operator-{dtype}": _operator(result, dtype)
        for dtype in result.settings["dtypes"]
        if any(row.dtype == dtype and row.forward is not None for row in result.rows)
    }


def decode_figures(result: DecodeBench) -> dict[str, str]:
    """Tokens per second and memory against the context length."""
    points = [p for p in result.points if p.converted is not None and p.softmax is not None]
    if not points:
        return {}
    contexts = [point.context for point in points]
    batch = result.settings["batch"]
    with canvas(7.6, 3.3, 1, 2) as (figure, axes):
        left, right = axes[0]
        for name, colour, style in (("softmax", SOFTMAX, "s--"), ("converted", CONVERTED, "o-")):
            times = [getattr(point, name) for point in points]
            rates = [batch / time.median for time in times]
            left.plot(contexts, rates, style, color=colour, markersize=4, label=name)
            left.fill_between(
                contexts,
                [batch / time.high for time in times],
                [batch / time.low for time in times],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
            sizes = [getattr(point, f"{name}_bytes") for point in points]
            right.plot(contexts, sizes, style, color=colour, markersize=4, label=name)
        left.set_ylim(bottom=0)
        left.set_ylabel("tokens per second")
        left.legend(loc="best")
        log_axis(right, [b for p in points for b in (p.converted_bytes or 1, p.softmax_bytes or 1)])
        right.set_ylabel("memory" if batch > 1 else "memory of one sequence")
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_text(value)))
        for panel in (left, right):
            _length_axis(panel, contexts, "context length in tokens")
        return {"decode": alone(svg_text(figure, "decode", "Decoding speed and memory"))}


def model_figures(result: ModelBench) -> dict[str, str]:
    """Time of the converted model over softmax, stage by stage."""
    timed = [point for point in result.points if point.ratio is not None]
    if not timed:
        return {}
    with canvas(6.4, 3.2) as (figure, axes):
        for at, stage in enumerate(STAGES):
            points = [point for point in timed if point.stage == stage]
            axes.plot(
                [point.tokens for point in points],
                [point.ratio for point in points],
                f"{MARKERS[at]}-",
                color=LINE_COLOURS[at],
                markersize=4.5,
                label=stage,
            )
        axes.axhline(1, color=INK, alpha=0.5, linewidth=0.9, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time over that of softmax")
        axes.legend(loc="best")
        lengths = sorted({point.tokens for point in timed})
        _length_axis(axes, lengths, "tokens of the prompt or sequence")
        return {"model": alone(svg_text(figure, "model", "Time of the whole model over softmax"))}


def _operator(result: OperatorBench, dtype: str) -> str:
    rows = [row for row in result.rows if row.dtype == dtype and row.forward is not None]
    paths = list(dict.fromkeys(row.path for row in rows))
    lengths = sorted({row.tokens for row in rows})
    with canvas(7.6, 4.6, 1, 2) as (figure, axes):
        left, right = axes[0]
        for path, look in _looks(paths, rows).items():
            mine = [row for row in rows if row.path == path]
            at = [row.tokens for row in mine]
            times = [row.forward.median * 1e3 for row in mine if row.forward is not None]
            left.plot(at, times, **look, label=mine[0].title)
            right.plot(at, [max(row.peak_bytes or 0, 1) for row in mine], **look)
        log_axis(left, [row.forward.median * 1e3 for row in rows if row.forward is not None])
        log_axis(right, [max(row.peak_bytes or 0, 1) for row in rows])
        left.set_ylabel("milliseconds, forward")
        right.set_ylabel("memory beyond inputs and outputs")
        for panel in (left, right):
            _length_axis(panel, lengths, "tokens")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: byte_text(value)))
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        name = f"operator-{dtype}"
        return alone(svg_text(figure, name, f"Latency and memory against length, {dtype}"))


def _looks(paths: Sequence[str], rows: Sequence[OperatorRow]) -> dict[str, dict[str, Any]]:
    """Softmax dashed in its colour, each kernel in one of its own with its own marker."""
    reference = {row.path for row in rows if row.reference}
    colours = [CONVERTED, *(c for c in LINE_COLOURS if c not in (CONVERTED, SOFTMAX))]
    order = sorted((p for p in paths if p not in reference), key=lambda p: p != "oal")
    looks: dict[str, dict[str, Any]] = {}
    for at, path in enumerate(p for p in paths if p in reference):
        style = ("--", ":", "-.")[at % 3]
        looks[path] = {"color": SOFTMAX, "linestyle": style, "marker": "", "linewidth": 2}
    for at, path in enumerate(order):
        looks[path] = {
            "color": colours[at % len(colours)],
            "linestyle": "-" if at < len(colours) else (0, (5, 1)),
            "marker": MARKERS[at % len(MARKERS)],
            "markersize": 4,
            "linewidth": 2 if path == "oal" else 1.2,
        }
    return looks


def _length_axis(axes: Axes, lengths: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
