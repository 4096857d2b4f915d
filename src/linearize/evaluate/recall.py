"""Perplexity split by whether a token can be recalled from its block.

A token can be recalled if its bigram, the token before it and itself, occurred earlier in the block
(SPEC section 8): a model that looks back finds it written there. All other tokens are the rest.
Perplexity hides recall in the mean of both; the two numbers show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.evaluate.perplexity import Perplexity, block_nll, mean_perplexity
from linearize.models import Loaded
from linearize.text import Source

__all__ = ["RecallSplit", "TokenClass", "occurred", "recall_split"]


@dataclass(frozen=True)
class TokenClass:
    """Some of the scored tokens: their perplexity (per token), mean negative log-likelihood in nats,
    number and share of all. Without a token the first two are NaN."""

    value: float
    nll: float
    targets: int
    share: float


@dataclass(frozen=True)
class RecallSplit:
    """Perplexity on tokens whose bigram occurred earlier in the block, on the rest, and on both."""

    recalled: TokenClass
    rest: TokenClass
    both: Perplexity


def recall_split(
    loaded: Loaded,
    text: Source,
    *,
    block: int = 4096,
    blocks: int | None = None,
    batch: int = 1,
    progress: Callable[[int, int, str], None] | None = None,
) -> RecallSplit:
    """Split the perplexity of a model on a text; arguments and errors as of :func:`perplexity`."""
    every, seen = [], []
    for tokens, nll in block_nll(
        loaded, text, block=block, blocks=blocks, batch=batch, progress=progress
    ):
        every.append(nll)
        seen.append(occurred(tokens))
    nll, again = torch.cat(every), torch.cat(seen)
    return RecallSplit(_class(nll, again), _class(nll, ~again), mean_perplexity(every))


def occurred(tokens: Tensor) -> Tensor:
    """Whether the bigram that ends at a token occurred earlier: ``[n]`` ids -> ``[n - 1]`` booleans.

    The first token ends no bigram and is left out.
    """
    before, after = tokens[:-1].long(), tokens[1:].long()
    bigrams, order = (before * (int(tokens.max()) + 1) + after).sort(stable=True)
    again = torch.zeros_like(bigrams, dtype=torch.bool)
    again[1:] = bigrams[1:] == bigrams[:-1]  # stable: of equal ones the earliest comes first
    return torch.zeros_like(again).scatter(0, order, again)


def _class(nll: Tensor, chosen: Tensor) -> TokenClass:
    count = int(chosen.sum())
    mean = float(nll[chosen].mean()) if count else math.nan
    value = math.inf if mean >= 700 else math.exp(mean)
    return TokenClass(value, mean, count, count / len(nll))
