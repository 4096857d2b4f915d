"""What the choice of exact heads is measured on."""

import pytest
import torch

from linearize.divergence import Samples


@pytest.mark.parametrize(
    ("length", "count", "text", "repeated"),
    [
        (1024, 6, [512] * 4, [1024] * 2),
        (4096, 2, [1024] * 2, [2048]),
        (64, 2, [64] * 2, [64] * 2),
        (65, 1, [65], [64]),
    ],
)
def test_text_is_read_once_and_the_ends_of_blocks_twice(
    length: int, count: int, text: list[int], repeated: list[int]
) -> None:
    blocks = [torch.arange(length) + at * length for at in range(count)]
    samples = Samples.of(blocks)
    assert [len(ids) for ids in samples.text] == text
    assert [len(ids) for ids in samples.repeated] == repeated
    for ids, block in zip(samples.text, blocks, strict=False):
        assert torch.equal(ids, block[: len(ids)])
    for ids, block in zip(samples.repeated, blocks, strict=False):
        first, second = ids.chunk(2)
        assert torch.equal(first, second)
        assert torch.equal(first, block[-len(first) :])
