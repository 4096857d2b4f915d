"""`linearize convert`: what it saves, prints and writes as JSON."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import linearize
import tiny
from linearize.checkpoint import ADAPTER, REPORT
from linearize.converted import converted_layers


def test_the_folder_holds_a_model_that_loads_with_its_plan(
    conversion: tuple[Path, Result], base: Path
) -> None:
    loaded = linearize.load(conversion[0])
    assert loaded.plan is not None and loaded.tokenizer is not None
    assert (loaded.plan.layers, loaded.plan.sinks, loaded.plan.window) == ("1-2", 2, 4)
    assert sorted(converted_layers(loaded.model)) == [1, 2]
    original = linearize.load(base).model.state_dict()
    for name, value in loaded.model.state_dict().items():
        if "linear_attention" not in name:
            assert torch.equal(value, original[name]), name


def test_the_model_computes_what_the_conversion_left(conversion: tuple[Path, Result]) -> None:
    ids = tiny.prompt(1, 32)
    first = tiny.logits(linearize.load(conversion[0]).model, ids)
    again = tiny.logits(linearize.load(conversion[0]).model, ids)
    assert torch.equal(first, again) and bool(first.isfinite().all())


def test_json_is_the_stored_account(conversion: tuple[Path, Result]) -> None:
    folder, _ = conversion
    written = json.loads((folder.parent / "convert.json").read_text())
    assert written.pop("folder") == str(folder)
    assert written == json.loads((folder / REPORT).read_text())
    assert [layer["layer"] for layer in written["layers"]] == [1, 2]
    assert written["tokens"] == 1000
    assert written["fit_blocks"] == [2, 3, 4] and written["validation_blocks"] == [5, 6]
    for layer in written["layers"]:
        for groups in layer["groups"]:
            assert sorted(r for members in groups for r in members) == list(range(8))


def test_the_table_shows_every_layer(conversion: tuple[Path, Result]) -> None:
    folder, result = conversion
    report = json.loads((folder / REPORT).read_text())
    for layer in report["layers"]:
        relative = layer["validation_relative"]
        line = next(x for x in result.stdout.splitlines() if x.split()[:1] == [str(layer["layer"])])
        assert f"{sum(relative) / len(relative):.4f}" in line
        assert f"{max(relative):.4f}" in line
    assert "converted 2 of 3 layers with kernel oal" in result.stdout
    assert f"saved to {folder}" in result.stdout


def test_every_option_reaches_the_plan(run, base: Path, text: Path, tmp_path: Path) -> None:
    settings = {
        **{"kernel": "oal", "layers": "1", "window": 3, "sinks": 1, "groups": 3, "alpha": 0.5},
        **{"gamma": 0.5, "tau": 1.2, "min_groups": 3, "prompts": 5, "block": 32},
        **{"skip_blocks": 1, "fit_blocks": 2, "validation_blocks": 1, "positions": 16, "seed": 7},
    }
    given = [x for key, value in settings.items() for x in (f"--{key.replace('_', '-')}", value)]
    result = run("convert", base, "--out", tmp_path / "out", "--text", text, *given)
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "out" / REPORT).read_text())["plan"]
    assert {key: plan[key] for key in settings} == settings


def test_kernel_options_are_read_as_json(run, base: Path, text: Path, tmp_path: Path) -> None:
    small = ["--block", 64, "--positions", 16, "--layers", 0, "--text", text]
    option = ["--kernel", "global", "--option", "eps=0.001"]
    result = run("convert", base, "--out", tmp_path / "out", *small, *option)
    assert result.exit_code == 0, result.output
    assert linearize.load(tmp_path / "out").plan.options == {"eps": 0.001}


def test_adapter_only_saves_the_kernels_alone(run, base: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    small = ["--block", 64, "--positions", 16, "--layers", 1, "--text", text]
    assert run("convert", base, "--out", out, "--adapter-only", *small).exit_code == 0
    assert (out / ADAPTER).is_file() and not (out / "model.safetensors").exists()
    assert sorted(converted_layers(linearize.load(out).model)) == [1]


def test_overwrite_replaces_the_whole_folder(run, converted: Path, base: Path, text: Path) -> None:
    (converted / "evaluation.json").write_text("{}")
    small = ["--block", 64, "--positions", 16, "--layers", 0, "--text", text, "--overwrite"]
    assert run("convert", base, "--out", converted, *small).exit_code == 0
    assert not (converted / "evaluation.json").exists(), "results of another model were kept"
    assert sorted(converted_layers(linearize.load(converted).model)) == [0]


@pytest.mark.parametrize("pair", ["features", "=1"])
def test_an_option_without_value_is_refused(run, base: Path, tmp_path: Path, pair: str) -> None:
    result = run("convert", base, "--out", tmp_path / "out", "--option", pair)
    assert result.exit_code == 2
    assert f"asked for option {pair!r}" in result.stderr
