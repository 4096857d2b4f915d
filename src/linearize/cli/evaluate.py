"""`linearize eval`: perplexity of a model, and of a converted one beside its softmax reference."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from linearize.attention import Part
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
from linearize.convert import converted_layers, only_part, original_attention
from linearize.errors import PlanError
from linearize.evaluate import Perplexity, perplexity
from linearize.models import Loaded
from linearize.output import write_json
from linearize.report import EVALUATION
from linearize.text import Source, default_text
from linearize.versions import versions

__all__ = ["DEFAULT_TEXT", "evaluate", "record", "show"]

PARTS: dict[str, Part] = {
    "exact keys only (linear part off)": "exact",
    "kernel only (sinks and window off)": "kernel",
}
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
    ablate_linear: Annotated[
        bool,
        Option(
            "--ablate-linear",
            help="Also score the exact keys alone (linear part off) and the kernel alone.",
        ),
    ] = False,
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
    if paths is None and converted_layers(loaded.model):
        note("a conversion without --text fits on parts of it: give --text for held-out perplexity")
    source: Source = paths or default_text()
    names = [str(path) for path in paths] if paths else [DEFAULT_TEXT]

    started = time.perf_counter()
    measured = _measure("evaluating", loaded, source, block, blocks, batch)
    softmax = None
    if reference and converted_layers(loaded.model):
        with original_attention(loaded.model):
            softmax = _measure("softmax reference", loaded, source, block, blocks, batch)
    parts: dict[str, Perplexity] = {}
    if ablate_linear:
        check_hybrid(loaded)
        for name, part in PARTS.items():
            with only_part(loaded.model, part):
                parts[name] = _measure(name, loaded, source, block, blocks, batch)
    seconds = time.perf_counter() - started
    result = record(model, names, measured, softmax, batch=batch, seconds=seconds, parts=parts)
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
    parts: dict[str, Perplexity] | None = None,
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
        "parts": {name: asdict(one) for name, one in (parts or {}).items()},
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
    softmax = details["softmax"]
    if softmax is not None:
        made.add_row(
            "softmax, same weights",
            f"{result['softmax_perplexity']:.3f}",
            f"{softmax['nll']:.4f}",
            "1",
        )
    made.add_row(
        "converted" if converted else result["model"],
        f"{result['perplexity']:.3f}",
        f"{details['model']['nll']:.4f}",
        "-" if result["ratio"] is None else f"{result['ratio']:.3f}",
    )
    for name, one in result["parts"].items():
        ratio = "-" if softmax is None else f"{one['value'] / result['softmax_perplexity']:.3f}"
        made.add_row(name, f"{one['value']:.3f}", f"{one['nll']:.4f}", ratio)
    results.print(made)
    say(
        f"per token, {result['targets']:,} tokens scored in {result['blocks']} blocks of "
        f"{result['block']:,}, {result['seconds']:.0f} s; text: {', '.join(result['text'])}"
    )


def check_hybrid(loaded: Loaded) -> None:
    """Refuse to ablate what has no two parts.

    Raises:
        PlanError: the model is not converted, or keeps no key exact.
    """
    plan = loaded.plan
    if plan is None or not (plan.sinks or plan.window):
        raise PlanError(
            "--ablate-linear",
            "an unconverted model" if plan is None else "a model without sinks and window",
            "Use it on a model converted with --sinks or --window.",
        )


def _measure(
    title: str, loaded: Loaded, text: Source, block: int, blocks: int | None, batch: int
) -> Perplexity:
    with progress(title) as advance:
        return perplexity(loaded, text, block=block, blocks=blocks, batch=batch, progress=advance)
