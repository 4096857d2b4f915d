"""lm-evaluation-harness over models in memory, offline, on a task file made here."""

import importlib
import importlib.util
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import tiny
from linearize import Loaded
from linearize.converted import original_attention
from linearize.errors import ModelError, PlanError, TextError
from linearize.evaluate import choice, get_task, harness, harness_tasks, read_questions
from linearize.evaluate.tasks import PER_CHARACTER, SUM

QUESTIONS = [
    {"goal": f"How do you {verb}?", "sol1": first, "sol2": second, "label": at % 2}
    for at, (verb, first, second) in enumerate(
        [
            ("sit", "bend the knees", "jump"),
            ("dry a shoe", "put paper inside of it", "use water"),
            ("sing", "a", "open the mouth and breathe"),
            ("cook", "heat", "freeze"),
            ("leave", "through the door", "no"),
        ]
    )
]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "Question: {{{{goal}}}}\\nAnswer:"
doc_to_target: label
doc_to_choice: "{{{{[sol1, sol2]}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 3.0}}
"""
installed = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs lm-evaluation-harness: pip install 'linearize[harness]'",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task file that reads the JSONL file beside it; what is derived from it stays here, too."""
    if importlib.util.find_spec("datasets") is not None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "local_choice.yaml").write_text(TASK.format(file=file))
    return tmp_path


def model() -> Loaded:
    base = tiny.converted("oal")
    return Loaded(base.model, tiny.tokenizer(), base.plan)


@installed
def test_the_harness_agrees_with_our_own_scoring(folder: Path) -> None:
    """The same prompts: its ``acc`` is our sum, its ``acc_norm`` our score per character."""
    loaded = model()
    questions = read_questions(get_task("piqa"), folder / "questions.jsonl")
    tasks = harness_tasks(["local_choice"], folder)
    for enter in (nullcontext(), original_attention(loaded.model)):
        with enter:
            found, ours = harness(loaded, tasks), choice(loaded, get_task("piqa"), questions)
        values = {score.normalisation: score.value for score in found}
        assert values == pytest.approx({n: ours.accuracies[n] for n in (SUM, PER_CHARACTER)})
        for score in found:
            assert (score.task, score.count, score.version) == ("local_choice", 5, "3.0")
            share = score.value
            assert score.standard_error == pytest.approx((share * (1 - share) / 4) ** 0.5)
    assert {score.metric for score in found} == {"acc", "acc_norm"}


@installed
def test_the_limit_takes_the_first_questions(folder: Path) -> None:
    found = harness(model(), harness_tasks(["local_choice"], folder), limit=2, batch=1)
    questions = read_questions(get_task("piqa"), folder / "questions.jsonl", 2)
    ours = choice(model(), get_task("piqa"), questions)
    assert [score.count for score in found] == [2, 2]
    assert found[0].value == ours.accuracies[found[0].normalisation]


@installed
def test_data_that_is_not_there_is_an_error(folder: Path) -> None:
    (folder / "questions.jsonl").unlink()
    tasks = harness_tasks(["local_choice"], folder)
    with pytest.raises(TextError, match=r"harness task local_choice; found .*questions\.jsonl"):
        harness(model(), tasks)


@installed
def test_an_unknown_task_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own index is left out: reading its 15,000 files takes many seconds."""
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    own = partial(manager, include_defaults=False)
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager", lambda **given: own(include_path=given["include_path"])
    )
    with pytest.raises(PlanError, match=r"harness task 'nosuch'; found 1 others"):
        harness_tasks(["local_choice", "nosuch"], folder)


def test_bad_input_before_the_harness_is_asked(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no such folder"):
        harness_tasks(["local_choice"], tmp_path / "nowhere")
    with pytest.raises(PlanError, match="no name"):
        harness_tasks([])


def test_a_missing_installation_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = importlib.import_module

    def without(name: str, package: str | None = None) -> object:
        if name.startswith("lm_eval"):
            raise ImportError("No module named 'lm_eval'")
        return plain(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ModelError, match=r"Run: pip install 'linearize\[harness\]'"):
        harness_tasks(["piqa"], tmp_path)
