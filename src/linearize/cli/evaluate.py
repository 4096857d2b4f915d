"""`linearize eval`: perplexity, tasks, and the softmax reference of a converted model beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer import Option

from linearize.attention import Part
from linearize.cli.common import (
    JsonOption,
    TextOption,
    check_texts,
    load_model,
    note,
    progress,
    store_json,
)
from linearize.cli.evaluation import (
    DEFAULT_TEXT,
    MODEL,
    SOFTMAX,
    beside,
    record,
    record_harness,
    record_recall,
    record_task,
    show_harness,
    show_perplexity,
    show_recall,
    show_tasks,
    store_beside,
)
from linearize.converted import converted_layers, only_part, original_attention
from linearize.errors import PlanError
from linearize.evaluate import (
    Question,
    Task,
    choice,
    get_task,
    harness,
    harness_tasks,
    read_questions,
    recall_split,
)
from linearize.kernels import get
from linearize.models import Loaded
from linearize.plan import Plan
from linearize.text import Source, default_text
from linearize.versions import versions

__all__ = ["evaluate"]

T = TypeVar("T")
Variants = dict[str, Callable[[], AbstractContextManager[None]]]

PARTS: dict[str, Part] = {
    "exact keys only (linear part off)": "exact",
    "kernel only (sinks and window off)": "kernel",
}
BATCH = 8  # sequences a forward pass of tasks where --batch does not say


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
    split: Annotated[
        bool,
        Option(
            "--recall-split",
            help="Also split perplexity by whether a token's bigram occurred earlier in the block.",
        ),
    ] = False,
    task: Annotated[
        list[str] | None,
        Option(
            "--task",
            metavar="NAME=FILE",
            help="Multiple choice from a local JSONL file: piqa, arc_easy or hellaswag; may be "
            "repeated.",
        ),
    ] = None,
    harness_names: Annotated[
        str | None,
        Option("--harness", metavar="A,B", help="Tasks of lm-evaluation-harness."),
    ] = None,
    harness_folder: Annotated[
        Path | None,
        Option(
            "--harness-tasks",
            metavar="DIR",
            help="Folder of task files (YAML) for --harness; they may read local data.",
        ),
    ] = None,
    limit: Annotated[
        int | None, Option("--limit", min=1, help="Only the first so many questions of a task.")
    ] = None,
    batch: Annotated[
        int | None,
        Option(
            "--batch",
            min=1,
            help="Sequences per forward pass: by default 1 block, 8 options of a task. "
            "No effect on results.",
        ),
    ] = None,
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
    """Measure perplexity on blocks of a text, and accuracy on tasks.

    A converted model is shown beside its softmax reference: the original model, which has the same
    weights and no LoRA. The result of a converted folder is also stored in it, for `linearize
    report`. Blocks do not overlap and no token is added; the first token of a block is not scored,
    and an incomplete last block is dropped.

    Tasks are zero-shot. Options are compared by their mean log-likelihood per token (piqa,
    hellaswag) or per character (arc_easy). With tasks and no --text, perplexity is left out.

    With --recall-split, perplexity is also given apart for tokens that could be recalled, as they
    followed the same token before in the block, and for the rest.

    Examples:

    \b
      linearize eval out/oal --text test.txt --block 2048 --blocks 8
      linearize eval out/oal --task piqa=piqa.jsonl --task arc_easy=arc.jsonl --limit 200
      linearize eval out/oal --harness piqa,arc_easy --limit 200
      linearize eval smollm2-135m --text test.txt --recall-split --json ppl.json
    """
    paths = check_texts(text)
    tasks = _read_tasks(task, limit)
    if harness_folder is not None and harness_names is None:
        raise PlanError("--harness-tasks", "no --harness", "Name the tasks to run by --harness.")
    foreign = None
    if harness_names is not None:
        wanted = [name.strip() for name in harness_names.split(",") if name.strip()]
        foreign = harness_tasks(wanted, harness_folder)
    reads = split or paths is not None or not (tasks or foreign)
    if reads and paths is None:
        note(f"no --text: using {DEFAULT_TEXT}")
    loaded = load_model(model)
    converted = bool(converted_layers(loaded.model))
    if reads and paths is None and converted:
        note("a conversion without --text fits on parts of it: give --text for held-out perplexity")
    if reads and loaded.plan is not None:
        _warn_of_length(loaded.plan, block)
    variants = _variants(loaded, reference, ablate_linear)

    started = time.perf_counter()
    result: dict[str, Any] = {"model": model}
    if reads:
        source: Source = paths or default_text()
        names = [str(path) for path in paths] if paths else [DEFAULT_TEXT]
        found = _each(
            variants,
            "perplexity",
            lambda advance: recall_split(
                loaded, source, block=block, blocks=blocks, batch=batch or 1, progress=advance
            ),
        )
        whole = {name: one.both for name, one in found.items()}
        result |= record(
            model,
            names,
            whole[MODEL],
            whole.get(SOFTMAX),
            batch=batch or 1,
            seconds=time.perf_counter() - started,
            parts=beside(whole),
        )
        show_perplexity(result, converted)
        if split:
            result["recall"] = record_recall(found)
            show_recall(result["recall"], model, converted)
    if tasks:
        result["tasks"] = {
            one.name: record_task(
                file,
                _each(
                    variants,
                    one.name,
                    partial(_choose, loaded, one, questions, batch or BATCH),
                ),
            )
            for one, file, questions in tasks
        }
        show_tasks(result["tasks"], model, converted)
    if foreign is not None:
        scores = _each(
            variants,
            "lm-evaluation-harness",
            lambda _: harness(loaded, foreign, limit=limit, batch=batch or BATCH),
        )
        result["harness"] = record_harness(scores, limit)
        show_harness(result["harness"], model, converted)
    result |= {"seconds": time.perf_counter() - started, "versions": versions()}
    store_beside(Path(model), result)
    store_json(json, result)


def _read_tasks(
    given: list[str] | None, limit: int | None
) -> list[tuple[Task, Path, list[Question]]]:
    """``["piqa=file"]`` -> tasks with their files and questions.

    Raises:
        PlanError: no ``=``, an unknown task, or one given twice. TextError: a file that is missing
            or malformed.
    """
    tasks: dict[str, tuple[Task, Path, list[Question]]] = {}
    for pair in given or []:
        name, equals, file = pair.partition("=")
        if not equals or not file:
            raise PlanError(
                f"--task {pair}", "no NAME=FILE", "Write it like --task piqa=piqa.jsonl."
            )
        task = get_task(name)
        if name in tasks:
            raise PlanError(f"--task {pair}", f"{name} a second time", "Give each task once.")
        tasks[name] = (task, Path(file), read_questions(task, file, limit))
    return list(tasks.values())


def _warn_of_length(plan: Plan, block: int) -> None:
    """Say so where kernels beside exact keys meet more keys than they were fitted on."""
    grows = (plan.sinks or plan.window) and not get(plan.kernel).exact
    if grows and min(block, plan.saturation or block) > plan.block:
        note(
            f"blocks of {block:,} tokens, kernels fitted on {plan.block:,}: beyond that the linear part "
            "outweighs the exact keys more and more; convert with a longer --block or --saturation"
        )


def _variants(loaded: Loaded, reference: bool, ablate: bool) -> Variants:
    """The ways to run a model that are compared.

    Raises:
        PlanError: parts are asked of a model that is not converted, or keeps no key exact.
    """
    model, plan = loaded.model, loaded.plan
    variants: Variants = {MODEL: nullcontext}
    if reference and converted_layers(model):
        variants[SOFTMAX] = partial(original_attention, model)
    if ablate:
        if plan is None or not (plan.sinks or plan.window):
            raise PlanError(
                "--ablate-linear",
                "an unconverted model" if plan is None else "a model without sinks and window",
                "Use it on a model converted with --sinks or --window.",
            )
        if get(plan.kernel).exact:
            raise PlanError(
                "--ablate-linear",
                "softmax over the exact keys, which has no linear part",
                "Leave it out; the score is that of the exact keys.",
            )
        for name, part in PARTS.items():
            variants[name] = partial(only_part, model, part)
    return variants


def _each(
    variants: Variants, title: str, measure: Callable[[Callable[[int, int, str], None]], T]
) -> dict[str, T]:
    """One measurement of every variant."""
    found = {}
    for name, enter in variants.items():
        with enter(), progress(title if name == MODEL else f"{title}, {name}") as advance:
            found[name] = measure(advance)
    return found


def _choose(
    loaded: Loaded,
    task: Task,
    questions: Sequence[Question],
    batch: int,
    advance: Callable[[int, int, str], None],
) -> Any:
    return choice(loaded, task, questions, batch=batch, progress=advance)
