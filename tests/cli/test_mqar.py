"""`linearize probe mqar`: results in a table, as JSON and as figures; points are kept and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import linearize
from cli.conftest import Run

TINY = (
    *("probe", "mqar", "--lengths", "16", "--widths", "8", "--lrs", "0.01", "--seeds", "0,1"),
    *("--vocabulary", "16", "--examples", "32", "--epochs", "1", "--batch", "16"),
    *("--overlap", "8", "--feature-dim", "4"),
)


def test_table_json_figures_and_points(run: Run, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "mqar.json"
    options = ("--mixers", "softmax,rebased-outer", "--ladder", "--out", out, "--json", file)
    result = run(*TINY, *options)
    assert result.exit_code == 0, result.output
    stored = json.loads(file.read_text(encoding="utf-8"))
    mixers = ["softmax", *(f"rebased-outer{rung}" for rung in ("-square", "-norm", "-affine", ""))]
    assert [cell["mixer"] for cell in stored["cells"]] == mixers
    assert len(stored["rows"]) == len(list((out / "parts").iterdir())) == 10
    for cell in stored["cells"]:
        tests = [row["test"] for row in stored["rows"] if row["mixer"] == cell["mixer"]]
        assert cell["accuracy"] == pytest.approx(sum(tests) / 2)
        assert f"{cell['accuracy']:.3f}" in result.stdout
    assert stored["settings"]["vocabulary"] == 16
    assert stored["settings"]["recipe"]["batch"] == 16
    assert "16 tokens, width 8: 4 pairs, 4 queries, vocabulary 16" in result.stdout
    assert {path.name for path in out.glob("*.svg")} == {
        *("accuracy.svg", "widths.svg", "learning.svg", "overlap.svg")
    }
    assert json.loads((out / "mqar.json").read_text(encoding="utf-8")) == stored


def test_a_sweep_is_taken_up_and_widened(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mqar.json"
    first = run(*TINY, "--mixers", "none", "--json", file)
    assert first.exit_code == 0, first.output
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    again = run(*TINY, "--mixers", "none", "--json", file)
    assert again.exit_code == 2 and "--resume" in again.stderr
    wider = run(*TINY, "--mixers", "none,based", "--json", file, "--resume")
    assert wider.exit_code == 0, wider.output
    assert "2/4 taken up" in wider.stderr
    assert [
        row
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
        if row["mixer"] == "none"
    ] == rows
    added = run(*TINY, "--mixers", "oal", "--lrs", "0.02", "--json", file, "--resume")
    assert added.exit_code == 0, added.output
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert {(row["mixer"], row["lr"]) for row in stored["rows"]} == {
        *(("oal", 0.02), ("none", 0.01), ("based", 0.01))
    }
    assert len(stored["rows"]) == 6 and len(stored["cells"]) == 3
    other = run(*TINY, "--mixers", "none", "--pairs", "2", "--json", file, "--resume")
    assert other.exit_code == 2 and "pairs=2" in other.stderr


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--lengths", "15"), ("length 15", "an even length")),
        (("--pairs", "5"), ("2·pairs + 2·queries ≤ length, and 20 > 16",)),
        (("--vocabulary", "8"), ("pairs ≤ vocabulary/2 - 1, and 4 > 3",)),
        (("--mixers", "softmax,nosuch"), ("mixer 'nosuch'", "rebased-outer-square")),
        (("--preset", "huge"), ("preset 'huge'", "small, paper")),
        (("--fill", "noise"), ("fill in zeros, random",)),
        (("--lengths", "16,x"), ("--lengths 16,x", "no list of integers")),
        (("--lrs", "fast"), ("--lrs fast", "no list of numbers")),
        (("--heads", "9"), ("9 heads of based", "width 8")),
        (("--batch", "33"), ("fewer examples than a batch",)),
    ],
)
def test_bad_input_is_refused_before_work(
    run: Run, tmp_path: Path, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    kept = out / "parts" / "kept.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}", encoding="utf-8")
    result = run(*TINY, "--mixers", "based", *options, "--out", out, "--overwrite")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr, result.stderr
    assert [path for path in out.rglob("*") if path.is_file()] == [kept]


@pytest.mark.slow  # every process imports torch anew
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interruption_keeps_finished_points_and_ends_every_process(
    tmp_path: Path, jobs: str
) -> None:
    out = tmp_path / "out"
    source = str(Path(linearize.__file__).parents[1])
    arguments = [*TINY, "--mixers", "none,based", "--epochs", "100", "--jobs", jobs, "--out", out]
    process = subprocess.Popen(
        [sys.executable, "-m", "linearize", *map(str, arguments), "--seeds", "0,1,2,3,4,5,6,7"],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(out.glob("parts/*.json")) and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors and "Traceback" not in errors
    kept = list(out.glob("parts/*"))
    assert 0 < len(kept) < 16
    for file in kept:
        assert json.loads(file.read_text(encoding="utf-8"))["value"]["steps"] == 200
    with pytest.raises(ProcessLookupError):
        for _ in range(200):  # none of the group is left
            os.killpg(process.pid, 0)
            time.sleep(0.05)
