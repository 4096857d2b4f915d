"""The figures show the numbers they are given."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from linearize.report import Memory, figures
from linearize.report.drawing import GROUP_COLOURS, byte_text
from report.synthetic import DIM, conversion, layer

BAR = re.compile(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+Z")


def bars(path: str) -> list[tuple[float, float]]:
    """(left edge, height) of every bar of a path."""
    return [(float(x), float(low) - float(high)) for x, low, _, high in BAR.findall(path)]


def test_every_figure_is_valid_svg() -> None:
    report = conversion()
    profiles = figures.profiles(report)
    fitting = figures.fitting_chart(report)
    assert profiles is not None and fitting is not None
    memory = figures.memory_chart(Memory.of(report))
    for svg in (figures.error_chart(report), fitting, memory, profiles.svg):
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg") and root.attrib["viewBox"]
        assert "currentColor" in svg and "metadata" not in svg and "DejaVu" not in svg


def test_the_profile_has_one_bar_a_dimension_sorted_and_in_its_group() -> None:
    report = conversion()
    made = figures.profiles(report)
    assert made is not None
    for at, one in enumerate(report.layers):
        for head, groups in enumerate(one.groups):
            paths = made.paths[at][head]
            assert [len(bars(path)) for path in paths] == [len(members) for members in groups]
            everything = sorted(bar for path in paths for bar in bars(path))
            heights = [height for _, height in everything]
            assert len(heights) == DIM and heights == sorted(heights)
            # the axis is logarithmic and the profile doubles from one dimension to the next
            steps = [b - a for a, b in itertools.pairwise(heights)]
            assert steps == pytest.approx([steps[0]] * (DIM - 1), abs=0.25)


def test_the_head_with_most_groups_is_shown_first() -> None:
    made = figures.profiles(conversion())
    assert made is not None and (made.layer, made.head) == (1, 1)
    shown = re.findall(r'<path class="bars" style="fill:(#\w+)" d="([^"]*)"', made.svg)
    assert [path for _, path in shown] == made.paths[1][1]
    assert [colour for colour, _ in shown] == list(GROUP_COLOURS[:3])


def test_without_groups_a_profile_has_one_colour() -> None:
    made = figures.profiles(conversion(layers=[layer(1, [])]))
    assert made is not None
    assert [len(paths) for paths in made.paths[0]] == [1, 1]
    assert len(bars(made.paths[0][0][0])) == DIM


def test_there_is_no_figure_of_what_does_not_exist() -> None:
    assert figures.profiles(conversion(layers=[layer(1, [], profile=[])])) is None
    assert figures.fitting_chart(conversion(layers=[layer(1, [], fit_mse=[])])) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 bytes"), (999, "999 bytes"), (1536, "1.54 kB"), (999_999, "1000 kB")),
        *((42.7e6, "42.7 MB"), (377_487_360, "377 MB"), (6.04e9, "6.04 GB"), (2.5e13, "25 TB")),
    ],
)
def test_bytes_in_words(count: float, text: str) -> None:
    assert byte_text(count) == text
