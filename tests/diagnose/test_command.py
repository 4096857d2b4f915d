"""`linearize diagnose`: every diagnostic draws, tells and stores what it found."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import tiny
from linearize.cli import app
from linearize.cli.diagnose import DIAGNOSTICS
from linearize.report import drawing
from linearize.text import default_text

Run = Callable[..., Result]

SMALL = (
    *("--block", 32, "--evaluation-blocks", 3, "--fit-blocks", 2, "--validation-blocks", 2),
    *("--prompts", 4, "--positions", 4, "--controls", 8, "--kernels", "dijiang,taylorshift"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(default_text()[:700], encoding="utf-8")
    return file


@pytest.fixture
def run(base: Path, text: Path) -> Run:
    """Run one diagnostic on the tiny model."""

    def call(what: str, *options: object, model: object = base) -> Result:
        arguments = ["diagnose", what, model, "--text", text, *SMALL, *options]
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


def test_all_draws_everything_and_lists_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("all", "--layers", "0,2", "--head", 1, "--out", out, "--json", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    index = (out / "index.md").read_text()
    together = json.loads((tmp_path / "a.json").read_text())
    assert list(together) == list(DIAGNOSTICS)
    drawn = set()
    for name, diagnostic in DIAGNOSTICS.items():
        assert json.loads((out / f"{name}.json").read_text()) == together[name]
        assert f"## {diagnostic.title}\n" in index
    for figure in out.glob("*.svg"):
        root = ElementTree.fromstring(figure.read_text())
        assert root.tag.endswith("svg") and root.attrib["viewBox"]
        assert drawing.GREY in root.attrib["style"]
        assert f"]({figure.name})" in index
        drawn.add(figure.stem)
    assert drawn == {
        *(f"{name}-layer{n}-head1" for name in ("profiles", "groups", "stability") for n in (0, 2)),
        *("budget-layer0-head1", "state", "concentration", "activations", "retained-error"),
    }
    rows = [line for line in index.splitlines() if line.startswith("| dijiang |")]
    (kernel,) = [k for k in together["retained-error"]["kernels"] if k["kernel"] == "dijiang"]
    assert f"| {100 * kernel['ratio']:.1f} | {100 * kernel['gaussian']:.1f} |" in rows[0]
    assert len(list((out / "parts").iterdir())) == len(DIAGNOSTICS) - 1 + 2 * ((2 + 5) + (2 + 1))

    (out / "parts" / "stability.json").unlink()  # as if interrupted before it had ended
    resumed = run(
        *("all", "--layers", "0,2", "--head", 1, "--out", out, "--json", tmp_path / "b.json"),
        "--resume",
    )
    assert resumed.exit_code == 0, resumed.output
    again = json.loads((tmp_path / "b.json").read_text())
    assert again["retained-error"].pop("seconds") != together["retained-error"].pop("seconds")
    assert again == together  # the seconds of the others too: they were not run again
    assert (out / "index.md").read_text().splitlines()[:20] == index.splitlines()[:20]
    other = run("all", "--layers", "0,2", "--head", 0, "--out", out, "--resume")
    assert other.exit_code == 2 and "head=1" in other.stderr


def test_without_layers_some_look_at_three_and_some_at_all(run: Run, tmp_path: Path) -> None:
    for what, layers in (("profiles", [0, 1, 2]), ("concentration", [0, 1, 2])):
        assert run(what, "--json", tmp_path / f"{what}.json").exit_code == 0
        found = json.loads((tmp_path / f"{what}.json").read_text())
        seen = found["heads"] if what == "profiles" else found["layers"]
        assert [one["layer"] for one in seen] == layers


def test_an_earlier_run_is_not_lost(run: Run, tmp_path: Path) -> None:
    file, parts = tmp_path / "r.json", tmp_path / "r.parts"
    options = ("--layers", 1, "--json", file)
    assert run("retained-error", *options).exit_code == 0
    first = json.loads(file.read_text())
    refused = run("retained-error", *options)
    assert refused.exit_code == 2 and f"a new run in {parts}" in refused.stderr
    assert run("groups", *options).exit_code == 0  # keeps no parts
    (parts / "dijiang-layer1-controls-seed3.json").unlink()
    stamp = (parts / "dijiang-layer1-controls-seed2.json").stat().st_mtime_ns
    assert run("retained-error", *options, "--resume").exit_code == 0
    again = json.loads(file.read_text())
    assert first.pop("seconds") > 0 and again.pop("seconds") > 0
    assert again == first
    assert (parts / "dijiang-layer1-controls-seed2.json").stat().st_mtime_ns == stamp
    assert run("retained-error", *options, "--overwrite").exit_code == 0
    assert (parts / "dijiang-layer1-controls-seed2.json").stat().st_mtime_ns > stamp
    other = run("retained-error", *options, "--resume", "--seed", 7)
    assert other.exit_code == 2 and "seed=42" in other.stderr


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("profile", (), "diagnostic 'profile'"),
        ("profiles", ("--head", 6), "head 6"),
        ("groups", ("--layers", "1-9"), "layers"),
        ("retained-error", ("--kernels", "dijiang,fast"), "kernel 'fast'"),
        ("retained-error", ("--kernels", "softmax"), "a kernel without error"),
        ("retained-error", ("--evaluation-blocks", 99), "too few"),
        ("retained-error", ("--resume",), "no folder to resume from"),
    ],
)
def test_bad_input_is_told(run: Run, what: str, options: tuple[object, ...], message: str) -> None:
    result = run(what, *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_numbers_reach_the_figures(run: Run, tmp_path: Path) -> None:
    """Every bar of the retained errors carries its number."""
    result = run("retained-error", "--layers", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "retained-error.json").read_text())
    drawn = (tmp_path / "retained-error.svg").read_text()
    for kernel in found["kernels"]:
        for value in (kernel["ratio"], kernel["gaussian"], kernel["controls"]["mean"]):
            assert f">{100 * value:.1f}<" in drawn
