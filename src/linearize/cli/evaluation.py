"""What `linearize eval` found: as JSON, as reports read it, and as tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from linearize.checkpoint import REPORT
from linearize.cli.common import results, say, table
from linearize.evaluate import Choice, HarnessScore, Perplexity, RecallSplit, get_task
from linearize.output import write_json
from linearize.report import EVALUATION
from linearize.report.data import read_evaluation
from linearize.versions import versions

__all__ = [
    "DEFAULT_TEXT",
    "MODEL",
    "SOFTMAX",
    "beside",
    "record",
    "record_harness",
    "record_recall",
    "record_task",
    "show_harness",
    "show_perplexity",
    "show_recall",
    "show_tasks",
    "store_beside",
]

DEFAULT_TEXT = "the documentation that comes with Python"
MODEL, SOFTMAX = "model", "softmax"  # the model as it is, and with its original attention


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
    """A perplexity as JSON, as reports read it."""
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


def record_task(file: Path, measured: dict[str, Choice]) -> dict[str, Any]:
    """One task as JSON; ``measured`` holds the model, its softmax reference and its parts by name."""
    one = measured[MODEL]
    return {
        "title": get_task(one.task).title,
        "file": str(file),
        "normalisation": one.normalisation,
        "count": one.count,
        "chance": one.chance,
        **_variants(measured, asdict),
    }


def record_harness(measured: dict[str, list[HarnessScore]], limit: int | None) -> dict[str, Any]:
    """The scores of lm-evaluation-harness as JSON."""
    return {
        "versions": versions("lm-eval"),
        "limit": limit,
        **_variants(measured, lambda scores: [asdict(score) for score in scores]),
    }


def record_recall(measured: dict[str, RecallSplit]) -> dict[str, Any]:
    """The recall split as JSON; the tokens are the same for every variant."""
    recalled, rest = measured[MODEL].recalled, measured[MODEL].rest
    return {
        "share": recalled.share,
        "targets": {"recalled": recalled.targets, "rest": rest.targets},
        **_variants(
            measured,
            lambda one: {
                name: {"value": part.value, "nll": part.nll}
                for name, part in (("recalled", one.recalled), ("rest", one.rest))
            },
        ),
    }


def beside(measured: dict[str, Any]) -> dict[str, Any]:
    """What is neither the model nor its reference: the parts of a hybrid."""
    return {name: one for name, one in measured.items() if name not in (MODEL, SOFTMAX)}


def show_perplexity(result: dict[str, Any], converted: bool) -> None:
    """Print the perplexities and what they were measured on."""
    made = table("model", "perplexity", "nats per token", "ratio")
    details = result["details"]
    softmax = details["softmax"]
    if softmax is not None:
        made.add_row(
            "softmax, the original",
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


def show_recall(recall: dict[str, Any], model: str, converted: bool) -> None:
    """Print perplexity on tokens that could be recalled from their block, and on the rest."""
    rows = _rows(recall, model, converted)
    ratios = ["recalled, ratio", "rest, ratio"] if recall["softmax"] else []
    made = table("model", "recalled", "rest", *ratios)
    for name, one in rows:
        cells = [f"{one[part]['value']:.3f}" for part in ("recalled", "rest")]
        if recall["softmax"]:
            for part in ("recalled", "rest"):
                cells.append(f"{one[part]['value'] / recall['softmax'][part]['value']:.3f}")
        made.add_row(name, *cells)
    results.print(made)
    say(
        f"perplexity per token; recalled are the {recall['share']:.1%} of tokens whose bigram occurred "
        "earlier in the block"
    )


def show_tasks(tasks: dict[str, Any], model: str, converted: bool) -> None:
    """Print accuracies, and by what every task compares its options."""
    made = table("task", "model", "accuracy", "chance", "questions", "questions a second", left=2)
    for task in tasks.values():
        for name, one in _rows(task, model, converted):
            made.add_row(
                task["title"],
                name,
                f"{one['accuracy']:.4f} ± {one['standard_error']:.4f}",
                f"{one['chance']:.3f}",
                f"{one['count']:,}",
                f"{one['questions_per_second']:.1f}",
            )
    results.print(made)
    for task in tasks.values():
        say(f"{task['title']}: zero-shot, by {task['normalisation']}; {task['file']}")
    say("± is one standard error over questions")


def show_harness(found: dict[str, Any], model: str, converted: bool) -> None:
    """Print the scores of lm-evaluation-harness, a metric's variants under each other."""
    made = table("task", "metric", "compared by", "model", "value", left=4)
    variants = _rows(found, model, converted)
    for at, _ in enumerate(found["model"]):
        for name, scores in variants:
            score = scores[at]
            error = score["standard_error"]
            value = f"{score['value']:.4f}" + ("" if error is None else f" ± {error:.4f}")
            made.add_row(score["task"], score["metric"], score["normalisation"], name, value)
    results.print(made)
    say(f"lm-evaluation-harness {found['versions']['lm-eval']}; ± is one standard error")


def store_beside(folder: Path, result: dict[str, Any]) -> None:
    """Keep a result in a converted folder; what this run has not measured stays as it was.

    Raises:
        CheckpointError: the earlier result in the folder is damaged. OutputError: it cannot be written.
    """
    if (folder / REPORT).is_file():
        earlier = read_evaluation(folder) or {}
        tasks = earlier.get("tasks", {}) | result.get("tasks", {})
        merged = earlier | result | ({"tasks": tasks} if tasks else {})
        write_json(folder / EVALUATION, merged)


def _rows(entry: dict[str, Any], model: str, converted: bool) -> list[tuple[str, Any]]:
    """What was measured, with the names it has in tables; the reference first."""
    softmax = [] if entry["softmax"] is None else [("softmax, the original", entry["softmax"])]
    return [
        *softmax,
        ("converted" if converted else model, entry["model"]),
        *entry["parts"].items(),
    ]


def _variants(measured: dict[str, Any], as_json: Any) -> dict[str, Any]:
    softmax = measured.get(SOFTMAX)
    return {
        "model": as_json(measured[MODEL]),
        "softmax": None if softmax is None else as_json(softmax),
        "parts": {name: as_json(one) for name, one in beside(measured).items()},
    }
