"""The page: complete, self-contained, well-formed, and graceful about what is missing."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from linearize.convert import ConversionReport
from linearize.plan import Plan
from linearize.report import ReportData, figures, render
from report.synthetic import DIM, conversion, evaluation, layer, sample

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Structure(HTMLParser):
    """Checks that tags close in order; collects the text outside scripts, and the attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> out of order"
        if tag in ("td", "th"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data


def full(**changes: Any) -> str:
    return render(ReportData(conversion(**changes), evaluation(), [sample()]))


def without_groups() -> ConversionReport:
    """Of a kernel that neither groups nor fits."""
    layers = [layer(i, [], fit_mse=[], start=[], curve=[], trainable=0) for i in (1, 2)]
    return conversion(layers=layers, plan=Plan(kernel="oal").model_dump(mode="json"))


@pytest.mark.parametrize(
    "data",
    [
        ReportData(conversion(), evaluation(), [sample()]),
        ReportData(conversion()),
        ReportData(without_groups()),
        ReportData(conversion(base=None), evaluation(softmax_perplexity=None, ratio=None)),
        ReportData(conversion(layers=[layer(1, [], profile=[])])),
        ReportData(conversion(plan=conversion().plan | {"kernel": "of-my-own"})),
        ReportData(conversion(layers=[layer(1, [], state_bytes=0)])),
        ReportData(conversion(layers=[layer(i, []) for i in range(60)], model_layers=60)),
        ReportData(conversion(layers=[layer(1, [], validation_relative=[0.0, 0.0])])),
        ReportData(conversion(layers=[layer(1, [], profile=[[0.0] * DIM, [0.2] * DIM])])),
    ],
)
def test_the_page_is_well_formed_and_needs_no_other_file(data: ReportData) -> None:
    page = render(data)
    structure = Structure(page)
    links = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert all(re.match(r"http://www\.w3\.org/", link) for link in links), links
    for tag, name, value in structure.attributes:
        assert name != "src" and tag != "link", f"{tag} {name}={value}"
        assert "href" not in name or value.startswith("#"), f"{tag} {name}={value}"
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    ids = [value for _, name, value in structure.attributes if name == "id"]
    assert len(ids) == len(set(ids)), "an id is used twice"
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert {a or b for a, b in used} <= set(ids), "a reference leads nowhere"
    assert figures.INK not in page, "a figure has a fixed text colour"
    assert not re.search(r"\b(nan|None|Undefined)\b", structure.text)


def test_what_was_converted_is_said_in_words() -> None:
    text = " ".join(Structure(full()).text.split())
    assert "some/model with OAL attention" in text
    assert "Layers 1–2 of some/model (zero-based; it has layers 0–3) use the kernel oal." in text
    assert "The other 2 keep softmax" in text
    assert "the first 3 and the latest 17 keys a query sees keep their exact softmax weight" in text
    assert "Fitted on text blocks 16–17, 19, measured on block 24" in text
    assert "a text of 54,321 tokens" in text and "24 numbers were fitted in 77 s" in text


def test_perplexity_before_and_after() -> None:
    text = Structure(full()).text
    for number in ("12.346", "10.988", "1.124", "2.5133", "2.3968", "2,046", "test.txt"):
        assert number in text, number


def test_memory_in_words_and_numbers() -> None:
    text = " ".join(Structure(full()).text.split())
    assert "The state costs 2 kB, as much as 10 tokens" in text
    assert "from 11 tokens on the converted model does" in text
    assert "still add 192 bytes a token" in text
    assert "393 kB 199 kB 51 %" in text  # at 1,024 tokens


def test_errors_of_every_layer() -> None:
    text = " ".join(Structure(full()).text.split())
    for row in ("1 2 0.278 0.12 0.432 (head 1) 2.50e-03 3.00e-03 12 1 kB 1.5", "2 2–3 0.278"):
        assert row in text, row


def test_both_continuations_are_shown_escaped() -> None:
    bad = sample(prompt="<script>alert(1)</script>", converted={"text": "</pre>&amp;"})
    page = render(ReportData(conversion(), None, [bad]))
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
    assert "&lt;/pre&gt;&amp;amp;" in page
    assert " a time" in page
    warned = render(ReportData(conversion(), None, [sample(note="all within the window")]))
    assert "all within the window" in warned


def test_every_setting_and_version_is_listed() -> None:
    text = Structure(full()).text
    for name, value in {**conversion().plan, **conversion().versions}.items():
        assert f"{name} {'–' if value is None else value} " in text, name


def test_missing_pieces_are_said_to_be_missing() -> None:
    text = Structure(render(ReportData(without_groups()))).text
    assert "Not evaluated yet" in text and "No pair is stored yet" in text
    assert "This kernel does not group dimensions" in text
    assert "mean square error on the positions" not in text


def test_group_table_and_profile_data() -> None:
    page = full()
    cells = re.findall(r'data-at="(\d),(\d)"[^>]*>(\d)<small>([^<]+)</small>', page)
    expected = [("0", "0", "2", "7·1"), ("0", "1", "2", "7·1"), ("1", "0", "2", "7·1")]
    assert cells == [*expected, ("1", "1", "3", "5·2·1")]
    block = re.search(r'id="profiles">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    stored = json.loads(block.group(1))
    assert [row["layer"] for row in stored] == [1, 2]
    assert stored[1]["heads"][1]["groups"] == conversion().layers[1].groups[1]


def test_the_page_is_the_same_every_time() -> None:
    assert full() == full()


def test_the_template_belongs_to_the_package() -> None:
    folder = Path(figures.__file__).parent
    assert (folder / "page.html.j2").is_file()


def test_a_page_of_the_real_size_is_small() -> None:
    head = [[list(range(62)), [62], [63]]] * 9
    profile = [[0.001 * 1.1**r for r in range(64)]] * 9
    nine = dataclasses.replace(layer(0, head), profile=profile, validation_relative=[0.1] * 9)
    layers = [dataclasses.replace(nine, layer=i) for i in range(24)]
    assert len(render(ReportData(conversion(layers=layers, model_layers=30)))) < 1_500_000
