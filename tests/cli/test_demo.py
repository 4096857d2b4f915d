"""`linearize demo` on a tiny model in place of the bundled one."""

import importlib
import json
from pathlib import Path

import pytest

import linearize
import linearize.text
import tiny
from linearize.converted import converted_layers
from linearize.report import EVALUATION, PAGE, SAMPLES


def test_the_whole_job(run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = importlib.import_module("linearize.cli.demo")
    monkeypatch.setattr(demo, "MODEL", str(base))
    monkeypatch.setattr(demo, "PLAN", tiny.plan(layers="1-1", sinks=2, window=4, skip_blocks=9))
    monkeypatch.setattr(demo, "NEW_TOKENS", 5)
    out, file = tmp_path / "demo", tmp_path / "demo.json"
    result = run("demo", "--out", out, "--seed", 5, "--json", file)
    assert result.exit_code == 0, result.output

    written = json.loads(file.read_text())
    assert written["conversion"]["plan"]["seed"] == 5
    first = min(written["conversion"]["fit_blocks"])
    assert first >= demo.HELD_OUT, "perplexity was measured on blocks used for fitting"
    evaluation = json.loads((out / EVALUATION).read_text())
    assert evaluation == written["evaluation"]
    text = linearize.text.default_text()[: 64 * demo.HELD_OUT]
    after = linearize.evaluate.perplexity(linearize.load(out), text, block=64)
    before = linearize.evaluate.perplexity(linearize.load(base), text, block=64)
    assert evaluation["perplexity"] == pytest.approx(after.value, rel=1e-5)
    assert evaluation["softmax_perplexity"] == pytest.approx(before.value, rel=1e-5)

    assert json.loads((out / SAMPLES).read_text()) == written["samples"]
    assert sorted(converted_layers(linearize.load(out).model)) == [1]
    page = (out / PAGE).read_text(encoding="utf-8")
    assert f"{evaluation['perplexity']:.3f}" in page
    for shown in (f"{evaluation['perplexity']:.2f}", "linear: 1 of 3 attention layers", str(out)):
        assert shown in result.stdout


def test_held_out_blocks_are_those_that_fitting_skips() -> None:
    demo = importlib.import_module("linearize.cli.demo")
    assert demo.PLAN.skip_blocks >= demo.HELD_OUT
