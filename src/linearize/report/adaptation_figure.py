"""The figure of an adaptation: loss, gradient norm and learning rate along the updates."""

from __future__ import annotations

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from linearize.adapt import AdaptationReport
from linearize.report.drawing import CONVERTED, NEUTRAL, SOFTMAX, STYLE, svg_text

__all__ = ["adaptation_chart"]


def adaptation_chart(report: AdaptationReport) -> str:
    """Training loss and validation likelihood above gradient norm and learning rate.

    The loss of attention transfer has another unit and is left out.
    """
    curves, first = report.curves, report.settings["transfer_steps"]
    updates = range(1, len(curves.loss) + 1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.4), dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        upper.plot(
            updates[first:],
            curves.loss[first:],
            color=NEUTRAL,
            linewidth=1,
            label="training loss",
        )
        upper.plot(
            curves.validated,
            curves.nll,
            "o-",
            color=CONVERTED,
            linewidth=1.6,
            markersize=5,
            label="validation, nats per token",
        )
        upper.axvline(report.best_step, color=CONVERTED, linewidth=0.8, linestyle=":")
        upper.legend(loc="best")
        lower.plot(updates, curves.gradient_norm, color=NEUTRAL, linewidth=1)
        lower.set_ylabel("gradient norm")
        rate = lower.twinx()
        rate.plot(updates, curves.lr, color=SOFTMAX, linewidth=1.2)
        rate.set_ylabel("learning rate", color=SOFTMAX)
        rate.grid(False)
        lower.set_xlabel("updates")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        return svg_text(figure, "adaptation", "Loss along the updates of the adaptation")
