"""The figure of a comparison, as an SVG file that stands alone."""

from __future__ import annotations

from linearize.report.comparison import Comparison
from linearize.report.drawing import NEUTRAL, alone, canvas, svg_text
from linearize.report.scatter import Point, scatter

__all__ = ["comparison_chart"]


def comparison_chart(result: Comparison) -> str:
    """Perplexity against decoding memory; a line joins the models that no other beats in both."""
    with canvas(7.2, 4.2) as (figure, axes):
        scatter(
            axes,
            [Point(row.memory, row.perplexity, row.name) for row in result.rows],
        )
        best = [(row.memory, row.perplexity) for row in result.rows if row.best]
        axes.step(*zip(*best, strict=True), where="post", color=NEUTRAL, linewidth=1, zorder=0)
        axes.set_xlabel(f"decoding memory of one sequence at {result.tokens:,} tokens, fp32")
        axes.set_ylabel(f"perplexity, blocks of {result.block:,} tokens")
        return alone(svg_text(figure, "comparison", "Perplexity against decoding memory"))
