"""`linearize generate`: continue a prompt."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from linearize.checkpoint import REPORT
from linearize.cli.common import (
    DEFAULTS,
    JsonOption,
    SeedOption,
    load_model,
    note,
    say,
    store_json,
)
from linearize.cli.continuation import Continuation, continue_prompt
from linearize.converted import converted_layers, original_attention
from linearize.errors import PlanError
from linearize.models import Loaded
from linearize.output import write_json
from linearize.report import SAMPLES
from linearize.report.drawing import byte_text

__all__ = ["compare", "generate"]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The folder of a converted model, or any model.", show_default=False
        ),
    ],
    prompt: Annotated[
        str, Option("--prompt", metavar="TEXT", help="What to continue.", show_default=False)
    ],
    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", min=1, help="Most tokens to add.")
    ] = 64,
    sample: Annotated[
        bool, Option("--sample", help="Draw tokens instead of taking the likeliest.")
    ] = False,
    temperature: Annotated[
        float | None, Option("--temperature", help="Of sampling; implies --sample.")
    ] = None,
    top_p: Annotated[
        float | None,
        Option("--top-p", min=0.0, max=1.0, help="Nucleus of sampling; implies --sample."),
    ] = None,
    beams: Annotated[int, Option("--beams", min=1, help="Beams to search with.")] = 1,
    original: Annotated[
        bool, Option("--original", help="Use the softmax attention the model had.")
    ] = False,
    both: Annotated[
        bool,
        Option(
            "--compare",
            help="Continue with both attentions and keep the pair in DIR for `linearize report`.",
        ),
    ] = False,
    seed: SeedOption = DEFAULTS.seed,
    json: JsonOption = None,
) -> None:
    """Continue a prompt.

    Prints what the cache holds at the end. Decoding keeps a state of fixed size in converted
    layers; only layers that keep softmax add memory with every token.

    Examples:

    \b
      linearize generate out/oal --prompt "The capital of France is"
      linearize generate out/oal --prompt "Once upon a time" --temperature 0.8 --top-p 0.95
      linearize generate out/oal --prompt "The capital of France is" --compare
    """
    if (original or both) and not Path(model).is_dir():
        raise PlanError(
            f"the original attention of {model}",
            "a model that is no folder, and so not converted",
            "Leave --original and --compare out, or give a converted folder.",
        )
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "num_beams": beams}
    settings["do_sample"] = sample or temperature is not None or top_p is not None
    if temperature is not None:
        settings["temperature"] = temperature
    if top_p is not None:
        settings["top_p"] = top_p
    loaded = load_model(model)
    if both:
        pair = compare(loaded, prompt, seed=seed, **settings)
        for name in ("softmax", "converted"):
            say(f"--- {name}")
            say(prompt + pair[name]["text"])
            _show_cache(Continuation(**pair[name]))
        if pair["note"]:
            note(pair["note"])
        if (Path(model) / REPORT).is_file():
            write_json(Path(model) / SAMPLES, [pair])
        store_json(json, {"model": model, **pair})
        return

    stream = beams == 1
    if stream:
        typer.echo(prompt, nl=False)
    if original:
        with original_attention(loaded.model):
            made = continue_prompt(loaded, prompt, seed=seed, stream=stream, **settings)
    else:
        made = continue_prompt(loaded, prompt, seed=seed, stream=stream, **settings)
    if not stream:
        say(prompt + made.text)
    _show_cache(made)
    warning = None if original else within_window(loaded, made)
    if warning:
        note(warning)
    store_json(
        json,
        {
            "model": model,
            "prompt": prompt,
            "attention": "converted"
            if converted_layers(loaded.model) and not original
            else "softmax",
            "seed": seed,
            "settings": settings,
            **asdict(made),
        },
    )


def compare(loaded: Loaded, prompt: str, *, seed: int, **settings: Any) -> dict[str, Any]:
    """The prompt continued by a converted model and by its original attention, as JSON."""
    converted = continue_prompt(loaded, prompt, seed=seed, **settings)
    with original_attention(loaded.model):
        softmax = continue_prompt(loaded, prompt, seed=seed, **settings)
    listed = ", ".join(f"{name}={value}" for name, value in {**settings, "seed": seed}.items())
    return {
        "prompt": prompt,
        "settings": listed,
        "note": within_window(loaded, converted),
        "softmax": asdict(softmax),
        "converted": asdict(converted),
    }


def within_window(loaded: Loaded, made: Continuation) -> str | None:
    """A warning where a converted model has not left its exact keys, and so computed softmax."""
    plan, length = loaded.plan, made.prompt_tokens + made.new_tokens
    if plan is None or length > plan.sinks + plan.window:
        return None
    return (
        f"all {length} tokens lie within the {plan.sinks + plan.window} keys that stay exact: nothing "
        "here went through the kernel"
    )


def _show_cache(made: Continuation) -> None:
    note(
        f"{made.new_tokens} new tokens in {made.seconds:.1f} s; the cache holds "
        f"{byte_text(made.cache_bytes)} after {made.prompt_tokens + made.new_tokens} tokens"
    )
