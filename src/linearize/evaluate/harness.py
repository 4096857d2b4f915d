"""lm-evaluation-harness over a model in memory: any of its tasks, from the hub or from local files.

The harness has prompts, metrics and tokenization of its own; where they differ from
:mod:`linearize.evaluate.choice`, so do the numbers. It comes with the extra ``linearize[harness]``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.errors import LinearizeError, ModelError, PlanError, TextError
from linearize.evaluate.tasks import PER_CHARACTER, SUM
from linearize.models import Loaded

__all__ = ["HarnessScore", "HarnessTasks", "harness", "harness_tasks"]

# What the harness compares options by; other metrics are the task's own.
MEANINGS = {
    "acc": SUM,
    "acc_norm": PER_CHARACTER,
    "acc_bytes": "log-likelihood per byte of the option",
}
OWN = "as the task defines it"


@dataclass(frozen=True)
class HarnessTasks:
    """Tasks that the harness knows, and its index of them (lm_eval's ``TaskManager``)."""

    names: tuple[str, ...]
    manager: Any


@dataclass(frozen=True)
class HarnessScore:
    """One number of one task.

    Attributes:
        task: of the harness; a group has a score beside those of its tasks.
        metric, filter: as the harness calls them. value: the score.
        standard_error: as the harness estimates it; ``None`` where it does not.
        normalisation: what an accuracy compares options by, in words.
        count: questions. version: of the task's definition.
    """

    task: str
    metric: str
    filter: str
    value: float
    standard_error: float | None
    normalisation: str
    count: int | None
    version: str | None


def harness_tasks(names: Sequence[str], folder: str | Path | None = None) -> HarnessTasks:
    """Find tasks by name, without loading any data.

    Args:
        names: tasks, groups or tags. folder: with task files (YAML) of one's own; these may read
            local data, so that nothing is fetched.

    Raises:
        ModelError: lm-evaluation-harness is not installed. PlanError: an unknown task.
        TextError: no such folder.
    """
    if folder is not None and not Path(folder).is_dir():
        raise TextError(f"task files in {folder}", "no such folder", "Check the path.")
    if not names:
        raise PlanError("harness tasks", "no name", "Name tasks, like piqa,arc_easy.")
    task_manager = _module("lm_eval.tasks").TaskManager
    manager: Any = None
    unknown = list(names)
    if folder is not None:  # alone first: the harness's own index of 15,000 files takes a while
        manager = task_manager(include_path=str(folder), include_defaults=False)
        unknown = _unknown(names, manager)
    if unknown:
        manager = task_manager(include_path=None if folder is None else str(folder))
        unknown = _unknown(names, manager)
    if unknown:
        where = (
            "" if folder is None else f" and of {folder}, where unreadable files are passed over"
        )
        raise PlanError(
            f"harness task {', '.join(map(repr, unknown))}",
            f"{len(manager.all_tasks):,} others, of lm-evaluation-harness{where}",
            "List its own with: lm-eval ls tasks",
        )
    return HarnessTasks(tuple(dict.fromkeys(names)), manager)


def harness(
    loaded: Loaded, tasks: HarnessTasks, *, limit: int | None = None, batch: int = 8
) -> list[HarnessScore]:
    """Run tasks of lm-evaluation-harness on a model, converted or not.

    Args:
        loaded: the model with its tokenizer.
        tasks: from :func:`harness_tasks`.
        limit: only the first so many questions of every task. batch: sequences a forward pass.

    Raises:
        ModelError: no tokenizer. TextError: the data of a task cannot be had.
    """
    if loaded.tokenizer is None:
        raise ModelError(
            "lm-evaluation-harness", "a model without tokenizer", "Load it with its tokenizer."
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns that the model is in memory
    wrapped = _module("lm_eval.models.huggingface").HFLM(
        pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch
    )
    try:
        found = _module("lm_eval").simple_evaluate(
            model=wrapped,
            tasks=list(tasks.names),
            task_manager=tasks.manager,
            limit=limit,
            log_samples=False,
        )
    except LinearizeError:
        raise
    except Exception as error:  # of the hub, of datasets, of a task file's templates
        raise TextError(
            f"harness task {', '.join(tasks.names)}",
            _reason(error),
            "The harness fetches data by the network; --task and --harness-tasks read local files.",
        ) from error
    return _scores(found)


def _scores(found: dict[str, Any]) -> list[HarnessScore]:
    """The harness's table as a list: ``{"acc,none": 0.5, "acc_stderr,none": 0.1}`` per task."""
    scores = []
    for task, row in found["results"].items():
        for key, value in row.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = row.get(f"{metric}_stderr,{chosen}")
            samples = found.get("n-samples", {}).get(task, {})
            version = found.get("versions", {}).get(task)
            scores.append(
                HarnessScore(
                    task,
                    metric,
                    chosen,
                    float(value),
                    float(error) if isinstance(error, int | float) else None,
                    MEANINGS.get(metric, OWN),
                    samples.get("effective"),
                    None if version is None else str(version),
                )
            )
    return scores


def _unknown(names: Sequence[str], manager: Any) -> list[str]:
    known = set(manager.all_tasks)
    return [name for name in names if name not in known]


def _module(name: str) -> Any:
    """A module of lm_eval, or how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            "lm-evaluation-harness",
            f"no usable installation ({error})",
            "Run: pip install 'linearize[harness]'",
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
