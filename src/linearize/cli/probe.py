"""`linearize probe`: what a model can look up in its context; one command a probe."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from linearize.cli.common import (
    DEFAULTS,
    JsonOption,
    OverwriteOption,
    SeedOption,
    TextOption,
    check_texts,
    load_model,
    note,
    progress,
    results,
    say,
    store_json,
    table,
)
from linearize.cli.evaluation import DEFAULT_TEXT
from linearize.cli.mqar import mqar
from linearize.converted import converted_layers, original_attention
from linearize.errors import PlanError
from linearize.output import check_writable, new_folder, write_json, write_text
from linearize.probe import Retrieval, retrieval
from linearize.probe.retrieval import DISTANCES, EXAMPLES, PAIRS, QUESTIONS, check_settings
from linearize.report.retrieval_figure import retrieval_chart
from linearize.versions import versions

__all__ = ["probe", "retrieval_command"]

probe = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure what a model can look up in its context.",
)


probe.command("mqar", no_args_is_help=True)(mqar)


@probe.command("retrieval", no_args_is_help=True)
def retrieval_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model, or the folder of a converted one.", show_default=False
        ),
    ],
    pairs: Annotated[
        str, Option("--pairs", metavar="A,B", help="Numbers of pairs in a context.")
    ] = ",".join(map(str, PAIRS)),
    distances: Annotated[
        str,
        Option("--distances", metavar="A,B", help="Tokens of text between pairs and questions."),
    ] = ",".join(map(str, DISTANCES)),
    questions: Annotated[
        int, Option("--questions", min=1, help="Answers per context, at most one per pair.")
    ] = QUESTIONS,
    examples: Annotated[
        int, Option("--examples", min=1, help="Contexts per combination.")
    ] = EXAMPLES,
    batch: Annotated[int, Option("--batch", min=1, help="Contexts per forward pass.")] = 8,
    text: TextOption = None,
    reference: Annotated[
        bool,
        Option("--reference/--no-reference", help="Measure softmax beside a converted model."),
    ] = True,
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Folder for the result and its chart.")
    ] = None,
    overwrite: OverwriteOption = False,
    seed: SeedOption = DEFAULTS.seed,
    json: JsonOption = None,
) -> None:
    """Ask a pretrained model, without training, for words that its context has paired.

    A context lists pairs of words, goes on with text (--text fills the distance), and names some of
    the first words again; the second words are scored. "exact" counts answers that greedy decoding
    would write, "choice" those that rank first among the second words of the context, where chance
    is one over the number of pairs. Every question sees the right answers to the ones before it.
    A converted model stands beside its softmax reference, the same weights with their original
    attention.

    Examples:

    \b
      linearize probe retrieval out/oal --json out/retrieval.json
      linearize probe retrieval smollm2-135m --pairs 4,16 --distances 0,128,512
    """
    settings: dict[str, Any] = {
        "pairs": _numbers("--pairs", pairs),
        "distances": _numbers("--distances", distances),
        "questions": questions,
        "examples": examples,
        "batch": batch,
        "seed": seed,
    }
    combinations = [(p, d) for p in settings["pairs"] for d in settings["distances"]]
    check_settings(combinations, questions, examples, batch)
    if out is not None:
        check_writable(out, overwrite)
    source = check_texts(text)
    loaded = load_model(model)
    started = time.perf_counter()

    def measure(title: str) -> Retrieval:
        with progress(title) as advance:
            return retrieval(loaded, source, **settings, progress=advance)

    measured, softmax = measure("retrieval"), None
    if reference and converted_layers(loaded.model):
        with original_attention(loaded.model):
            softmax = measure("softmax reference")
    seconds = time.perf_counter() - started
    _show(measured, softmax)
    say(
        f"{examples} contexts a row, {measured.words:,} words to draw from, {seconds:.0f} s; ± is one "
        "standard error over contexts"
    )
    result = {
        "model": model,
        "text": [str(path) for path in source] if source else [DEFAULT_TEXT],
        "settings": settings,
        "retrieval": asdict(measured),
        "softmax": None if softmax is None else asdict(softmax),
        "seconds": seconds,
        "versions": versions(),
    }
    if out is not None:
        with new_folder(out, overwrite) as folder:
            write_json(folder / "retrieval.json", result)
            write_text(folder / "retrieval.svg", retrieval_chart(measured, softmax))
        note(f"wrote {out}/retrieval.svg")
    store_json(json, result)


def _show(measured: Retrieval, softmax: Retrieval | None) -> None:
    """Print accuracies by pairs and distance."""
    columns = ["pairs", "distance", "length", "exact", "choice", "chance"]
    beside = [] if softmax is None else ["softmax exact", "softmax choice"]
    made = table(*columns, *beside, left=0)
    for at, cell in enumerate(measured.cells):
        row = [f"{cell.pairs}", f"{cell.distance:,}", f"{cell.length:,}"]
        row += [f"{cell.exact:.3f} ± {cell.exact_error:.3f}"]
        row += [f"{cell.choice:.3f} ± {cell.choice_error:.3f}", f"{cell.chance:.3f}"]
        if softmax is not None:
            row += [f"{softmax.cells[at].exact:.3f}", f"{softmax.cells[at].choice:.3f}"]
        made.add_row(*row)
    results.print(made)


def _numbers(option: str, given: str) -> list[int]:
    """``"4,16"`` -> ``[4, 16]``.

    Raises:
        PlanError: something else is written there.
    """
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise PlanError(f"{option} {given}", "no list of numbers", "Write it like 4,16.") from None
