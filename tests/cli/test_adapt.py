"""`linearize adapt` and `linearize merge`: from a converted folder to an adapted and a folded one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import linearize
import tiny
from linearize.adapt import ADAPTATION
from linearize.adapt.checkpoint import FILE
from linearize.converted import converted_layers
from linearize.lora import lora_layers

Run = Callable[..., Result]
IDS = tiny.prompt(2, 13)
SMALL = (
    *("--steps", "4", "--block", "32", "--eval-every", "2", "--validation-blocks", "2"),
    *("--lr", "0.02", "--checkpoint-seconds", "0"),
)


def logits(folder: Path) -> torch.Tensor:
    return tiny.logits(linearize.load(folder).model, IDS)


def test_adapt_then_merge_then_report(
    conversion: tuple[Path, Result], text: Path, run: Run, tmp_path: Path
) -> None:
    converted, out, merged = conversion[0], tmp_path / "adapted", tmp_path / "merged"
    result = run(
        *("adapt", converted, "--out", out, *SMALL, "--json", tmp_path / "adapt.json"),
        *("--unit", 64, "--text", f"{text}@0-5", "--text", f"{text}@9-10"),
        *("--validation-text", f"{text}@12-14", "--no-tensorboard"),
    )
    assert result.exit_code == 0, result.output
    assert "validation perplexity" in result.output
    report = json.loads((out / ADAPTATION).read_text())
    assert json.loads((tmp_path / "adapt.json").read_text()) == {"folder": str(out), **report}
    assert report["text"] == [f"{text}@0-5", f"{text}@9-10"]
    assert report["train_blocks"] == 16 and report["validation_blocks"] == 2
    assert len(report["curves"]["loss"]) == 4
    assert report["curves"]["validated"] == [0, 2, 4]
    assert not (tmp_path / "adapted.training").exists()

    loaded = linearize.load(out)
    assert list(converted_layers(loaded.model)) == [1, 2]
    assert len(lora_layers(loaded.model)) == 12
    assert not torch.equal(tiny.logits(loaded.model, IDS), logits(converted))

    result = run("merge", out, "--out", merged)
    assert result.exit_code == 0, result.output
    assert not lora_layers(linearize.load(merged).model)
    assert torch.allclose(logits(merged), logits(out), atol=1e-4)
    assert (merged / ADAPTATION).is_file()
    assert run("eval", merged, "--text", text, "--block", 64).exit_code == 0

    for folder in (out, merged):
        result = run("report", folder)
        assert result.exit_code == 0, result.output
        page = (folder / "report.html").read_text()
        assert "Adaptation" in page and 'id="adaptation' in page
    result = run("merge", converted, "--out", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "a model without LoRA" in result.output


def test_the_softmax_reference_goes_the_same_way(
    base: Path, text: Path, run: Run, tmp_path: Path
) -> None:
    out, merged = tmp_path / "adapted", tmp_path / "merged"
    result = run("adapt", base, "--out", out, "--text", text, *SMALL)
    assert result.exit_code == 0, result.output
    report = json.loads((out / ADAPTATION).read_text())
    assert report["plan"] is None and report["kernel_numbers"] == 0
    assert run("merge", out, "--out", merged).exit_code == 0
    assert torch.allclose(logits(merged), logits(out), atol=1e-4)
    assert run("eval", out, "--text", text, "--block", 64).exit_code == 0


def test_both_see_the_same_blocks(
    base: Path, conversion: tuple[Path, Result], text: Path, run: Run, tmp_path: Path
) -> None:
    """With LoRA off and no kernel trained a batch is all that decides the first loss."""
    found = {}
    for name, model in (("softmax", base), ("oal", conversion[0])):
        options = ("--no-kernels", "--dtype", "fp32", "--adapter-only", *SMALL)
        result = run("adapt", model, "--out", tmp_path / name, "--text", text, *options)
        assert result.exit_code == 0, result.output
        found[name] = json.loads((tmp_path / name / ADAPTATION).read_text())
        assert not (tmp_path / name / "model.safetensors").exists()
    assert found["softmax"]["settings"] == found["oal"]["settings"]
    order = {"softmax": found["softmax"]["train_blocks"], "oal": found["oal"]["train_blocks"]}
    assert order["softmax"] == order["oal"] == 1000 // 32 - 2
    again = linearize.load(tmp_path / "softmax")
    assert len(lora_layers(again.model)) == 12 and not converted_layers(again.model)


def test_the_softmax_reference_can_teach(
    base: Path, conversion: tuple[Path, Result], text: Path, run: Run, tmp_path: Path
) -> None:
    teacher, out = tmp_path / "softmax", tmp_path / "out"
    assert run("adapt", base, "--out", teacher, "--text", text, *SMALL).exit_code == 0
    command = ("adapt", conversion[0], "--out", out, "--text", text, *SMALL, "--distill", 0.5)
    result = run(*command, "--teacher", teacher)
    assert result.exit_code == 0, result.output
    report = json.loads((out / ADAPTATION).read_text())
    assert report["teacher"] == str(teacher)
    assert run("report", out).exit_code == 0
    assert f'<td>teacher</td><td class="long">{teacher}</td>' in (out / "report.html").read_text()
    assert run(*command, "--teacher", teacher, "--resume").exit_code == 0
    result = run(*command, "--resume")
    assert result.exit_code == 2 and f"teacher='{teacher}'" in result.output


def test_an_interrupted_run_is_neither_lost_nor_forgotten(
    conversion: tuple[Path, Result],
    text: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, work = tmp_path / "out", tmp_path / "out.training"
    command = ("adapt", conversion[0], "--out", out, "--text", text, *SMALL)
    whole = tmp_path / "whole"
    assert run("adapt", conversion[0], "--out", whole, "--text", text, *SMALL).exit_code == 0
    inner = linearize.adapt.__globals__["_Run"]._update

    def stopped(self: object) -> None:
        if self.state.step == 3:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        inner(self)

    with monkeypatch.context() as patch:
        patch.setattr(linearize.adapt.__globals__["_Run"], "_update", stopped)
        assert run(*command).exit_code == 130
    assert not out.exists() and (work / FILE).is_file()

    result = run(*command)
    assert result.exit_code == 2 and "--resume" in result.output
    result = run(*command, "--resume", "--lr", "0.03")
    assert result.exit_code == 2 and "lr=0.03" in result.output and "lr=0.02" in result.output
    result = run(*command, "--resume")
    assert result.exit_code == 0, result.output
    assert not work.exists()
    found, wanted = (json.loads((one / ADAPTATION).read_text()) for one in (out, whole))
    for name in ("loss", "lr", "gradient_norm", "validated", "nll"):
        assert found["curves"][name] == wanted["curves"][name]
    assert torch.equal(logits(out), logits(whole))

    result = run(*command, "--resume")
    assert result.exit_code == 0 and "complete" in result.output
    result = run(*command, "--resume", "--seed", "1")
    assert result.exit_code == 2 and "seed=42" in result.output
    result = run(*command)
    assert result.exit_code == 2 and "not empty" in result.output
    work.mkdir()
    shutil.copy(out / ADAPTATION, work / FILE)  # a damaged checkpoint, and a new start
    assert run(*command, "--overwrite", "--resume").exit_code == 2
    assert run(*command, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}"], "a folder without config.json"),
        (["{base}/nowhere"], "nowhere"),
        (["{base}", "--text", "{text}@0-99"], "31 blocks, 0-30"),
        (["{base}", "--text", "{text}.gone"], "text.txt.gone"),
        (["{base}", "--skip-blocks", "29"], "29 skipped and 2 kept for validation"),
        (["{base}", "--validation-text", "{text}@0"], "2 blocks of 32 tokens"),
        (["{base}", "--block", "2000"], "1000 tokens"),
        (["{base}", "--preset", "huge"], "paper, small"),
        (["{base}", "--distill", "2"], "distill"),
        (["{base}", "--rank", "0"], "no kernel parameter to train"),
        (["{base}", "--teacher", "{base}"], "distill=0"),
        (["{base}", "--teacher", "{empty}", "--distill", "0.5"], "a folder without config.json"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    arguments: list[str], message: str, base: Path, text: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"base": base, "text": text, "empty": tmp_path / "empty"}
    given = [one.format(**names) for one in arguments]
    if "--text" not in given:
        given += ["--text", str(text)]
    result = run("adapt", *SMALL, *given, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_scalars_for_tensorboard(base: Path, text: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    assert run("adapt", base, "--out", out, "--text", text, *SMALL).exit_code == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    curves = json.loads((out / ADAPTATION).read_text())["curves"]
    for tag, name in (
        ("loss", "loss"),
        ("learning_rate", "lr"),
        ("gradient_norm", "gradient_norm"),
    ):
        points = events.Scalars(tag)
        assert [point.step for point in points] == [1, 2, 3, 4]
        assert [point.value for point in points] == pytest.approx(curves[name])
    assert len(events.Scalars("tokens_per_second")) == 4
    nll = events.Scalars("validation_nll")
    assert [point.step for point in nll] == [0, 2, 4]
    assert [point.value for point in nll] == pytest.approx(curves["nll"])
