"""`linearize eval`: perplexity of a model, and of a converted one beside its softmax reference."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from linearize.checkpoint import REPORT
from linearize.cli.common import (
    JsonOption,
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
from linearize.convert import converted_layers, original_attention
from linearize.evaluate import Perplexity, perplexity
from linearize.models import Loaded
from linearize.output import write_json
from linearize.report import EVALUATION
from linearize.text import Source, default_text
from linearize.versions import versions

__all__ = ["DEFAULT_TEXT", "evaluate", "record", "show"]

DEFAULT_TEXT = "the documentation that comes with Python"


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model, or the folder of a converted one.",
            show_default=False,
        ),
    ],
    text: TextOption = None,
    block: Annotated[int, Option("--block", min=2, help="Tokens per block.")] = 4096,
    blocks: Annotated[
        int | None, Option("--blocks", min=1, help="Only the first so many blocks.")
    ] = None,
    batch: Annotated[int, Option("--batch", min=1, help="Blocks per forward pass.")] = 1,
    reference: Annotated[
        bool,
        Option("--reference/--no-reference", help="Measure softmax beside a converted model."),
    ] = True,
    json: JsonOption = None,
) -> None:
    """Measure perplexity on blocks of a text.

    A converted model is shown beside its softmax reference: the same weights with the original
    attention. The result of a converted folder is also stored in it, for `linearize report`. Blocks
    do not overlap and no token is added; the first token of a block is not scored, and an
    incomplete last block is dropped.

    Examples:

    \b
      linearize eval out/oal --text test.txt --block 2048 --blocks 8
      linearize eval smollm2-135m --text test.txt --json ppl.json
    """
    paths = check_texts(text)
    if paths is None:
        note(f"no --text: using {DEFAULT_TEXT}")
    loaded = load_model(model)
    source: Source = paths or default_text()
    names = [str(path) for path in paths] if paths else [DEFAULT_TEXT]

    started = time.perf_counter()
    measured = _measure("evaluating", loaded, source, block, blocks, batch)
    softmax = None
    if reference and converted_layers(loaded.model):
        with original_attention(loaded.model):
            softmax = _measure("softmax reference", loaded, source, block, blocks, batch)
    result = record(
        model, names, measured, softmax, batch=batch, seconds=time.perf_counter() - started
    )
    show(result, converted=bool(converted_layers(loaded.model)))
    if (Path(model) / REPORT).is_file():
        write_json(Path(model) / EVALUATION, result)
    store_json(json, result)


def record(
    model: str,
    text: list[str],
    measured: Perplexity,
    softmax: Perplexity | None,
    *,
    batch: int,
    seconds: float,
) -> dict[str, Any]:
    """The result as JSON, as reports read it."""
    return {
        "model": model,
        "text": text,
        "block": measured.block,
        "blocks": measured.blocks,
        "batch": batch,
        "targets": measured.targets,
        "perplexity": measured.value,
        "softmax_perplexity": None if softmax is None else softmax.value,
        "ratio": None if softmax is None else measured.value / softmax.value,
        "details": {
            "model": asdict(measured),
            "softmax": None if softmax is None else asdict(softmax),
        },
        "seconds": seconds,
        "versions": versions(),
    }


def show(result: dict[str, Any], converted: bool) -> None:
    """Print the perplexities and what they were measured on."""
    made = table("model", "perplexity", "nats per token", "ratio")
    details = result["details"]
    if details["softmax"] is not None:
        made.add_row(
            "softmax, same weights",
            f"{result['softmax_perplexity']:.3f}",
            f"{details['softmax']['nll']:.4f}",
            "1",
        )
    made.add_row(
        "converted" if converted else result["model"],
        f"{result['perplexity']:.3f}",
        f"{details['model']['nll']:.4f}",
        "-" if result["ratio"] is None else f"{result['ratio']:.3f}",
    )
    results.print(made)
    say(
        f"per token, {result['targets']:,} tokens scored in {result['blocks']} blocks of "
        f"{result['block']:,}, {result['seconds']:.0f} s; text: {', '.join(result['text'])}"
    )


def _measure(
    title: str, loaded: Loaded, text: Source, block: int, blocks: int | None, batch: int
) -> Perplexity:
    with progress(title) as advance:
        return perplexity(loaded, text, block=block, blocks=blocks, batch=batch, progress=advance)
