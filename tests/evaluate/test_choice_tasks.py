"""Files become questions: the exact prompts, and errors that name line and field."""

import json
from pathlib import Path
from typing import Any

import pytest

from linearize.errors import PlanError, TextError
from linearize.evaluate import Question, get_task, read_questions

PIQA = {"goal": "Dry shoes.", "sol1": "Use paper", "sol2": " Use  water ", "label": 1}
ARC = {
    "id": "x",
    "question": "What is hot?",
    "choices": {"text": ["ice", "fire", "fog"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof removal",
    "ctx_a": "A man is on a roof.",
    "ctx_b": "he",
    "ctx": "A man is on a roof. he",
    "endings": ["rips it.", "sings.", "flies [step] home.", "sits."],
    "label": 3,
}


def written(folder: Path, *records: Any) -> Path:
    file = folder / "task.jsonl"
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def read(folder: Path, name: str, *records: Any, limit: int | None = None) -> list[Question]:
    return read_questions(get_task(name), written(folder, *records), limit)


def test_prompts(tmp_path: Path) -> None:
    """Options stay as the file has them; the space before them is added when they are scored."""
    assert read(tmp_path, "piqa", PIQA) == [
        Question("Question: Dry shoes.\nAnswer:", ("Use paper", " Use  water "), 1)
    ]
    assert read(tmp_path, "arc_easy", ARC) == [
        Question("Question: What is hot?\nAnswer:", ("ice", "fire", "fog"), 1)
    ]
    assert read(tmp_path, "hellaswag", HELLASWAG) == [
        Question(
            "Roof removal: A man is on a roof. He",
            ("rips it.", "sings.", "flies home.", "sits."),
            3,
        )
    ]


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"ctx_b": ""}, "Roof removal: A man is on a roof."),
        ({"ctx_b": "THE man"}, "Roof removal: A man is on a roof. The man"),
        (
            {"activity_label": "Home", "ctx_a": "[header] How to sit [title] Bend. [step] Go.", "ctx_b": ""},
            "Home: How to sit. Bend. Go.",
        ),
    ],
)  # fmt: skip
def test_hellaswag_contexts_are_cleaned(
    tmp_path: Path, changes: dict[str, Any], context: str
) -> None:
    (question,) = read(tmp_path, "hellaswag", HELLASWAG | changes)
    assert question.context == context


def test_labels_may_be_text_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    found = read(tmp_path, "piqa", PIQA, "", PIQA | {"label": "0"})
    assert [question.gold for question in found] == [1, 0]


def test_the_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(read(tmp_path, "piqa", PIQA, PIQA, "{broken", limit=2)) == 2
    with pytest.raises(TextError, match="line 3 of piqa"):
        read(tmp_path, "piqa", PIQA, PIQA, "{broken", limit=3)


@pytest.mark.parametrize(
    ("name", "good", "field"),
    [
        *(("piqa", PIQA, field) for field in ("goal", "sol1", "sol2", "label")),
        *(("arc_easy", ARC, field) for field in ("question", "choices", "answerKey")),
        *(
            ("hellaswag", HELLASWAG, field)
            for field in ("activity_label", "ctx_a", "ctx_b", "endings", "label")
        ),
    ],
)
def test_a_missing_field_names_line_and_field(
    tmp_path: Path, name: str, good: dict[str, Any], field: str
) -> None:
    bad = {key: value for key, value in good.items() if key != field}
    with pytest.raises(TextError, match=f"line 2 of {name}; found no field '{field}"):
        read(tmp_path, name, good, bad)


@pytest.mark.parametrize(
    ("name", "record", "found"),
    [
        ("piqa", PIQA | {"label": 2}, "right answer 2 of 2 options"),
        ("piqa", PIQA | {"label": True}, "field 'label' with True"),
        ("piqa", PIQA | {"label": -1}, "field 'label' with -1"),
        ("piqa", PIQA | {"goal": 7}, "field 'goal' with 7"),
        ("piqa", PIQA | {"sol2": "  "}, "of which two must say something"),
        ("arc_easy", ARC | {"choices": {"text": ["a", "b"]}}, "no field 'choices.label'"),
        ("arc_easy", ARC | {"answerKey": "D"}, "field 'answerKey' with 'D'"),
        ("arc_easy", ARC | {"choices": {"text": "ab", "label": ["1"]}}, "field 'choices.text'"),
        ("arc_easy", ARC | {"choices": {"text": ["a"], "label": ["2"]}}, "of which two must"),
        ("hellaswag", HELLASWAG | {"endings": ["a", 3]}, "field 'endings'"),
        ("piqa", [1, 2], "no field 'goal'"),
        ("piqa", "{broken", "Expecting"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, name: str, record: Any, found: str) -> None:
    with pytest.raises(TextError, match=f"task.jsonl line 1 of {name}; found .*{found}"):
        read(tmp_path, name, record)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=f"{tmp_path}/no.jsonl of piqa; found No such file"):
        read_questions(get_task("piqa"), tmp_path / "no.jsonl")
    with pytest.raises(TextError, match="no questions"):
        read(tmp_path, "piqa", "", "")
    (tmp_path / "task.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TextError, match="UTF-8"):
        read_questions(get_task("piqa"), tmp_path / "task.jsonl")


def test_an_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(PlanError, match="task 'mmlu'; found the tasks piqa, arc_easy, hellaswag"):
        get_task("mmlu")


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("piqa", "piqa_validation.jsonl", 1838), ("arc_easy", "arc_easy_test.jsonl", 2376)],
)
def test_the_published_files_are_read_in_full(
    shared_data: Path, name: str, file: str, count: int
) -> None:
    questions = read_questions(get_task(name), shared_data / file)
    assert len(questions) == count
    assert all(q.context.startswith("Question: ") for q in questions)
    assert all(q.context.endswith("\nAnswer:") for q in questions)
