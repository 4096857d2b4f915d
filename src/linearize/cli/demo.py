"""`linearize demo`: the whole main job on the bundled model and text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor
from typer import Option

from linearize.checkpoint import save
from linearize.cli.common import (
    JsonOption,
    OverwriteOption,
    SeedOption,
    load_model,
    notes,
    progress,
    results,
    say,
    store_json,
    table,
)
from linearize.cli.convert import run
from linearize.cli.convert import show as show_conversion
from linearize.cli.evaluation import DEFAULT_TEXT, record
from linearize.cli.generate import compare
from linearize.convert import ConversionReport
from linearize.evaluate import Perplexity, perplexity
from linearize.models import Loaded
from linearize.output import check_writable, write_json
from linearize.plan import Plan
from linearize.report import EVALUATION, SAMPLES, Memory, write
from linearize.report.drawing import byte_text
from linearize.text import default_text, tokenize

__all__ = ["demo"]

MODEL = "smollm2-135m"
PLAN = Plan(
    layers="3-26", sinks=4, window=64, saturation=512, center=True, state_rank=8, block=1024
)
HELD_OUT = 6  # blocks of PLAN.block, from the start of the text, which fitting skips
PROMPT_TOKENS = 256  # of the first block after those: longer than the window, so that state is read
NEW_TOKENS = 32
LENGTHS = (1024, 8192, 131072)  # context lengths of the table


def demo(
    out: Annotated[Path, Option("--out", metavar="DIR", help="Folder of everything.")] = Path(
        "out/demo"
    ),
    overwrite: OverwriteOption = False,
    seed: SeedOption = PLAN.seed,
    json: JsonOption = None,
) -> None:
    """Run the whole main job on the bundled model.

    Converts it, measures what that cost, continues a prompt with both, and writes the report.

    Takes some minutes on two cores, and no network. Perplexity is measured on blocks of the text
    that were not used for fitting.

    Examples:

    \b
      linearize demo
      linearize demo --out out/again --seed 1
    """
    started = time.perf_counter()
    check_writable(out, overwrite)
    plan = Plan(**{**PLAN.model_dump(), "seed": seed})
    loaded = load_model(MODEL)
    tokens = tokenize(default_text(), loaded.tokenizer)

    measured_at = time.perf_counter()
    before = _measure("perplexity before", loaded, tokens, plan.block)
    seconds = time.perf_counter() - measured_at
    conversion = run(loaded, tokens, plan)
    report, loaded = conversion.report, conversion.loaded
    measured_at = time.perf_counter()
    after = _measure("perplexity after", loaded, tokens, plan.block)
    seconds += time.perf_counter() - measured_at
    text = f"{DEFAULT_TEXT}, its first {HELD_OUT} blocks, which fitting does not use"
    evaluation = record(MODEL, [text], after, before, batch=1, seconds=seconds)
    with notes.status("continuing a prompt with both"):
        at = HELD_OUT * plan.block
        tokenizer: Any = loaded.tokenizer
        prompt: str = tokenizer.decode(tokens[at : at + PROMPT_TOKENS])
        sample = compare(
            loaded,
            prompt,
            seed=seed,
            max_new_tokens=NEW_TOKENS,
            num_beams=1,
            do_sample=False,
        )
    with notes.status(f"saving {out}"):
        save(loaded, out, overwrite=overwrite, report=report)
        write_json(out / EVALUATION, evaluation)
        write_json(out / SAMPLES, [sample])
        page = write(out)
    show_conversion(report)
    for name in ("softmax", "converted"):
        say(f"--- {name} continues: …{' '.join(prompt[-200:].split())}")
        say(sample[name]["text"].strip())
    say("---")
    _show(evaluation, Memory.of(report), report, plan)
    seconds = time.perf_counter() - started
    say(f"model and report in {out} ({page}); the whole demo took {seconds:.0f} s")
    store_json(
        json,
        {
            "folder": str(out),
            "page": str(page),
            "seconds": seconds,
            "evaluation": evaluation,
            "samples": [sample],
            "conversion": report.as_dict(),
        },
    )


def _show(evaluation: dict[str, Any], memory: Memory, report: ConversionReport, plan: Plan) -> None:
    """Print the table of the demo and what it is about."""
    made = table(
        "model", "perplexity", "ratio", *(f"memory at {n:,} tokens" for n in LENGTHS), left=1
    )
    made.add_row(
        "softmax",
        f"{evaluation['softmax_perplexity']:.2f}",
        "1",
        *(byte_text(memory.before(n)) for n in LENGTHS),
    )
    made.add_row(
        f"converted ({plan.kernel})",
        f"{evaluation['perplexity']:.2f}",
        f"{evaluation['ratio']:.3f}",
        *(byte_text(memory.after(n)) for n in LENGTHS),
    )
    results.print(made)
    say(
        f"linear: {len(report.layers)} of {report.model_layers} attention layers, for all keys but the "
        f"first {plan.sinks} and the latest {plan.window} of each query, which stay exact; the other "
        f"{report.model_layers - len(report.layers)} layers keep softmax"
    )
    say(f"perplexity per token on {evaluation['text'][0]}, {evaluation['targets']:,} tokens scored")


def _measure(title: str, loaded: Loaded, tokens: Tensor, block: int) -> Perplexity:
    with progress(title) as advance:
        return perplexity(loaded, tokens, block=block, blocks=HELD_OUT, progress=advance)
