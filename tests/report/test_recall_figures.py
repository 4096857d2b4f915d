"""The figures of a recall sweep show the numbers they are given."""

import dataclasses
import re
import xml.etree.ElementTree as ElementTree

from linearize.probe.catalogue import mixer_title
from linearize.probe.summary import cells
from linearize.probe.sweep import Row
from linearize.report.recall_figures import recall_figures

ROW = Row(
    mixer="softmax",
    length=64,
    width=32,
    lr=1e-3,
    seed=0,
    pairs=16,
    queries=16,
    chance=1 / 128,
    parameters=1000,
    state_numbers=None,
    ended="epochs",
    steps=200,
    validation=0.5,
    test=0.123,
    iou=0.4,
    soft_iou=0.321,
    true_weight=0.2,
    checks=[[100, 4.0, 0.3], [200, 3.0, 0.5]],
    seconds=1.0,
    core_seconds=1.0,
)


def rows() -> list[Row]:
    """Three mixers at two lengths and two widths; RWKV has no attention and one run is missing."""
    found = []
    for at, mixer in enumerate(("softmax", "rebased-outer-square", "rwkv")):
        attention = {} if mixer != "rwkv" else {"iou": None, "soft_iou": None, "true_weight": None}
        for length in (64, 128):
            for width in (32, 64):
                if (mixer, length, width) != ("rwkv", 128, 64):
                    size = {"length": length, "width": width, "test": 0.1 * at + length / 1000}
                    found.append(dataclasses.replace(ROW, mixer=mixer, **size, **attention))
    return found


def test_every_figure_is_valid_svg_that_stands_alone() -> None:
    figures = recall_figures(rows(), cells(rows()))
    assert set(figures) == {"accuracy", "widths", "learning", "overlap"}
    for svg in figures.values():
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg") and root.attrib["viewBox"]
        assert "<image" not in svg and "metadata" not in svg
        assert mixer_title("rebased-outer-square") in svg


def test_heat_maps_hold_every_number_and_leave_gaps_empty() -> None:
    figures = recall_figures(rows(), cells(rows()))
    shown = re.findall(r">(0\.\d{3})<", figures["accuracy"])
    assert sorted(shown) == sorted(f"{row.test:.3f}" for row in rows())
    overlap = re.findall(r">(0\.\d{3})<", figures["overlap"])
    assert overlap == ["0.321"] * 8  # two mixers with attention
    assert mixer_title("rwkv") not in figures["overlap"]


def test_curves_have_a_line_for_every_run() -> None:
    figures = recall_figures(rows(), cells(rows()))
    assert figures["learning"].count("stroke-opacity: 0.8") == len(rows())


def test_without_rows_and_without_attention() -> None:
    assert recall_figures([], []) == {}
    only = [row for row in rows() if row.mixer == "rwkv"]
    assert set(recall_figures(only, cells(only))) == {"accuracy", "widths", "learning"}
