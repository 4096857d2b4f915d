"""`linearize eval`: the numbers are those of the library, and a converted folder keeps them."""

import json
from pathlib import Path

import pytest

import linearize
from linearize.convert import original_attention
from linearize.report import EVALUATION


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
