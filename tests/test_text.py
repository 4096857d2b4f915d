"""Texts are read, tokenized without added tokens, and divided as the plan says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from linearize import Plan
from linearize.errors import TextError
from linearize.text import default_text, divide, read, split_blocks, tokenize

WORDS = "the quick brown fox"


def test_strings_and_paths_give_the_same_ids(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    file = tmp_path / "text.txt"
    file.write_text(WORDS, encoding="utf-8")
    wanted = [2 + ord(c) - 32 for c in WORDS]
    for source in (WORDS, file, str(file), [WORDS], [file], torch.tensor(wanted)):
        ids = tokenize(source, tokenizer)
        assert ids.dtype == torch.long
        assert ids.tolist() == wanted


def test_no_text_means_the_default_text() -> None:
    tokenizer = tiny.tokenizer()
    assert torch.equal(tokenize(None, tokenizer), tokenize(default_text(), tokenizer))


def test_several_texts_are_joined_by_two_newlines(tmp_path: Path) -> None:
    file = tmp_path / "b.txt"
    file.write_text("b")
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(tokenize(["a", file, "c"], tokenizer)).replace(" ", "") == "a\n\nb\n\nc"
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"text": "x"}\n\n{"text": "y", "label": 1}\n')
    assert read(lines) == "x\n\ny"


@pytest.mark.parametrize("bos", [False, True])
def test_no_token_is_added(bos: bool) -> None:
    tokenizer = tiny.tokenizer(bos=bos)
    assert (tokenizer("ab")["input_ids"][0] == 1) == bos  # what it does by itself
    assert tokenize("ab", tokenizer).tolist() == [67, 68]


def test_token_ids_need_no_tokenizer() -> None:
    ids = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32)
    assert tokenize(ids, None).tolist() == [3, 4, 5, 6]
    with pytest.raises(TextError, match="without tokenizer"):
        tokenize("text", None)


@pytest.mark.parametrize("source", [torch.rand(4), torch.zeros(1, 2, 3, dtype=torch.long)])
def test_tensors_that_are_no_token_ids_are_refused(source: torch.Tensor) -> None:
    with pytest.raises(TextError, match="token ids"):
        tokenize(source, None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no" / "such.txt"
    with pytest.raises(TextError) as raised:
        tokenize(path, tiny.tokenizer())
    assert str(path) in str(raised.value)
    with pytest.raises(TextError, match=str(tmp_path)):
        read(tmp_path)  # a folder


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.txt"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TextError, match=r"binary\.txt"):
        read(path)


@pytest.mark.parametrize(
    ("line", "mentions"),
    [
        ('{"text": ', "line 2"),
        ('{"txt": "a"}', "'text'"),
        ("[1]", "'text'"),
        ('{"text": 3}', "line 2"),
    ],
)
def test_a_malformed_json_line_is_named(tmp_path: Path, line: str, mentions: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(TextError) as raised:
        read(path)
    assert str(path) in str(raised.value)
    assert mentions in str(raised.value)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=3))
def test_any_text_survives_json_lines(tmp_path_factory: Any, texts: list[str]) -> None:
    r"""Also the separators (\u2028, \x85, \x1c …) that JSON may hold bare inside a line."""
    path = tmp_path_factory.mktemp("lines") / "texts.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read(path) == "\n\n".join(texts)


@pytest.mark.parametrize("character", ["a", "é", "語", "🦊", "/", "\0"])
@pytest.mark.parametrize("length", [1, 90, 255, 256, 5000])
def test_a_string_of_any_length_is_a_text(character: str, length: int) -> None:
    """Looking whether it names a file must not fail on what no file system takes as a name."""
    text = "x" + character * length
    assert read(text) == text


def test_the_default_text_is_english_and_needs_no_network() -> None:
    text = default_text()
    assert len(text) > 400_000
    assert text == default_text()
    letters = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in text)
    assert letters > 0.7 * len(text)
    assert text.lower().count(" the ") > 1000


@given(total=st.integers(0, 60), length=st.integers(1, 9))
def test_blocks_do_not_overlap_and_the_rest_is_dropped(total: int, length: int) -> None:
    tokens = torch.arange(total)
    count = total // length
    if not count:
        with pytest.raises(TextError):
            split_blocks(tokens, length)
        return
    blocks = split_blocks(tokens, length)
    assert [block.tolist() for block in blocks] == [
        list(range(i * length, (i + 1) * length)) for i in range(count)
    ]


def test_too_short_a_text_says_how_much_is_missing() -> None:
    with pytest.raises(TextError, match="3 blocks of 10 tokens; found 25 tokens, 5 too few"):
        split_blocks(torch.arange(25), 10, need=3)


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {"block": 10, "prompts": 4, "prompt_length": 5}
    return Plan(**settings | changes)


def test_the_papers_division() -> None:
    """Skip blocks 0-15, fit 16-23, validate 24-25; prompts from the text behind."""
    division = divide(torch.arange(560), plan())
    assert division.fit_at == list(range(16, 24))
    assert division.validation_at == [24, 25]
    assert [b.tolist() for b in division.fit] == [
        list(range(10 * i, 10 * i + 10)) for i in range(16, 24)
    ]
    assert [int(b[0]) for b in division.validation] == [240, 250]
    starts = [int(p[0]) for p in division.prompts]
    assert starts == [260, 358, 457, 555]  # evenly from 260 to the last possible, 555
    assert all(
        p.tolist() == list(range(s, s + 5)) for p, s in zip(division.prompts, starts, strict=True)
    )


@pytest.mark.parametrize(
    ("blocks", "fit_at", "validation_at"),
    [
        (26, list(range(16, 24)), [24, 25]),
        (25, list(range(15, 23)), [23, 24]),  # skips one block fewer
        (10, list(range(8)), [8, 9]),  # skips nothing
        (7, list(range(6)), [6]),  # a fifth validates
        (2, [0], [1]),
    ],
)
def test_short_texts_give_up_skipping_first_then_fitting(
    blocks: int, fit_at: list[int], validation_at: list[int]
) -> None:
    division = divide(torch.arange(blocks * 10 + 3), plan())
    assert division.fit_at == fit_at
    assert division.validation_at == validation_at
    assert len(division.prompts) == 4


def test_prompts_come_from_the_fitting_blocks_if_nothing_is_left() -> None:
    division = divide(torch.arange(260), plan())
    tokens = {int(t) for prompt in division.prompts for t in prompt}
    assert tokens <= set(range(160, 240))
    assert [int(p[0]) for p in division.prompts] == [160, 185, 210, 235]


def test_fit_validation_and_prompts_never_share_a_token() -> None:
    division = divide(torch.arange(700), plan())
    fit, validation, prompts = (
        {int(t) for part in parts for t in part}
        for parts in (division.fit, division.validation, division.prompts)
    )
    assert not fit & validation
    assert not prompts & (fit | validation)
    assert min(fit | validation | prompts) >= 160  # held-out text stays unseen


def test_one_block_is_too_little() -> None:
    with pytest.raises(TextError, match="2 blocks of 10 tokens"):
        divide(torch.arange(19), plan())


def test_one_prompt_and_prompts_longer_than_the_text() -> None:
    assert [p.tolist() for p in divide(torch.arange(21), plan(prompts=1)).prompts] == [
        [0, 1, 2, 3, 4]
    ]
    division = divide(torch.arange(20), plan(prompt_length=50))
    assert [p.tolist() for p in division.prompts] == [list(range(10))] * 4
