"""`linearize eval`: the numbers are those of the library, and a converted folder keeps them."""

import json
import sys
from pathlib import Path

import pytest

import linearize
import tiny
from cli.conftest import SMALL
from linearize.converted import original_attention
from linearize.evaluate import HarnessScore
from linearize.report import EVALUATION, PAGE


def test_a_converted_model_stands_beside_its_softmax_reference(
    run, converted: Path, base: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ["--text", text, "--block", 50, "--blocks", 3, "--json", tmp_path / "ppl.json"]
    result = run("eval", converted, *arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "ppl.json").read_text())

    loaded = linearize.load(converted)
    expected = linearize.evaluate.perplexity(loaded, text, block=50, blocks=3)
    original = linearize.evaluate.perplexity(linearize.load(base), text, block=50, blocks=3)
    assert written["perplexity"] == pytest.approx(expected.value, rel=1e-6)
    assert written["softmax_perplexity"] == pytest.approx(original.value, rel=1e-5)
    assert written["perplexity"] != pytest.approx(original.value, rel=1e-3), "nothing was converted"
    assert written["ratio"] == pytest.approx(expected.value / original.value, rel=1e-5)
    assert written["targets"] == 3 * 49 and written["blocks"] == 3
    assert written["text"] == [str(text)]
    assert len(written["details"]["softmax"]["per_block"]) == 3
    for key in ("perplexity", "softmax_perplexity", "ratio"):
        assert f"{written[key]:.3f}" in result.stdout

    assert json.loads((converted / EVALUATION).read_text()) == written
    with original_attention(loaded.model):
        again = linearize.evaluate.perplexity(loaded, text, block=50, blocks=3)
    assert again.value == pytest.approx(original.value, rel=1e-5)


def test_the_recall_split_stands_beside_that_of_softmax(
    run, converted: Path, text: Path, tmp_path: Path
) -> None:
    given = ["--text", text, "--block", 200, "--blocks", 2, "--json", tmp_path / "split.json"]
    result = run("eval", converted, *given, "--recall-split")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "split.json").read_text())
    found, loaded = written["recall"], linearize.load(converted)
    with original_attention(loaded.model):
        softmax = linearize.evaluate.recall_split(loaded, text, block=200, blocks=2)
    wanted = linearize.evaluate.recall_split(loaded, text, block=200, blocks=2)
    for name, split in (("model", wanted), ("softmax", softmax)):
        for part in ("recalled", "rest"):
            value = getattr(split, part).value
            assert found[name][part]["value"] == pytest.approx(value, rel=1e-6)
            assert f"{value:.3f}" in result.stdout
    assert 0 < found["share"] == wanted.recalled.share < 1
    assert sum(found["targets"].values()) == written["targets"] == 398
    assert f"{found['share']:.1%}" in result.stdout
    plain = run("eval", converted, *given)
    assert plain.exit_code == 0 and "recall" not in json.loads(
        (tmp_path / "split.json").read_text()
    )


def test_the_batch_changes_nothing(run, converted: Path, text: Path, tmp_path: Path) -> None:
    values = []
    for batch in (1, 3):
        out = tmp_path / f"{batch}.json"
        given = ["--text", text, "--block", 40, "--blocks", 4, "--batch", batch, "--json", out]
        assert run("eval", converted, "--no-reference", *given).exit_code == 0
        values.append(json.loads(out.read_text()))
    assert values[0]["perplexity"] == pytest.approx(values[1]["perplexity"], rel=1e-5)
    assert values[0]["softmax_perplexity"] is None and values[0]["ratio"] is None


def test_an_unconverted_model_has_no_reference_and_its_folder_stays_as_it_is(
    run, base: Path, text: Path, tmp_path: Path
) -> None:
    before = sorted(base.iterdir())
    result = run("eval", base, "--text", text, "--block", 100, "--json", tmp_path / "ppl.json")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "ppl.json").read_text())
    assert written["softmax_perplexity"] is None and written["blocks"] == 10
    assert sorted(base.iterdir()) == before


