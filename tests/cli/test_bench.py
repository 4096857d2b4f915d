"""`linearize bench`: the three benchmarks at tiny sizes."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from linearize.report import drawing

SMALL = ("--heads", 6, "--kv-heads", 2, "--dim", 8, "--lengths", "20,60", "--repeats", 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.bench.measure.CEILING_SIZE", 32)
    monkeypatch.setattr("linearize.bench.paths.CHECKED", 40)


def charts(folder: Path) -> dict[str, str]:
    """The SVG files of a folder, each well-formed and in colours for any page."""
    found = {}
    for file in folder.glob("*.svg"):
        text = file.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg") and drawing.GREY in root.attrib["style"]
        assert f"]({file.name})" in (folder / "index.md").read_text(encoding="utf-8")
        found[file.stem] = text
    return found


def test_operator(run, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "op.json"
    given = ("--dtype", "fp32,bf16", "--kernels", "oal,global", "--backward")
    result = run("bench", "operator", *SMALL, *given, "--out", out, "--json", file)
    assert result.exit_code == 0, result.output
    stored = json.loads(file.read_text())
    assert json.loads((out / "operator.json").read_text()) == stored
    assert len(stored["rows"]) == 2 * 2 * 4
    for row in stored["rows"]:
        assert row["path"] in result.stdout
        assert row["forward"]["median"] > 0 and row["backward"]["median"] > 0
    assert stored["machine"]["cores"] >= 1 and stored["machine"]["versions"]["torch"]
    assert {"oal", "global"} == {crossing["path"] for crossing in stored["crossovers"]}
    assert "GFLOP/s in square matrix products" in result.stdout
    drawn = charts(out)
    assert set(drawn) == {"operator-fp32", "operator-bf16"}
    assert "OAL, G = 5" in drawn["operator-fp32"] and "SDPA flash" in drawn["operator-bf16"]


def test_operator_says_what_it_left_out(run, tmp_path: Path) -> None:
    result = run("bench", "operator", *SMALL, "--kernels", "oal", "--dtype", "fp32", "--budget", 0)
    assert result.exit_code == 0, result.output
    assert "skipped" in result.stdout
    assert "oal, fp32, 60 tokens: would take" in result.stdout


def test_decode(run, base: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "decode.json"
    given = ("--layers", "1-2", "--contexts", "10,40", "--tokens", 1, "--repeats", 2)
    hybrid = ("--window", 4, "--sinks", 2, "--state-rank", 3, "--kernel", "global")
    result = run("bench", "decode", base, *given, *hybrid, "--out", out, "--json", file)
    assert result.exit_code == 0, result.output
    stored = json.loads(file.read_text())
    assert stored["settings"]["plan"]["state_rank"] == 3
    assert stored["settings"]["converted_layers"] == [1, 2]
    assert [point["context"] for point in stored["points"]] == [10, 40]
    assert "The context is not read" in result.stdout
    assert "the kernels are unfitted" in result.stdout
    assert set(charts(out)) == {"decode"}


def test_model_of_a_converted_folder(run, converted: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("--lengths", "8,16", "--new-tokens", 2, "--repeats", 1)
    result = run("bench", "model", converted, *given, "--out", out)
    assert result.exit_code == 0, result.output
    stored = json.loads((out / "model.json").read_text())
    assert stored["settings"]["fitted"] and "unfitted" not in result.stdout
    assert len(stored["points"]) == 6
    assert set(charts(out)) == {"model"}


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("operator", "--lengths", "a"), "--lengths 'a'"),
        (("operator", "--kernels", "nosuch"), "kernel 'nosuch'"),
        (("operator", "--heads", "4"), "4 query heads with 3 KV heads"),
        (("operator", "--device", "abacus"), "device 'abacus'"),
        (("operator", "--kernels", "performer", "--state-rank", "2"), "rank 2"),
        (("decode", "MODEL", "--layers", "9"), "layers '9'"),
        (("decode", "MODEL", "--contexts", "0"), "--contexts '0'"),
        (("model", "MODEL", "--kernel", "nosuch"), "kernel 'nosuch'"),
        (("model", "FOLDER", "--window", "4"), "layers, kernel, window"),
    ],
)
def test_bad_input_is_told(
    run, base: Path, converted: Path, arguments: tuple[str, ...], asked: str
) -> None:
    places = {"MODEL": base, "FOLDER": converted}
    result = run("bench", *(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and asked in result.stderr, result.stderr


def test_earlier_results_are_not_lost(run, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("kept")
    result = run("bench", "operator", *SMALL, "--out", tmp_path)
    assert result.exit_code == 2 and "not empty" in result.stderr
    assert (tmp_path / "old.txt").read_text() == "kept"
