"""The results of the diagnostics as tables of plain text, for the terminal and for Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from linearize.diagnose.activations import ActivationProfile
from linearize.diagnose.budget import GroupBudget
from linearize.diagnose.concentration import Concentration
from linearize.diagnose.groups import Groups
from linearize.diagnose.profiles import Profiles
from linearize.diagnose.retained_result import KernelRetained, RetainedError
from linearize.diagnose.stability import HeadStability, Stability
from linearize.diagnose.state_size import StateCurve

__all__ = [
    "Rows",
    "Shown",
    "activation_tables",
    "budget_tables",
    "concentration_tables",
    "group_tables",
    "profile_tables",
    "retained_tables",
    "stability_tables",
    "state_tables",
]


@dataclass(frozen=True)
class Rows:
    """A table in plain text: the first ``left`` columns are names, the others numbers."""

    columns: list[str]
    rows: list[list[str]]
    left: int = 1


Shown = tuple[list[Rows], str]  # tables, and a sentence on what they hold


def profile_tables(result: Profiles) -> Shown:
    """The largest contributions of every head."""
    rows = [
        [
            f"{h.layer}",
            f"{h.head}",
            _percent(h.top_share),
            _numbers(h.order[:5]),
            ", ".join(f"{h.contribution[r]:.3f}" for r in h.order[:5]),
            f"{sorted(h.contribution)[len(h.contribution) // 2]:.3f}",
        ]
        for h in result.heads
    ]
    columns = ["layer", "head", "top 5 %", "their dimensions", "their contributions", "median"]
    return [Rows(columns, rows, 2)], (
        f"Mean contribution |q k scale| of a dimension to a logit, over the causal pairs of "
        f"{result.prompts} prompts of {result.prompt_length} tokens."
    )


def group_tables(result: Groups) -> Shown:
    """The groups of every head, and the cuts that were likeliest."""
    tables = []
    summary = []
    for h in result.heads:
        members = "; ".join(_numbers(group) for group in h.groups[1:])
        summary.append([f"{h.layer}", f"{h.head}", f"{len(h.groups[0])}", members])
        best = sorted(h.cuts, key=lambda cut: (-cut.made, -cut.support, -cut.gap))[:6]
        tables.append(
            Rows(
                [f"layer {h.layer}, head {h.head}: cut above", "gap", "support", "natural", "made"],
                [
                    [
                        f"{cut.below}",
                        f"{cut.gap:.2f}",
                        f"{cut.support:.3f}",
                        "yes" if cut.natural else "no",
                        "yes" if cut.made else "no",
                    ]
                    for cut in sorted(best, key=lambda cut: cut.below)
                ],
            )
        )
    columns = ["layer", "head", "in the bulk", "other groups"]
    return [Rows(columns, summary, 4), *tables], (
        f"Cuts need a gap of {result.tau:g} and a support of {result.gamma:g} over "
        f"{result.bootstrap:,} bootstrap replicates, within the upper {_percent(result.alpha)} % of "
        f"the dimensions; at least {result.min_groups} groups. The best candidates are shown."
    )


def budget_tables(result: GroupBudget) -> Shown:
    """One line a budget."""
    rows = [
        [
            f"{p.groups}",
            f"{p.parameters}",
            f"{p.heldout_mse:.5g}",
            f"{p.heldout_relative:.4f}",
            f"{p.validation_mse:.5g}",
            f"{p.seconds:.1f}",
        ]
        for p in result.points
    ]
    columns = ["groups", "parameters", "held-out MSE", "relative", "validation MSE", "seconds"]
    return [Rows(columns, rows, 0)], (
        f"Layer {result.layer}, head {result.head}: fitted on {result.fit_blocks} blocks of "
        f"{result.block:,} tokens, chosen on {result.validation_blocks}, measured on "
        f"{result.heldout_blocks} others; solver {result.solver}."
    )


def state_tables(result: StateCurve) -> Shown:
    """One line a layer and number of directions."""
    rows = [
        [
            f"{layer}",
            "all" if point.rank is None else f"{point.rank}",
            f"{point.features:,}",
            f"{point.state_bytes:,}",
            f"{sum(point.heldout_relative) / len(point.heldout_relative):.4f}",
            f"{sum(point.validation_relative) / len(point.validation_relative):.4f}",
            f"{point.seconds:.1f}",
        ]
        for layer, curve in zip(result.layers, result.points, strict=True)
        for point in curve
    ]
    columns = [
        "layer",
        "directions",
        "features",
        "bytes",
        "held-out error",
        "validation",
        "seconds",
    ]
    return [Rows(columns, rows, 0)], (
        f"Kernel {result.kernel}, {result.sinks} sinks, window {result.window}, "
        f"{'centred' if result.center else 'uncentred'} keys: relative output error, mean over the "
        f"heads; fitted on {result.fit_blocks} blocks of {result.block:,} tokens, chosen on "
        f"{result.validation_blocks}, measured on {result.heldout_blocks} others."
    )


def concentration_tables(result: Concentration) -> Shown:
    """One line a layer."""

    def span(values: list[float]) -> str:
        return f"{_percent(sum(values) / len(values))} ({_percent(min(values))}–{_percent(max(values))})"

    rows = [
        [f"{x.layer}", span(x.pretrained), span(x.gaussian), span(x.gaussian_same)]
        for x in result.layers
    ]
    columns = ["layer", "pretrained %", "Gaussian %", "Gaussian, same dimensions %"]
    return [Rows(columns, rows)], (
        f"Share of the top {result.top} of {result.dimensions} dimensions: mean over the heads, and "
        f"their range; equal contributions would give {_percent(result.uniform)} %. "
        f"{result.prompts} prompts of {result.prompt_length} tokens."
    )


def stability_tables(result: Stability) -> Shown:
    """Other inputs, one line a layer; other lengths, a table for every layer."""
    by_layer: dict[int, list[HeadStability]] = {}
    for one in result.heads:
        by_layer.setdefault(one.layer, []).append(one)
    shown = [one for one in result.heads if one.head == result.head]
    inputs = [
        [
            f"{one.layer}",
            f"{one.spearman:.3f}",
            f"{one.overlap} of {result.top}",
            f"{sum(h.spearman for h in heads) / len(heads):.3f}",
            f"{min(h.spearman for h in heads):.3f}",
            f"{sum(h.overlap for h in heads) / len(heads):.2f}",
        ]
        for one, heads in zip(shown, by_layer.values(), strict=True)
    ]
    columns = ["layer", "Spearman", "top shared", "mean of heads", "least", "mean shared"]
    tables = [Rows([f"inputs, head {result.head}: {columns[0]}", *columns[1:]], inputs)]
    for one in shown:
        rows = [
            [
                f"{prefix.length}",
                *(_percent(share) for share in prefix.shares),
                f"{prefix.spearman:.3f}",
                f"{prefix.overlap}",
            ]
            for prefix in one.prefixes
        ]
        names = [f"r={r} %" for r in one.top]
        tables.append(Rows([f"layer {one.layer}: length", *names, "Spearman", "top shared"], rows))
    return tables, (
        f"Profiles on {result.prompts} calibration and as many held-out prompts of "
        f"{result.prompt_length} tokens; then shares of the contributions on prefixes of the first "
        f"evaluation block, compared with the whole block."
    )


def activation_tables(result: ActivationProfile) -> Shown:
    """One line a layer."""
    rows = [
        [
            f"{x.layer}",
            *(f"{value:.1f} ({r})" for value, r in zip(x.top, x.dimensions, strict=True)),
            f"{x.median:.2f}",
        ]
        for x in result.layers
    ]
    names = [f"top {rank + 1}" for rank in range(len(result.layers[0].top))]
    return [Rows(["layer", *names, "median"], rows)], (
        f"Largest absolute value of every one of {result.hidden} hidden dimensions in a block's "
        f"output, over {result.prompts} prompts of {result.prompt_length} tokens: the largest (with "
        f"their dimension) and the median of these."
    )


def retained_tables(result: RetainedError) -> Shown:
    """One line a kernel: pooled, and layer by layer."""

    def row(kernel: KernelRetained) -> list[str]:
        test = kernel.controls
        return [
            kernel.kernel,
            _percent(kernel.ratio),
            _percent(kernel.gaussian),
            "-" if test is None else f"{_percent(test.mean)} (at most {_percent(test.largest)})",
            "-" if test is None else f"{test.p:.2g}",
        ]

    def by_layer(kernel: KernelRetained) -> list[str]:
        return [
            kernel.kernel,
            *(f"{_percent(x.ratio)} / {_percent(x.gaussian)}" for x in kernel.layers),
        ]

    columns = ["kernel", "retained %", "Gaussian %", "random subsets %", "p"]
    layers = ["retained / Gaussian %", *(f"layer {layer}" for layer in result.layers)]
    return [
        Rows(columns, [row(kernel) for kernel in result.kernels]),
        Rows(layers, [by_layer(kernel) for kernel in result.kernels]),
    ], (
        f"Error with the kernel on the selected dimensions alone, over its error on all: "
        f"{_percent(result.share)} % are selected ({_percent(result.gaussian_share)} % in the "
        f"Gaussian control). {result.sequences} sequences of {result.block:,} tokens at "
        f"{result.positions} positions each; kernels {'fitted' if result.fitted else 'as drawn'}; "
        f"{result.seconds:.0f} s."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values))