def test_without_text_the_default_is_used_and_said(run, base: Path, tmp_path: Path) -> None:
    result = run("eval", base, "--block", 32, "--blocks", 1, "--json", tmp_path / "ppl.json")
    assert result.exit_code == 0, result.output
    assert "documentation that comes with Python" in result.stderr
    text = json.loads((tmp_path / "ppl.json").read_text())["text"]
    assert text == ["the documentation that comes with Python"]


PIQA = [
    {"goal": f"Make thing {at}", "sol1": "Use paper", "sol2": "Throw it away", "label": at % 2}
    for at in range(6)
]


@pytest.fixture
def piqa(tmp_path: Path) -> Path:
    """Six questions, the last line malformed."""
    file = tmp_path / "piqa.jsonl"
    lines = [json.dumps(one) for one in PIQA]
    file.write_text("\n".join([*lines[:5], '{"goal": "no solutions"}']))
    return file


def test_tasks_alone_leave_perplexity_out(run, converted: Path, base, piqa: Path, tmp_path) -> None:
    given = ["--task", f"piqa={piqa}", "--limit", 5, "--json", tmp_path / "tasks.json"]
    result = run("eval", converted, *given)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "tasks.json").read_text())
    assert "perplexity" not in written

    questions = linearize.evaluate.read_questions(linearize.evaluate.get_task("piqa"), piqa, 5)
    task = linearize.evaluate.get_task("piqa")
    found = written["tasks"]["piqa"]
    for name, folder in (("model", converted), ("softmax", base)):
        wanted = linearize.evaluate.choice(linearize.load(folder), task, questions)
        assert found[name]["chosen"] == wanted.chosen
        assert found[name]["accuracies"] == wanted.accuracies
        assert f"{wanted.accuracy:.4f} ± {wanted.standard_error:.4f}" in result.stdout
    assert (found["count"], found["chance"], found["parts"]) == (5, 0.5, {})
    assert found["normalisation"] == "mean log-likelihood per token" and found["file"] == str(piqa)
    assert "mean log-likelihood per token" in result.stdout
    assert json.loads((converted / EVALUATION).read_text()) == written


def test_what_is_not_measured_again_stays_and_the_report_shows_it(
    run, converted: Path, text: Path, piqa: Path
) -> None:
    task = ["--task", f"piqa={piqa}", "--limit", 5]
    assert run("eval", converted, *task, "--no-reference").exit_code == 0
    assert run("report", converted).exit_code == 0  # of tasks alone
    alone = (converted / PAGE).read_text()
    assert "PIQA" in alone and "not evaluated yet" in alone
    assert run("eval", converted, "--text", text, "--block", 50, "--blocks", 2).exit_code == 0
    stored = json.loads((converted / EVALUATION).read_text())
    assert stored["tasks"]["piqa"]["softmax"] is None and stored["blocks"] == 2
    assert run("report", converted).exit_code == 0
    page = (converted / PAGE).read_text()
    accuracy = stored["tasks"]["piqa"]["model"]["accuracy"]
    assert f"{accuracy:.4f} ±" in page and f"{stored['ratio']:.3f}" in page


def test_text_and_task_give_both_and_the_parts_of_a_hybrid(
    run, converted: Path, text: Path, piqa: Path, tmp_path: Path
) -> None:
    given = ["--text", text, "--block", 50, "--blocks", 1, "--json", tmp_path / "both.json"]
    result = run(
        "eval", converted, *given, "--task", f"piqa={piqa}", "--limit", 3, "--ablate-linear"
    )
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "both.json").read_text())
    assert len(written["parts"]) == 2 == len(written["tasks"]["piqa"]["parts"])
    assert written["parts"].keys() == written["tasks"]["piqa"]["parts"].keys()
    values = {written["perplexity"], *(part["value"] for part in written["parts"].values())}
    assert len(values) == 3


