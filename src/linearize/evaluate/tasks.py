"""Multiple-choice tasks from local JSONL: prompts and normalisations of SPEC section 6."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.errors import PlanError, TextError

__all__ = [
    "NORMALISATIONS",
    "PER_CHARACTER",
    "PER_TOKEN",
    "SUM",
    "TASKS",
    "Question",
    "Task",
    "get_task",
    "read_questions",
]

PER_TOKEN = "mean log-likelihood per token"
PER_CHARACTER = "log-likelihood per character of the option"
SUM = "log-likelihood"
NORMALISATIONS = (PER_TOKEN, PER_CHARACTER, SUM)


@dataclass(frozen=True)
class Question:
    """A context and its options; the texts are joined as they are, with one space between.

    Attributes:
        context: the prompt, without a space at its end. options: the candidates, as in the file.
        gold: the right one, zero-based.
    """

    context: str
    options: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Task:
    """How lines of a file become questions, and how their options are compared.

    Attributes:
        name: on the command line. title: in tables.
        normalisation: one of :data:`NORMALISATIONS`.
        fields: what a line needs, dots for nesting.
        question: a line, whose fields are there, as a question; a ``ValueError``, ``TypeError`` or
            ``AttributeError`` names the field that is malformed.
    """

    name: str
    title: str
    normalisation: str
    fields: tuple[str, ...]
    question: Callable[[dict[str, Any]], Question]


def get_task(name: str) -> Task:
    """The task of a name.

    Raises:
        PlanError: there is none; the known ones are named.
    """
    if name not in TASKS:
        raise PlanError(
            f"task {name!r}",
            f"the tasks {', '.join(TASKS)}",
            "Choose one of them, or run others through lm-evaluation-harness (--harness).",
        )
    return TASKS[name]


def read_questions(task: Task, path: str | Path, limit: int | None = None) -> list[Question]:
    """The questions of a file, one JSON object a line; only the first ``limit`` if given.

    Raises:
        TextError: the file cannot be read, has no questions, or a line is malformed; the message
            names line and field.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(
            f"task file {path} of {task.name}", f"{error.strerror}", "Check the path."
        ) from None
    except UnicodeDecodeError as error:
        raise TextError(
            f"task file {path} of {task.name}", f"{error}", "Give UTF-8 JSONL."
        ) from None
    questions: list[Question] = []
    for number, line in enumerate(content.split("\n"), 1):
        if len(questions) == limit:
            break
        if line.strip():
            questions.append(_question(task, line, f"{path} line {number}"))
    if not questions:
        raise TextError(
            f"task file {path} of {task.name}", "no questions", "Write one JSON object a line."
        )
    return questions


def _question(task: Task, line: str, place: str) -> Question:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TextError(
            f"{place} of {task.name}", f"{error.msg}", "Write one JSON object a line."
        ) from None
    needs = f"{task.name} needs {', '.join(task.fields)}."
    for name in task.fields:
        inner = record
        for part in name.split("."):
            if not isinstance(inner, dict) or part not in inner:
                raise TextError(f"{place} of {task.name}", f"no field {name!r}", needs)
            inner = inner[part]
    try:
        made = task.question(record)
        if len(made.options) < 2 or not all(option.strip() for option in made.options):
            raise ValueError(f"options {list(made.options)!r}, of which two must say something")
        if not 0 <= made.gold < len(made.options):
            raise ValueError(f"right answer {made.gold} of {len(made.options)} options")
    except (ValueError, TypeError, AttributeError) as error:
        raise TextError(f"{place} of {task.name}", f"{error}", needs) from None
    return made


def _text(record: dict[str, Any], field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} with {value!r}, which is no text")
    return value


def _texts(value: Any, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"field {field!r} with {str(value)[:80]!r}, which is no list of texts")
    return tuple(value)


def _number(record: dict[str, Any], field: str) -> int:
    """A zero-based answer; published files have it as a number or as text."""
    value = record[field]
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        raise ValueError(f"field {field!r} with {value!r}, which is no number of an option")
    return int(value)


def _piqa(record: dict[str, Any]) -> Question:
    options = (_text(record, "sol1"), _text(record, "sol2"))
    return Question(_asked(_text(record, "goal")), options, _number(record, "label"))


def _arc(record: dict[str, Any]) -> Question:
    choices = record["choices"]
    options = _texts(choices["text"], "choices.text")
    labels = _texts(choices["label"], "choices.label")
    answer = _text(record, "answerKey")
    if len(labels) != len(options) or answer not in labels:
        raise ValueError(
            f"field 'answerKey' with {answer!r} and {len(options)} options labelled {list(labels)}"
        )
    return Question(_asked(_text(record, "question")), options, labels.index(answer))


def _hellaswag(record: dict[str, Any]) -> Question:
    second = _text(record, "ctx_b").capitalize()
    context = f"{_text(record, 'activity_label')}: {_text(record, 'ctx_a')} {second}"
    endings = _texts(record["endings"], "endings")
    return Question(_clean(context), tuple(map(_clean, endings)), _number(record, "label"))


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _clean(text: str) -> str:
    """Take out what the WikiHow half of HellaSwag has left in: ``[title]`` and other brackets."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ").strip()


TASKS = {
    task.name: task
    for task in (
        Task("piqa", "PIQA", PER_TOKEN, ("goal", "sol1", "sol2", "label"), _piqa),
        Task(
            "arc_easy",
            "ARC-Easy",
            PER_CHARACTER,
            ("question", "choices.text", "choices.label", "answerKey"),
            _arc,
        ),
        Task(
            "hellaswag",
            "HellaSwag",
            PER_TOKEN,
            ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
            _hellaswag,
        ),
    )
}
