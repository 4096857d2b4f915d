"""`linearize compare`: what evaluations stored, side by side."""

import json
from pathlib import Path


def test_a_folder_beside_its_reference(run, converted: Path, text: Path, tmp_path: Path) -> None:
    refused = run("compare", converted)
    assert refused.exit_code == 2 and "no perplexity in it" in refused.stderr
    run("eval", converted, "--text", text, "--block", 50, "--blocks", 2)
    (converted / "model.safetensors").unlink()  # nothing of the model is read
    chart, stored = tmp_path / "compare.svg", tmp_path / "compare.json"
    result = run("compare", converted, "--context", 100, "--out", chart, "--json", stored)
    assert result.exit_code == 0, result.output
    found = json.loads(stored.read_text())
    assert {row["name"] for row in found["rows"]} == {converted.name, "softmax"}
    evaluation = json.loads((converted / "evaluation.json").read_text())
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name[converted.name]["perplexity"] == evaluation["perplexity"]
    assert by_name["softmax"]["perplexity"] == evaluation["softmax_perplexity"]
    assert chart.read_text().startswith("<svg")