@pytest.mark.parametrize(
    ("options", "block", "warned"),
    [
        (("--sinks", "2"), "64", False),
        (("--sinks", "2"), "65", True),
        (("--sinks", "2", "--saturation", "64"), "65", False),
        (("--sinks", "2", "--saturation", "65"), "90", True),
        ((), "65", False),
        (("--sinks", "2", "--window", "4", "--kernel", "softmax"), "65", False),
    ],
)
def test_blocks_longer_than_those_fitted_on_are_remarked(
    run, base: Path, text: Path, tmp_path: Path, options: tuple[str, ...], block: str, warned: bool
) -> None:
    out = tmp_path / "out"
    made = run("convert", base, "--out", out, "--text", text, *SMALL, *options)
    assert made.exit_code == 0, made.stderr
    result = run("eval", out, "--text", text, "--block", block, "--blocks", "1")
    assert result.exit_code == 0, result.stderr
    assert ("kernels fitted on 64" in result.stderr) == warned


def test_softmax_over_the_exact_keys_has_no_parts(run, tmp_path: Path, text: Path) -> None:
    linearize.save(tiny.converted("softmax+sinks+window"), tmp_path / "exact")
    result = run("eval", tmp_path / "exact", "--text", text, "--ablate-linear")
    assert result.exit_code == 2 and "no linear part" in result.stderr


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["mmlu={file}"], ("task 'mmlu'", "piqa, arc_easy, hellaswag")),
        (["piqa"], ("--task piqa", "no NAME=FILE")),
        (["piqa={file}.no"], ("piqa.jsonl.no of piqa", "No such file")),
        (["piqa={file}"], ("piqa.jsonl line 6 of piqa", "no field 'sol1'")),
        (["arc_easy={file}"], ("line 1 of arc_easy", "no field 'question'")),
    ],
)
def test_bad_tasks_before_the_model_is_loaded(
    run, piqa: Path, tmp_path: Path, given: list[str], parts: tuple[str, ...]
) -> None:
    result = run("eval", tmp_path / "nowhere", *(f"--task={g.format(file=piqa)}" for g in given))
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.stderr


def test_a_task_twice_and_harness_tasks_without_harness(run, piqa: Path, tmp_path: Path) -> None:
    twice = [f"--task=piqa={piqa}", f"--task=piqa={piqa}", "--limit", 1]
    result = run("eval", tmp_path / "nowhere", *twice)
    assert result.exit_code == 2 and "piqa a second time" in result.stderr
    result = run("eval", tmp_path / "nowhere", "--harness-tasks", tmp_path)
    assert result.exit_code == 2 and "no --harness" in result.stderr


def test_scores_of_the_harness_are_shown_beside_softmax(
    run, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness itself is tested where it is called; here its scores are given."""
    module = sys.modules["linearize.cli.evaluate"]
    asked = []

    def score(loaded: linearize.Loaded, tasks: object, **given: object) -> list[HarnessScore]:
        asked.append((tasks, given))
        value = 0.25 * len(asked)
        return [HarnessScore("local", "acc", "none", value, 0.125, "log-likelihood", 2, "1")]

    monkeypatch.setattr(module, "harness_tasks", lambda names, folder: (names, folder))
    monkeypatch.setattr(module, "harness", score)
    out = tmp_path / "harness.json"
    given = ["--harness", "local, other", "--harness-tasks", tmp_path, "--limit", 2, "--json", out]
    result = run("eval", converted, *given)
    assert result.exit_code == 0, result.output
    wanted = ((["local", "other"], tmp_path), {"limit": 2, "batch": 8})
    assert asked == [wanted, wanted]
    found = json.loads(out.read_text())["harness"]
    assert (found["model"][0]["value"], found["softmax"][0]["value"]) == (0.25, 0.5)
    assert "0.2500 ± 0.1250" in result.stdout and "0.5000 ± 0.1250" in result.stdout
    assert found["versions"]["lm-eval"] in result.stdout
