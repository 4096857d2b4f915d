"""The text of an adaptation: ranges of files, blocks to train and to validate on, and their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from linearize.adapt.settings import AdaptSettings
from linearize.errors import TextError
from linearize.text import split_blocks, tokenize

__all__ = ["Part", "block_order", "divide_blocks", "read_parts"]

RANGE = re.compile(r"(?P<path>.+)@(?P<first>\d+)(?:-(?P<last>\d+))?")


class Part:
    """A file, or a range of its blocks, written ``FILE``, ``FILE@A-B`` (inclusive) or ``FILE@A``.

    Attributes:
        text: as it was written. path: the file. first, last: block numbers; ``None`` for all.
    """

    def __init__(self, text: str) -> None:
        self.text, self.path = text, Path(text)
        self.first: int | None = None
        self.last: int | None = None
        match = None if self.path.exists() else RANGE.fullmatch(text)
        if match:
            self.path = Path(match["path"])
            self.first = int(match["first"])
            self.last = int(match["last"] or match["first"])

    def tokens(self, tokenizer: PreTrainedTokenizerBase | None, unit: int) -> Tensor:
        """The token ids ``[n]`` of the range, in blocks of ``unit`` tokens of the whole file.

        Raises:
            TextError: the file cannot be read, or the range is not inside it.
        """
        tokens = tokenize(self.path, tokenizer)
        if self.first is None or self.last is None:
            return tokens
        count = len(tokens) // unit
        if not self.first <= self.last < count:
            raise TextError(
                f"blocks {self.first}-{self.last} of {unit} tokens of {self.path}",
                f"{len(tokens)} tokens: "
                + (f"{count} blocks, 0-{count - 1}" if count else "not one whole block"),
                "Choose a range inside, or another --unit.",
            )
        return tokens[self.first * unit : (self.last + 1) * unit]


def read_parts(
    parts: Sequence[Part], tokenizer: PreTrainedTokenizerBase | None, *, unit: int, block: int
) -> Tensor:
    """Token ids of several parts, each cut to whole training blocks, so that no block spans two.

    Raises:
        TextError: see :meth:`Part.tokens`; or a part is shorter than one block.
    """
    found = []
    for part in parts:
        tokens = part.tokens(tokenizer, unit)
        if len(tokens) < block:
            raise TextError(
                f"blocks of {block} tokens from {part.text}",
                f"{len(tokens)} tokens",
                "Give a longer text or a smaller --block.",
            )
        found.append(tokens[: len(tokens) // block * block])
    return torch.cat(found)


def divide_blocks(
    tokens: Tensor, validation: Tensor | None, settings: AdaptSettings
) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks ``[block]`` to train on and to validate on.

    Without a validation text the last blocks of the text are kept for it.

    Raises:
        TextError: there are fewer blocks than the settings ask for.
    """
    blocks = split_blocks(tokens, settings.block)
    wanted = settings.validation_blocks
    if validation is not None:
        kept = split_blocks(validation, settings.block, need=wanted)[:wanted]
        train = blocks[settings.skip_blocks :]
    else:
        train = blocks[settings.skip_blocks : max(0, len(blocks) - wanted)]
        kept = blocks[len(blocks) - wanted :]
    if not train:
        held = "" if validation is not None else f" and {wanted} kept for validation"
        raise TextError(
            f"training blocks of {settings.block} tokens beside {settings.skip_blocks} skipped{held}",
            f"{len(blocks)} blocks",
            "Give a longer text, a smaller block, or fewer blocks to skip and to validate on.",
        )
    return train, kept


def block_order(blocks: int, seed: int, length: int) -> list[int]:
    """Block numbers in training order: every epoch a new permutation of all blocks.

    It depends on nothing but the arguments, so every kernel sees the same blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < length:
        order += torch.randperm(blocks, generator=generator).tolist()
    return order[:length]
