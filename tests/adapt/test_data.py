"""Ranges of files, the division into blocks and their order, and the learning rate along a run."""

import math
from pathlib import Path

import pytest
import torch

import tiny
from linearize import AdaptSettings
from linearize.adapt import Part, read_parts
from linearize.adapt.data import block_order, divide_blocks
from linearize.errors import TextError

TOKENIZER = tiny.tokenizer()  # one token a character


def write(folder: Path, name: str, characters: int) -> Path:
    path = folder / name
    path.write_text("".join(chr(97 + i % 26) for i in range(characters)), encoding="utf-8")
    return path


def test_a_range_is_what_it_says(tmp_path: Path) -> None:
    path = write(tmp_path, "text.txt", 105)
    everything = Part(str(path)).tokens(TOKENIZER, 10)
    assert len(everything) == 105
    assert torch.equal(Part(f"{path}@2-4").tokens(TOKENIZER, 10), everything[20:50])
    assert torch.equal(Part(f"{path}@9").tokens(TOKENIZER, 10), everything[90:100])
    odd = write(tmp_path, "odd@1-2", 30)  # a file of this very name
    assert len(Part(str(odd)).tokens(TOKENIZER, 10)) == 30


@pytest.mark.parametrize("given", ["8-10", "10", "10-12", "4-3"])
def test_a_range_outside_says_how_many_blocks_there_are(given: str, tmp_path: Path) -> None:
    path = write(tmp_path, "text.txt", 105)
    with pytest.raises(TextError, match="105 tokens: 10 blocks, 0-9"):
        Part(f"{path}@{given}").tokens(TOKENIZER, 10)
    with pytest.raises(TextError, match="not one whole block"):
        Part(f"{path}@{given}").tokens(TOKENIZER, 106)


def test_no_block_spans_two_texts(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a.txt", 25), write(tmp_path, "b.txt", 39)
    parts = [Part(str(first)), Part(f"{second}@1-2")]
    tokens = read_parts(parts, TOKENIZER, unit=12, block=8)
    a, b = (Part(str(path)).tokens(TOKENIZER, 8) for path in (first, second))
    assert torch.equal(tokens, torch.cat([a[:24], b[12:36]]))
    with pytest.raises(TextError, match=r"blocks of 26 tokens from .*a.txt; found 25 tokens"):
        read_parts(parts, TOKENIZER, unit=12, block=26)


def test_training_and_validation_share_no_block() -> None:
    tokens = torch.arange(107)
    settings = AdaptSettings(block=10, skip_blocks=2, validation_blocks=3)
    train, kept = divide_blocks(tokens, None, settings)
    assert [int(block[0]) for block in train] == [20, 30, 40, 50, 60]
    assert [int(block[0]) for block in kept] == [70, 80, 90]
    train, kept = divide_blocks(tokens, 1000 + torch.arange(55), settings)
    assert [int(block[0]) for block in train] == [20, 30, 40, 50, 60, 70, 80, 90]
    assert [int(block[0]) for block in kept] == [1000, 1010, 1020]


def test_every_epoch_is_a_permutation_of_its_own_and_order_depends_on_the_seed_alone() -> None:
    order = block_order(7, 42, 20)
    assert order == block_order(7, 42, 20) == block_order(7, 42, 30)[:20]
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7))
    assert order[:7] != order[7:14]
    assert order != block_order(7, 43, 20)


def test_the_learning_rate_rises_in_a_line_and_falls_as_a_cosine() -> None:
    settings = AdaptSettings(steps=40, warmup=0.1, transfer_steps=10)
    transfer = [settings.factor(update) for update in range(10)]
    joint = [settings.factor(update) for update in range(10, 50)]
    assert transfer[0] == 1.0 and transfer == sorted(transfer, reverse=True)
    assert joint[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert joint[4] == 1.0
    for update in (10, 22, 39):
        assert joint[update] == pytest.approx(0.5 * (1 + math.cos(math.pi * (update - 4) / 36)))
    assert joint[22] == pytest.approx(0.5)  # half way between 4 and 40


def test_presets_are_the_protocols() -> None:
    """SPEC section 6, and what fits two cores."""
    paper, small = AdaptSettings.preset("paper"), AdaptSettings.preset("small", rank=4)
    assert paper == AdaptSettings()
    wanted = {
        "steps": 512,
        "block": 4096,
        "batch": 1,
        "lr": 5e-4,
        "weight_decay": 0.01,
        "clip": 1.0,
        "warmup": 0.05,
        "rank": 8,
        "alpha": 16,
        "dropout": 0.05,
        "eval_every": 128,
        "validation_blocks": 32,
        "seed": 42,
        "transfer_steps": 0,
        "distill": 0.0,
    }
    assert {name: getattr(paper, name) for name in wanted} == wanted
    changed = {name for name in wanted if getattr(small, name) != wanted[name]}
    assert changed == {"steps", "block", "eval_every", "validation_blocks", "rank"}
    assert (small.steps, small.block, small.eval_every) == (128, 2048, 32)
