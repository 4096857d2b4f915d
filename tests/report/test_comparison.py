"""Folders side by side: what is read, what is refused, and which are beaten by no other."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from linearize.checkpoint import REPORT
from linearize.errors import CheckpointError, PlanError
from linearize.report import EVALUATION
from linearize.report.comparison import compare
from linearize.report.comparison_figure import comparison_chart
from report.synthetic import conversion, evaluation, layer

GROUPS = [[[0, 1, 2, 3, 4, 5, 6], [7]]] * 2


def folder(path: Path, state: int, perplexity: float, **measured: Any) -> Path:
    """A converted folder with layers 1 and 2 of 4, ``state`` bytes each, and its perplexity."""
    path.mkdir(parents=True)
    layers = [layer(index, GROUPS, state_bytes=state) for index in (1, 2)]
    (path / REPORT).write_text(json.dumps(conversion(layers=layers).as_dict()))
    found = evaluation(perplexity=perplexity, softmax_perplexity=None, ratio=None) | measured
    (path / EVALUATION).write_text(json.dumps(found))
    return path


def test_rows_ascend_in_memory_and_the_unbeaten_are_marked(tmp_path: Path) -> None:
    small = folder(tmp_path / "small", 100, 40.0)
    worse = folder(tmp_path / "worse", 200, 50.0)
    large = folder(tmp_path / "large", 4000, 20.0, softmax_perplexity=10.0, ratio=2.0)
    result = compare([large, worse, small], tokens=10)
    # retained layers: 2 of 4 at 96 bytes a token and layer, so 1,920 bytes at 10 tokens
    seen = [(row.name, row.memory, row.state, row.best) for row in result.rows]
    assert seen == [
        ("small", 2120, 200, True),
        ("worse", 2320, 400, False),
        ("softmax", 3840, 0, True),
        ("large", 9920, 8000, False),
    ]
    assert [row.ratio for row in result.rows] == [None, None, 1.0, 2.0]
    assert result.rows[0].settings == "oal, 2 of 4 layers, 3 sinks, window 17, saturation 99"
    assert (result.text, result.block, result.blocks) == (["test.txt"], 1024, 2)


def test_equals_beat_neither(tmp_path: Path) -> None:
    both = [folder(tmp_path / name, 100, 40.0) for name in "ab"]
    assert [row.best for row in compare(both).rows] == [True, True]


def test_folders_of_one_name_keep_their_paths(tmp_path: Path) -> None:
    both = [folder(tmp_path / name / "model", 100, 40.0) for name in "ab"]
    assert [row.name for row in compare(both).rows] == [str(path) for path in both]


def test_parts_recall_and_tasks_come_along(tmp_path: Path) -> None:
    model, softmax = {"recalled": {"value": 7.0}}, {"recalled": {"value": 3.0}}
    task = {"title": "PIQA", "model": {"accuracy": 0.6}, "softmax": {"accuracy": 0.7}, "parts": {}}
    one = folder(
        tmp_path / "one",
        100,
        40.0,
        softmax_perplexity=10.0,
        parts={"exact keys only (x)": {"value": 60.0}},
        recall={"model": model, "softmax": softmax},
        tasks={"piqa": task},
    )
    row, reference = compare([one]).rows
    assert (row.parts, row.recalled, row.accuracies) == (
        {"exact keys only (x)": 60.0},
        7.0,
        {"PIQA": 0.6},
    )
    assert (reference.name, reference.recalled, reference.accuracies) == (
        "softmax",
        3.0,
        {"PIQA": 0.7},
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"block": 2048}, "2 blocks of 2,048 tokens of test.txt"),
        ({"blocks": 9}, "9 blocks of 1,024 tokens"),
        ({"text": ["else/other.txt"]}, "of other.txt"),
    ],
)
def test_other_blocks_are_refused(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    one = folder(tmp_path / "one", 100, 40.0)
    other = folder(tmp_path / "other", 100, 40.0, **change)
    with pytest.raises(PlanError, match=found):
        compare([one, other])


def test_the_same_file_at_another_place_is_the_same_text(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", 100, 40.0)
    other = folder(tmp_path / "other", 100, 30.0, text=["somewhere/test.txt"])
    assert len(compare([one, other]).rows) == 2


def test_missing_things_are_named(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", 100, 40.0)
    (one / EVALUATION).unlink()
    with pytest.raises(PlanError, match="no perplexity in it"):
        compare([one])
    with pytest.raises(CheckpointError, match="no such folder"):
        compare([tmp_path / "nothing"])
    with pytest.raises(PlanError, match="no folder"):
        compare([])


def test_the_figure_names_every_model(tmp_path: Path) -> None:
    made = [folder(tmp_path / f"model-{at}", 10 ** (at + 2), 40.0 / (at + 1)) for at in range(3)]
    drawn = comparison_chart(compare(made))
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg")
    assert all(f"model-{at}" in drawn for at in range(3))
