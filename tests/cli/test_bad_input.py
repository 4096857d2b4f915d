"""Bad input ends with one message, exit code 2, before work starts, and leaves output alone."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import linearize
import tiny
from linearize.checkpoint import ADAPTER

SMALL = ("--block", "64", "--positions", "16")


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(result: Result, *parts: str) -> None:
    """The result is one clean message that says what was asked, found, and to be done."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    asked, found, *remedy = result.stderr[result.stderr.index("error: ") :].splitlines()
    assert asked.startswith("error: asked for ")
    assert found.startswith("       found ")
    assert remedy and remedy[0].strip(), "no remedy"
    for part in parts:
        assert part in result.stderr, result.stderr


def test_unknown_model(run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", tmp_path / "nowhere", "--out", out, "--text", text)
    refused(result, f"model '{tmp_path / 'nowhere'}'", "Give a Hugging Face id")
    assert not out.exists()


def test_unknown_kernel_before_the_model_is_loaded(run, tmp_path: Path) -> None:
    result = run("convert", tmp_path / "nowhere", "--out", tmp_path / "out", "--kernel", "nosuch")
    refused(result, "asked for kernel 'nosuch'", "global, ", "oal")


@pytest.mark.parametrize(
    ("layers", "found"),
    [("1-9", "layers 0-2"), ("7", "layers 0-2"), ("x", "neither an index nor a range")],
)
def test_layers_outside_the_model(
    run, base: Path, text: Path, tmp_path: Path, layers: str, found: str
) -> None:
    out = tmp_path / "out"
    result = run("convert", base, "--out", out, "--layers", layers, "--text", text, *SMALL)
    refused(result, f"asked for layers {layers!r}", found)
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (("--window", "-1"), "window=-1"),
        (("--window", "9", "--saturation", "0"), "saturation=0"),
        (("--window", "62", "--sinks", "2"), "2 sinks and a window of 62 keys"),
        (("--sinks", "900"), "900 sinks and a window of 0 keys"),
        (("--alpha", "2"), "alpha=2"),
        (("--solver", "guess"), "solver='guess'"),
        (("--groups", "0"), "groups=0"),
        (("--option", "nosuch=1"), "option 'nosuch' of kernel 'oal'"),
    ],
)
def test_impossible_settings(
    run, base: Path, text: Path, tmp_path: Path, given: tuple[str, ...], asked: str
) -> None:
    result = run("convert", base, "--out", tmp_path / "out", "--text", text, *SMALL, *given)
    refused(result, f"asked for {asked}")


def test_text_too_short(run, base: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", base, "--out", out, "--text", text, "--block", "4096")
    refused(result, "asked for 2 blocks of 4096 tokens", "found 1000 tokens, 7192 too few")
    assert not out.exists()
    result = run("eval", base, "--text", text, "--block", "600", "--blocks", "3")
    refused(result, "asked for 3 blocks of 600 tokens", "found 1000 tokens")


@pytest.mark.parametrize("verb", ["convert", "eval"])
def test_missing_text_before_the_model_is_loaded(run, tmp_path: Path, verb: str) -> None:
    out = ["--out", tmp_path / "out"] if verb == "convert" else []
    result = run(verb, tmp_path / "nowhere", *out, "--text", tmp_path / "no.txt")
    refused(result, f"text file {tmp_path / 'no.txt'}", "No such file")


@pytest.mark.parametrize("verb", ["convert", "demo"])
def test_a_folder_with_content_is_left_alone(run, tmp_path: Path, verb: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    before = listing(tmp_path)
    model = [tmp_path / "nowhere"] if verb == "convert" else []
    result = run(verb, *model, "--out", out)
    refused(result, f"asked for output folder {out}", "not empty", "--overwrite")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("place", ["", "file/result.json"])
def test_json_that_could_not_be_written_is_refused_first(run, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("no folder")
    given = ["--out", tmp_path / "out", "--json", tmp_path / place]
    refused(run("convert", tmp_path / "nowhere", *given), f"output file {tmp_path / place}")


def test_a_failed_overwrite_leaves_the_old_folder(run, converted: Path, base, text: Path) -> None:
    before = listing(converted)
    given = ["--overwrite", "--layers", "9", "--text", text, *SMALL]
    refused(run("convert", base, "--out", converted, *given), "layers '9'")
    assert listing(converted) == before


def test_an_architecture_without_the_interface(run, text: Path, tmp_path: Path) -> None:
    tiny.model("bloom").save_pretrained(tmp_path / "bloom")
    tiny.tokenizer().save_pretrained(tmp_path / "bloom")
    result = run("convert", tmp_path / "bloom", "--out", tmp_path / "out", "--text", text, *SMALL)
    refused(result, "without transformers' attention interface")


def test_nan_in_the_activations(run, text: Path, tmp_path: Path) -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    tiny.tokenizer().save_pretrained(tmp_path / "nan")
    result = run("convert", tmp_path / "nan", "--out", tmp_path / "out", "--text", text, *SMALL)
    refused(result, "activations of layer 1", "NaN")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "gone", "config"])
@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_a_damaged_checkpoint(run, converted: Path, text: Path, damage: str, verb: str) -> None:
    weights = converted / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "garbage":
        weights.write_bytes(b"\xff" * 1000)
    elif damage == "gone":
        weights.unlink()
    else:
        (converted / "config.json").write_text("{")
    before = listing(converted)
    given = ["--text", text] if verb == "eval" else ["--prompt", "x"]
    refused(run(verb, converted, *given), str(converted))
    assert listing(converted) == before


@pytest.mark.parametrize("name", ["conversion.json", "evaluation.json", "samples.json"])
def test_a_damaged_account(run, converted: Path, name: str) -> None:
    (converted / name).write_text('{"half')
    refused(run("report", converted), str(converted / name), "damaged")
    (converted / name).write_text('"text"')
    refused(run("report", converted), str(converted / name))
    assert not (converted / "report.html").exists()


def test_an_adapter_on_another_base(run, base: Path, text: Path, tmp_path: Path) -> None:
    adapter, other = tmp_path / "adapter", tmp_path / "other"
    given = ["--adapter-only", "--layers", "1", "--text", text, *SMALL]
    assert run("convert", base, "--out", adapter, *given).exit_code == 0
    tiny.model("llama", num_key_value_heads=1).save_pretrained(other)
    tiny.tokenizer().save_pretrained(other)
    section = json.loads((adapter / ADAPTER).read_text())
    (adapter / ADAPTER).write_text(json.dumps(section | {"base": str(other)}))
    refused(run("eval", adapter, "--text", text), "for layer 1", "kv_heads=1")


def test_ctrl_c_leaves_what_was_there(
    run, converted: Path, base: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    module = importlib.import_module("linearize.cli.convert")
    before = listing(converted.parent)
    given = ["--overwrite", "--layers", "1", "--text", text, *SMALL]
    monkeypatch.setattr(module, "convert_model", interrupted)
    result = run("convert", base, "--out", converted, *given)
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert listing(converted.parent) == before

    monkeypatch.undo()  # and in the middle of saving
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", interrupted)
    result = run("convert", base, "--out", converted, *given)
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert listing(converted.parent) == before


def test_debug_shows_the_error_itself(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEARIZE_DEBUG", "1")
    result = run("report", tmp_path)
    assert isinstance(result.exception, linearize.LinearizeError)


def test_the_process_ends_with_the_message_and_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "linearize", "report", str(tmp_path / "nowhere")]
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: asked for a report on {tmp_path / 'nowhere'}\n")
    assert "Traceback" not in done.stderr
