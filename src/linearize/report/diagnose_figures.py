"""The figures of the diagnostics, as SVG files that stand alone.

The background is transparent and every colour, the ink included, is a mid-tone: the page around a
figure may be paper or a dark screen.
"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from linearize.diagnose import (
    ActivationProfile,
    Concentration,
    GroupBudget,
    Groups,
    Profiles,
    RetainedError,
    Stability,
    StateCurve,
)
from linearize.diagnose.groups import HeadGroups
from linearize.diagnose.profiles import HeadProfile
from linearize.diagnose.stability import HeadStability
from linearize.report.drawing import (
    CONVERTED,
    GROUP_COLOURS,
    INK,
    LINE_COLOURS,
    NEUTRAL,
    SOFTMAX,
    alone,
    canvas,
    group_colour,
    log_axis,
    svg_text,
)

__all__ = [
    "activation_figures",
    "budget_figures",
    "concentration_figures",
    "group_figures",
    "profile_figures",
    "retained_figures",
    "stability_figures",
    "state_figures",
]

MARKED = 2  # the largest contributions stand out in colour, as in the paper's figure 1

# Every function gives its figures by file name without suffix.


def profile_figures(result: Profiles) -> dict[str, str]:
    """Magnitudes of queries and keys, contributions and their sorted curve, for every head."""
    return {f"profiles-layer{h.layer}-head{h.head}": _profile(h) for h in result.heads}


def group_figures(result: Groups) -> dict[str, str]:
    """The sorted profile in the colours of its groups, and gap and support of every possible cut."""
    return {f"groups-layer{h.layer}-head{h.head}": _groups(h, result) for h in result.heads}


def budget_figures(result: GroupBudget) -> dict[str, str]:
    """Held-out and validation error against the number of groups, with the parameters it costs."""
    name = f"budget-layer{result.layer}-head{result.head}"
    with canvas(6.4, 3.2) as (figure, axes):
        counts = [point.groups for point in result.points]
        for values, style, colour, label in (
            ([p.heldout_mse for p in result.points], "o-", CONVERTED, "held-out blocks"),
            ([p.validation_mse for p in result.points], "s--", NEUTRAL, "validation blocks"),
        ):
            axes.plot(counts, values, style, color=colour, markersize=5, label=label)
        axes.set_xlabel("number of groups")
        axes.set_ylabel("output mean square error")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        other = axes.twinx()
        numbers = [point.parameters for point in result.points]
        other.plot(counts, numbers, "^:", color=SOFTMAX, markersize=4.5, label="parameters")
        other.set_ylabel("learned numbers of the head")
        other.set_ylim(bottom=0)
        other.grid(False)
        lines = [*axes.get_lines(), *other.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper center", ncols=3)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.2)
        title = f"Error against groups, layer {result.layer}, head {result.head}"
        return {name: alone(svg_text(figure, name, title))}


def state_figures(result: StateCurve) -> dict[str, str]:
    """Held-out error of every layer against the bytes it keeps; the untruncated kernel is hollow."""
    with canvas(6.4, 3.2) as (figure, axes):
        for at, (layer, curve) in enumerate(zip(result.layers, result.points, strict=True)):
            colour = GROUP_COLOURS[at % len(GROUP_COLOURS)]
            size = [point.state_bytes / 1024 for point in curve]
            error = [_mean(point.heldout_relative) for point in curve]
            axes.plot(size[:-1], error[:-1], "o-", color=colour, label=f"layer {layer}")
            axes.plot(size[-2:], error[-2:], ":", color=colour)
            axes.plot(size[-1:], error[-1:], "o", color=colour, markerfacecolor="none")
        axes.set_xscale("log")
        axes.set_xlabel("decoding state of the layer (KiB, fp32)")
        axes.set_ylabel("relative output error")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")
        return {"state": alone(svg_text(figure, "state", "Error against the size of the state"))}


def concentration_figures(result: Concentration) -> dict[str, str]:
    """Top-5 share of every head, layer by layer, against the Gaussian controls."""
    with canvas(7.2, 3.0) as (figure, axes):
        at = range(len(result.layers))
        for x, layer in zip(at, result.layers, strict=True):
            shown = {"label": "a pretrained head"} if x == 0 else {}
            xs = [x] * len(layer.pretrained)
            dots: Any = dict(color=CONVERTED, alpha=0.6, markersize=4) | shown
            axes.plot(xs, layer.pretrained, "o", **dots)
        for values, colour, style, label in (
            ([_mean(x.pretrained) for x in result.layers], CONVERTED, "-", "mean of the layer"),
            ([_mean(x.gaussian) for x in result.layers], SOFTMAX, "s--", "Gaussian, its own top 5"),
            (
                [_mean(x.gaussian_same) for x in result.layers],
                NEUTRAL,
                "^:",
                "Gaussian, the same dimensions",
            ),
        ):
            axes.plot(at, values, style, color=colour, markersize=4, label=label)
        step = math.ceil(len(result.layers) / 24)
        axes.set_xticks(at[::step], [str(layer.layer) for layer in result.layers[::step]])
        axes.set_xlabel("layer")
        axes.set_ylabel(f"share of the top {result.top} of {result.dimensions}")
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.set_ylim(0, 1)
        axes.legend(loc="upper center", ncols=2, fontsize=9)
        return {"concentration": alone(svg_text(figure, "concentration", "Concentration per head"))}


def stability_figures(result: Stability) -> dict[str, str]:
    """For the head shown in detail: profiles on other inputs, and shares at other lengths."""
    return {
        f"stability-layer{one.layer}-head{one.head}": _stability(one, result)
        for one in result.heads
        if one.head == result.head
    }


def activation_figures(result: ActivationProfile) -> dict[str, str]:
    """The largest residual activations of every layer, and the median over dimensions."""
    with canvas(7.2, 3.0) as (figure, axes):
        layers = [layer.layer for layer in result.layers]
        for rank in range(len(result.layers[0].top)):
            values = [layer.top[rank] for layer in result.layers]
            axes.plot(
                layers,
                values,
                "o-",
                color=LINE_COLOURS[rank],
                markersize=3.5,
                linewidth=1.4,
                label=f"top {rank + 1}",
            )
        medians = [layer.median for layer in result.layers]
        axes.plot(layers, medians, "s--", color=NEUTRAL, markersize=3.5, label="median")
        log_axis(axes, [layer.top[0] for layer in result.layers] + medians)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_major_locator(MaxNLocator(15, integer=True))
        axes.set_xlabel("layer")
        axes.set_ylabel("largest |activation|")
        axes.legend(loc="best", ncols=4, fontsize=9)
        return {"activations": alone(svg_text(figure, "activations", "Residual activations"))}


def retained_figures(result: RetainedError) -> dict[str, str]:
    """Retained error of every kernel, beside the Gaussian control and the random subsets."""
    with canvas(7.2, 3.2) as (figure, axes):
        width = 0.26
        for at, kernel in enumerate(result.kernels):
            bars = [(kernel.ratio, CONVERTED), (kernel.gaussian, SOFTMAX)]
            if kernel.controls is not None:
                bars.append((kernel.controls.mean, NEUTRAL))
            for place, (value, colour) in enumerate(bars):
                x = at + (place - 1) * width
                axes.bar(x, value, width * 0.92, color=colour)
                axes.annotate(
                    f"{100 * value:.1f}",
                    (x, value),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
            if kernel.controls is not None:
                low, high = min(kernel.controls.ratios), kernel.controls.largest
                axes.plot([at + width] * 2, [low, high], color=INK, linewidth=1.2)
        for colour, label in (
            (CONVERTED, f"selected {100 * result.share:.1f} % of the dimensions"),
            (SOFTMAX, "the same for Gaussian queries and keys"),
            (NEUTRAL, "random dimensions of the bulk: mean and range"),
        ):
            if label.startswith("random") and all(k.controls is None for k in result.kernels):
                continue
            axes.bar([0], [0], color=colour, label=label)
        axes.set_xticks(range(len(result.kernels)), [kernel.title for kernel in result.kernels])
        axes.set_ylabel("retained share of the error")
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.grid(False, axis="x")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.35)
        axes.legend(loc="upper left", fontsize=8.5)
        return {"retained-error": alone(svg_text(figure, "retained", "Retained error per kernel"))}


def _profile(head: HeadProfile) -> str:
    name = f"profile-{head.layer}-{head.head}"
    marked = dict(zip(head.order[:MARKED], (SOFTMAX, "#2a9d64"), strict=False))
    dims = range(len(head.contribution))
    colours = [marked.get(r, CONVERTED) for r in dims]
    with canvas(7.6, 4.6, 2, 2) as (figure, axes):
        for panel, values, label in (
            (axes[0][0], head.query, "mean |q|"),
            (axes[0][1], head.key, f"mean |k| of KV head {head.kv_head}"),
            (axes[1][0], head.contribution, "contribution χ"),
        ):
            panel.bar(dims, values, color=colours, width=0.85)
            panel.set_ylabel(label)
            panel.set_xlabel("dimension")
            panel.grid(False, axis="x")
        panel = axes[1][1]
        values = [head.contribution[r] for r in head.order]
        panel.plot(range(1, len(values) + 1), values, color=CONVERTED, linewidth=1.4)
        for rank, r in enumerate(head.order[:MARKED], 1):
            panel.plot([rank], [head.contribution[r]], "o", color=marked[r], label=f"r = {r}")
        log_axis(panel, values)
        panel.set_xlabel("rank")
        panel.set_ylabel("sorted χ")
        panel.legend(loc="upper right")
        title = f"Contribution profile, layer {head.layer}, head {head.head}"
        return alone(svg_text(figure, name, title))


def _groups(head: HeadGroups, result: Groups) -> str:
    name = f"groups-{head.layer}-{head.head}"
    owner = {r: group for group, members in enumerate(head.groups) for r in members}
    with canvas(7.6, 4.4, 2, 1) as (figure, axes):
        top, bottom = axes[0][0], axes[1][0]
        ranks = range(1, len(head.order) + 1)
        for group in range(len(head.groups)):
            mine = [rank for rank, r in zip(ranks, head.order, strict=True) if owner[r] == group]
            top.bar(
                mine,
                [head.sorted_contribution[rank - 1] for rank in mine],
                color=group_colour(group),
                width=0.85,
                label=f"group {group + 1}: {len(mine)}" + (" (bulk)" if group == 0 else ""),
            )
        log_axis(top, head.sorted_contribution)
        top.set_ylabel("contribution χ")
        top.grid(False, axis="x")
        top.legend(loc="upper left", ncols=3, fontsize=8.5)
        cuts = [cut.below + 0.5 for cut in head.cuts]
        bottom.plot(cuts, [c.support for c in head.cuts], "o-", color=CONVERTED, markersize=4)
        bottom.axhline(result.gamma, color=CONVERTED, linestyle=":", linewidth=1)
        bottom.set_ylabel("support S", color=CONVERTED)
        bottom.set_ylim(-0.04, 1.04)
        other = bottom.twinx()
        other.plot(cuts, [c.gap for c in head.cuts], "s--", color=SOFTMAX, markersize=4)
        other.axhline(result.tau, color=SOFTMAX, linestyle=":", linewidth=1)
        other.set_ylabel("gap ρ", color=SOFTMAX)
        other.grid(False)
        for axis in (top, bottom):
            axis.set_xlim(0.2, len(head.order) + 0.8)
            for cut in head.cuts:
                if cut.made:
                    axis.axvline(cut.below + 0.5, color=INK, linewidth=0.9, alpha=0.6)
        bottom.set_xlabel("dimension of the head, by contribution")
        title = f"Groups, layer {head.layer}, head {head.head}"
        return alone(svg_text(figure, name, title))


def _stability(one: HeadStability, result: Stability) -> str:
    name = f"stability-{one.layer}-{one.head}"
    with canvas(7.6, 3.3, 1, 2) as (figure, axes):
        left, right = axes[0]
        values = [*one.calibration, *one.heldout]
        log_axis(left, values)
        limits = left.get_ylim()
        left.set_xscale("log")
        left.set_xlim(limits)
        left.xaxis.set_major_locator(LogLocator(base=10, numticks=20))
        left.xaxis.set_major_formatter(left.yaxis.get_major_formatter())
        left.xaxis.set_minor_formatter(NullFormatter())
        left.plot(limits, limits, color=INK, alpha=0.4, linewidth=0.9)
        left.plot(one.calibration, one.heldout, "o", color=CONVERTED, markersize=4, alpha=0.8)
        left.set_xlabel("χ on calibration prompts")
        left.set_ylabel("χ on held-out prompts")
        left.set_title(
            f"Spearman {one.spearman:.3f}, top {result.top}: {one.overlap} shared",
            fontsize=9,
            color=INK,
        )
        for rank, r in enumerate(one.top):
            right.plot(
                result.lengths,
                [prefix.shares[rank] for prefix in one.prefixes],
                "o-",
                color=LINE_COLOURS[rank % len(LINE_COLOURS)],
                markersize=4,
                label=f"r = {r}",
            )
        right.set_xscale("log", base=2)
        right.set_xticks(result.lengths, [str(n) for n in result.lengths])
        right.set_xlabel("prefix length in tokens")
        right.set_ylabel("share of the contributions")
        right.yaxis.set_major_formatter(PercentFormatter(1, 0))
        right.set_ylim(bottom=0)
        right.legend(loc="best", fontsize=8.5, ncols=2)
        title = f"Stability of the profile, layer {one.layer}, head {one.head}"
        return alone(svg_text(figure, name, title))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
