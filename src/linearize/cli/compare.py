"""`linearize compare`: converted folders side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from linearize.cli.common import (
    JsonOption,
    check_file,
    note,
    results,
    say,
    store_json,
    table,
)
from linearize.output import write_text
from linearize.report.comparison import CONTEXT, Comparison, compare
from linearize.report.comparison_figure import comparison_chart
from linearize.report.drawing import byte_text

__all__ = ["compare_folders"]


def compare_folders(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Folders of converted models, evaluated.", show_default=False
        ),
    ],
    context: Annotated[
        int, Option("--context", min=1, help="Tokens to give the decoding memory for.")
    ] = CONTEXT,
    out: Annotated[
        Path | None,
        Option("--out", metavar="FILE", callback=check_file, help="Where to draw it, as SVG."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Compare converted models: perplexity against the memory that decoding needs.

    Everything is read from the folders; run `linearize eval` on each first, on the same text and
    blocks. Where a folder that is not adapted was measured with its softmax reference, this is a row
    of its own. A star marks models that no other beats in both perplexity and memory. Parts of
    hybrids (--ablate-linear), recall (--recall-split) and tasks are shown where they are stored.

    Examples:

    \b
      linearize compare out/pure out/window64 out/adapted --out out/ladder.svg
    """
    result = compare(folders, context)
    _show(result)
    if out is not None:
        write_text(out, comparison_chart(result))
        note(f"wrote {out}")
    store_json(json, asdict(result))


def _show(result: Comparison) -> None:
    parts = list(dict.fromkeys(name for row in result.rows for name in row.parts))
    tasks = list(dict.fromkeys(name for row in result.rows for name in row.accuracies))
    recall = any(row.recalled is not None for row in result.rows)
    columns = ["perplexity", "ratio", *(name.partition(" (")[0] for name in parts)]
    columns += ["recalled"] if recall else []
    made = table("", "model", *columns, *tasks, "state", f"at {result.tokens:,}", left=2)
    for row in result.rows:
        cells = [row.perplexity, row.ratio, *(row.parts.get(name) for name in parts)]
        cells += [row.recalled] if recall else []
        made.add_row(
            "*" if row.best else "",
            row.name,
            *("-" if cell is None else f"{cell:.4g}" for cell in cells),
            *(f"{row.accuracies[name]:.3f}" if name in row.accuracies else "-" for name in tasks),
            byte_text(row.state) if row.state else "-",
            byte_text(row.memory),
        )
    results.print(made)
    for row in result.rows:
        say(f"{row.name}: {row.settings}")
    say(
        f"perplexity per token, {result.blocks} blocks of {result.block:,} tokens of "
        f"{', '.join(result.text)}; decoding memory of one sequence in fp32; * beaten by no other in "
        "both"
    )
