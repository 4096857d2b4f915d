"""What the verbs share: their options, messages, progress, and the way errors leave."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from transformers.utils import logging
from typer.core import TyperGroup

from linearize.checkpoint import load
from linearize.errors import LinearizeError, OutputError, PlanError
from linearize.models import Loaded
from linearize.output import check_writable, write_json
from linearize.plan import Plan
from linearize.text import read

__all__ = [
    "DEFAULTS",
    "AlphaOption",
    "BlockOption",
    "CenterOption",
    "EvaluationBlocksOption",
    "FitBlocksOption",
    "GammaOption",
    "JsonOption",
    "OverwriteOption",
    "SeedOption",
    "SinksOption",
    "TauOption",
    "TextOption",
    "ValidationBlocksOption",
    "Verbs",
    "WindowOption",
    "check_file",
    "check_texts",
    "load_model",
    "note",
    "notes",
    "parse_bytes",
    "parse_options",
    "parts_folder",
    "progress",
    "quiet",
    "results",
    "say",
    "store_json",
    "table",
]

# Tables on standard output; what goes to a file or a pipe does not depend on a terminal's width.
results = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
notes = Console(stderr=True, highlight=False)  # progress, on standard error

DEBUG = "LINEARIZE_DEBUG"
DEFAULTS = Plan()  # the settings nobody chose


def check_file(path: Path | None) -> Path | None:
    """Refuse a path that could not be written once the work is done.

    Raises:
        OutputError: it is a folder, or lies where nothing can be written.
    """
    if path is None:
        return None
    place = path.absolute().parent
    while not place.exists():
        place = place.parent
    if path.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        found = "a folder of that name" if path.is_dir() else f"{place}, which is not writable"
        raise OutputError(f"output file {path}", found, "Choose another path.")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=check_file, help="Also write the result as JSON."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of every random choice.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder if it has content.")
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="UTF-8 text, or .jsonl with a 'text' field a line; may be repeated. By default the "
        "documentation that comes with Python.",
    ),
]
# The settings of a plan that several verbs take; `convert` has them all.
WindowOption = Annotated[int, typer.Option("--window", help="Latest keys kept exact.")]
SinksOption = Annotated[int, typer.Option("--sinks", help="First keys kept exact.")]
CenterOption = Annotated[
    bool, typer.Option("--center", help="Take a fitted mean off the keys the kernel sees.")
]
AlphaOption = Annotated[
    float, typer.Option("--alpha", help="Share of the dimensions that may be cut off the bulk.")
]
GammaOption = Annotated[
    float, typer.Option("--gamma", help="Bootstrap support a cut between groups needs.")
]
TauOption = Annotated[float, typer.Option("--tau", help="Ratio a gap between groups needs.")]
EvaluationBlocksOption = Annotated[
    int, typer.Option("--evaluation-blocks", min=1, help="First blocks of the text, held out.")
]
FitBlocksOption = Annotated[
    int, typer.Option("--fit-blocks", help="Blocks to fit on, after the held-out ones.")
]
ValidationBlocksOption = Annotated[
    int, typer.Option("--validation-blocks", help="Blocks that choose between fits, after those.")
]
BlockOption = Annotated[int, typer.Option("--block", help="Tokens per block.")]


class Verbs(TyperGroup):
    """The command with its verbs: an error is one message and exit code 2, Ctrl-C exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except LinearizeError as error:
            if os.environ.get(DEBUG):
                raise
            note(f"error: asked for {error.asked}")
            note(f"       found {error.found}")
            note(f"       {error.remedy}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            note("interrupted; nothing half-written was left behind")
            raise typer.Exit(130) from None


def quiet() -> None:
    """Silence the progress bars and warnings of transformers; the command has its own."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    gguf.tqdm = partial(gguf.tqdm, disable=True)  # this one does not ask the setting


def check_texts(paths: list[Path] | None) -> list[Path] | None:
    """The paths as they are, once every one of them could be read.

    Raises:
        TextError: a file is missing or malformed.
    """
    for path in paths or []:
        read(path)
    return paths or None


def say(text: str) -> None:
    """A line of the result, on standard output."""
    typer.echo(text)


def note(text: str) -> None:
    """A line beside the result, on standard error."""
    typer.echo(text, err=True)


def load_model(ref: str) -> Loaded:
    """Load a model and show that this takes a while."""
    with notes.status(f"loading {ref}"):
        return load(ref)


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """``["features=128"]`` -> ``{"features": 128}``: values are read as JSON, else kept as text.

    Raises:
        PlanError: a pair has no ``=``.
    """
    options: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise PlanError(
                f"option {pair!r}", "no KEY=VALUE", "Write it like --option features=128."
            )
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def parse_bytes(text: str | None) -> int | None:
    """``"64MiB"`` -> 67,108,864; a number alone is bytes, and k, M, G with or without B are decimal.

    Raises:
        PlanError: it has another form.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG]?)(i?)B?", text.strip())
    if match is None:
        raise PlanError(
            f"{text!r} bytes", "no number of bytes", 'Write it like "64MiB" or 1000000.'
        )
    number, prefix, binary = match.groups()
    power = " kMG".index(prefix.replace("K", "k") or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def parts_folder(out: Path | None, json: Path | None, resume: bool, overwrite: bool) -> Path | None:
    """Where a run keeps its finished parts: in its folder, or beside its JSON.

    Raises:
        PlanError: nothing to resume from. OutputError: results of an earlier run would be lost.
    """
    parts = out / "parts" if out else json.with_suffix(".parts") if json else None
    if resume and parts is None:
        raise PlanError("--resume", "no folder to resume from", "Name it by --out or --json.")
    if out is not None:
        check_writable(out, overwrite=True)
    for folder in (out, parts):
        if folder is None or resume or overwrite:
            continue
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(
                f"a new run in {folder}",
                "results or parts of an earlier one",
                "Add --resume to go on with them, --overwrite to start anew, or choose another place.",
            )
    return parts


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error; the function it gives takes (done, in all, message).

    In a log file, where no bar can move, each step is a line.
    """
    if not notes.is_terminal:
        yield lambda done, total, message: note(f"{title} {done}/{total} {message}")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[message]}"),
    )
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(title, total=None, message="")

        def advance(done: int, total: int, message: str) -> None:
            bar.update(task, completed=done, total=total, message=message)

        yield advance


def table(*columns: str, left: int = 1) -> Table:
    """An empty table whose first ``left`` columns are text and the others numbers."""
    made = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for at, column in enumerate(columns):
        made.add_column(column, justify="left" if at < left else "right", overflow="fold")
    return made


def store_json(path: Path | None, value: Any) -> None:
    """Write a result where ``--json`` says, if it was given."""
    if path is not None:
        write_json(path, value)
        note(f"wrote {path}")
