"""`linearize probe retrieval`: the numbers of the library, beside those of softmax, kept in a folder."""

import json
from pathlib import Path

import pytest

import linearize
from linearize.probe import retrieval

SMALL = ("--pairs", "3,6", "--distances", "0,20", "--questions", "3", "--examples", "4")


def test_a_converted_model_stands_beside_its_softmax_reference(
    run, converted: Path, base: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ["--text", text, "--out", out, "--json", tmp_path / "probe.json"]
    result = run("probe", "retrieval", converted, *SMALL, *given)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "probe.json").read_text())
    settings = {"pairs": [3, 6], "distances": [0, 20], "questions": 3, "examples": 4}
    for name, folder in (("retrieval", converted), ("softmax", base)):
        wanted = retrieval(linearize.load(folder), text, **settings)
        found = [(cell["exact"], cell["choice"]) for cell in written[name]["cells"]]
        assert found == [(cell.exact, cell.choice) for cell in wanted.cells]
    for cell in written["retrieval"]["cells"]:
        assert f"{cell['choice']:.3f} ± {cell['choice_error']:.3f}" in result.stdout
    assert written["settings"].items() >= settings.items()
    assert json.loads((out / "retrieval.json").read_text()) == written
    assert (out / "retrieval.svg").read_text().startswith("<svg")

    again = run("probe", "retrieval", tmp_path / "nowhere", *SMALL, "--out", out)
    assert again.exit_code == 2 and "not empty" in again.stderr


def test_an_unconverted_model_has_no_reference(run, base: Path, tmp_path: Path) -> None:
    result = run("probe", "retrieval", base, *SMALL, "--json", tmp_path / "probe.json")
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "probe.json").read_text())
    assert written["softmax"] is None and "softmax" not in result.stdout
    assert written["text"] == ["the documentation that comes with Python"]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (["--pairs", "4,x"], ("--pairs 4,x", "no list of numbers")),
        (["--pairs", "1"], ("1 pairs in a context", "1 < 2")),
        (["--distances=-1"], ("-1 tokens of distance", "-1 < 0")),
    ],
)
def test_bad_settings_before_the_model_is_loaded(
    run, tmp_path: Path, given: list[str], parts: tuple[str, ...]
) -> None:
    result = run("probe", "retrieval", tmp_path / "nowhere", *given)
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.stderr


def test_pairs_that_do_not_fit_name_the_inequality(run, base: Path) -> None:
    result = run("probe", "retrieval", base, "--pairs", "40")
    assert result.exit_code == 2
    assert "2 · 40 > 52 words" in result.stderr
