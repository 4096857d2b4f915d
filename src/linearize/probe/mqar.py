"""Multi-query associative recall (MQAR): pairs are written down, then some of their keys come back.

After Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", as the
ReBased write-up uses it (SPEC section 8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linearize.errors import PlanError

__all__ = ["FILLER", "FILLS", "IGNORED", "Examples", "RecallTask"]

FILLS = ("zeros", "random")
FILLER = 0  # the token that is neither key nor value
IGNORED = -100  # label of a position that is not asked, as in torch's cross-entropy
SLICE = 1 << 22  # random numbers drawn at a time


class Examples(NamedTuple):
    """Sequences of the task, all ``[n, length]`` of integers.

    Attributes:
        tokens: what the model reads.
        labels: at a query the value to answer with, elsewhere ``IGNORED``.
        sources: at a query the position of that value, elsewhere -1.
    """

    tokens: Tensor
    labels: Tensor
    sources: Tensor

    def part(self, rows: slice | Tensor) -> Examples:
        """Some of the examples."""
        return Examples(*(tensor[rows] for tensor in self))

    def split(self, size: int) -> Iterator[Examples]:
        """All of them, ``size`` at a time."""
        for start in range(0, len(self.tokens), size):
            yield self.part(slice(start, start + size))

    def to(self, device: str | torch.device) -> Examples:
        """The same on another device."""
        return Examples(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True)
class RecallTask:
    """``k₁ v₁ … k_P v_P`` and then ``length - 2P`` tokens with queries among fillers.

    Keys are ``1 … vocabulary/2 - 1``, values ``vocabulary/2 … vocabulary - 1``, both without
    replacement. The part after the pairs has slots of two tokens; a query takes the first token of
    slot g with probability proportional to ``(g + 1)^(power - 1)``, without replacement, and its
    value is to be predicted there. Up to ``pairs`` queries ask for different pairs; more ask for
    every pair once before any pair again.

    Args:
        length: tokens of a sequence, even.
        pairs: P, how many pairs are written.
        queries: how many keys come back.
        vocabulary: number of tokens, key and value halves together.
        power: a of the power law of the slots; 1 spreads queries evenly.
        fill: what else stands after the pairs: ``"zeros"``, or ``"random"`` tokens other than the
            keys of the example, so that no distractor contradicts a pair.

    Raises:
        PlanError: no such sequence exists; the message says which inequality fails.
    """

    length: int
    pairs: int
    queries: int
    vocabulary: int
    power: float = 0.01
    fill: str = "zeros"

    def __post_init__(self) -> None:
        self._require(self.length % 2 == 0, "an even length", "Add or remove one token.")
        self._require(
            self.pairs >= 1 and self.queries >= 1,
            "pairs ≥ 1 and queries ≥ 1",
            "Write and ask for at least one pair.",
        )
        self._require(
            2 * (self.pairs + self.queries) <= self.length,
            f"2·pairs + 2·queries ≤ length, and {2 * (self.pairs + self.queries)} > {self.length}",
            "Take fewer pairs or queries, or a longer sequence.",
        )
        self._require(
            self.pairs <= self.vocabulary // 2 - 1,
            f"pairs ≤ vocabulary/2 - 1, and {self.pairs} > {self.vocabulary // 2 - 1}",
            "Take fewer pairs or a larger vocabulary.",
        )
        self._require(self.power > 0, "power > 0", "Published is 0.01; 1 is uniform.")
        self._require(self.fill in FILLS, f"fill in {', '.join(FILLS)}", "Choose one of these.")

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values of the vocabulary."""
        return 1 / (self.vocabulary - self.vocabulary // 2)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        """``count`` examples; the same generator state gives the same ones."""
        width = max(self.vocabulary, self.length, self._rounds * self.pairs)
        step = max(1, SLICE // width)
        sizes = [min(step, count - start) for start in range(0, count, step)] or [0]
        parts = [self._draw(size, generator) for size in sizes]
        return Examples(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @property
    def _rounds(self) -> int:
        """How often the most asked pair is asked for."""
        return math.ceil(self.queries / self.pairs)

    def _draw(self, count: int, generator: torch.Generator) -> Examples:
        half, written = self.vocabulary // 2, 2 * self.pairs
        keys = 1 + _choose(half - 1, self.pairs, count, generator)
        values = half + _choose(self.vocabulary - half, self.pairs, count, generator)

        slots = torch.arange(1, (self.length - written) // 2 + 1, dtype=torch.float64)
        uniform = torch.rand(count, len(slots), generator=generator, dtype=torch.float64)
        # The largest of log p + Gumbel noise are draws one by one without replacement.
        gumbel = -(-uniform.clamp(min=1e-300).log()).log()
        drawn = ((self.power - 1) * slots.log() + gumbel).topk(self.queries, dim=1).indices
        at = written + 2 * drawn
        order = torch.rand(count, self._rounds, self.pairs, generator=generator).argsort(-1)
        asked = order.flatten(1)[:, : self.queries]

        tokens = torch.full((count, self.length), FILLER)
        tokens[:, :written] = torch.stack([keys, values], dim=-1).flatten(1)
        if self.fill == "random":
            tokens[:, written:] = self._distractors(keys, generator)
        tokens.scatter_(1, at, keys.gather(1, asked))
        labels = torch.full_like(tokens, IGNORED).scatter_(1, at, values.gather(1, asked))
        sources = torch.full_like(tokens, -1).scatter_(1, at, 2 * asked + 1)
        return Examples(tokens, labels, sources)

    def _distractors(self, keys: Tensor, generator: torch.Generator) -> Tensor:
        """``[n, length - 2P]`` tokens, uniform over the vocabulary without the example's ``keys [n, P]``.

        A rank among the allowed tokens becomes a token by stepping over every smaller key.
        """
        size = (len(keys), self.length - 2 * self.pairs)
        ranks = torch.randint(self.vocabulary - self.pairs, size, generator=generator)
        smaller = keys.sort(dim=1).values - torch.arange(self.pairs)
        return ranks + torch.searchsorted(smaller, ranks, right=True)

    def _require(self, holds: bool, condition: str, remedy: str) -> None:
        if not holds:
            raise PlanError(
                f"MQAR with length {self.length}, {self.pairs} pairs, {self.queries} queries, "
                f"vocabulary {self.vocabulary}, power {self.power:g}, fill {self.fill!r}",
                f"that it needs {condition}",
                remedy,
            )


def _choose(among: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """``[count, size]`` draws from ``0 … among - 1`` without replacement, in random order."""
    return torch.rand(count, among, generator=generator).topk(size, dim=1).indices
