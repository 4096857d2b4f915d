"""`linearize report`: a page of what is stored, made without the model."""

import json
from pathlib import Path

from linearize.report import EVALUATION, PAGE, SAMPLES


def test_the_page_follows_what_is_stored(run, converted: Path, text: Path, tmp_path: Path) -> None:
    (converted / "model.safetensors").unlink()  # nothing of the model is read
    result = run("report", converted, "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    page = (converted / PAGE).read_text(encoding="utf-8")
    assert "Not evaluated yet" in page and "No pair is stored yet" in page
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "page": str(converted / PAGE),
        "evaluated": False,
        "samples": 0,
    }


def test_evaluation_and_samples_appear_on_the_page(run, converted: Path, text: Path) -> None:
    evaluated = run("eval", converted, "--text", text, "--block", 50, "--blocks", 2)
    sampled = run("generate", converted, "--prompt", "with", "--max-new-tokens", 4, "--compare")
    out = converted.parent / "page.html"
    made = run("report", converted, "--out", out)
    assert evaluated.exit_code == sampled.exit_code == made.exit_code == 0
    page = out.read_text(encoding="utf-8")
    evaluation = json.loads((converted / EVALUATION).read_text())
    (sample,) = json.loads((converted / SAMPLES).read_text())
    assert f"{evaluation['perplexity']:.3f}" in page
    assert f"{evaluation['softmax_perplexity']:.3f}" in page
    assert f"<i>{sample['prompt']}</i>" in page
    assert not (converted / PAGE).exists()


def test_a_folder_without_conversion_is_refused(run, base: Path, tmp_path: Path) -> None:
    for folder, found in ((base, "no conversion.json in it"), (tmp_path / "x", "no such folder")):
        result = run("report", folder)
        assert result.exit_code == 2
        assert f"asked for a report on {folder}" in result.stderr and found in result.stderr
