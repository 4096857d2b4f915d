"""Perplexity on non-overlapping blocks, exactly as SPEC section 6 defines it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.errors import ModelError, TextError
from linearize.models import Loaded
from linearize.text import Source, split_blocks, tokenize

__all__ = ["Perplexity", "block_nll", "mean_perplexity", "perplexity", "sequence_nll", "token_nll"]

HEAD_ROWS = 512  # positions whose log-probabilities are formed at once


@dataclass(frozen=True)
class Perplexity:
    """Unit: perplexity per token, ``exp`` of the mean negative log-likelihood in nats.

    Attributes:
        value: the perplexity. nll: mean negative log-likelihood. targets: tokens scored; the first
            token of a block has no context and is not one of them.
        blocks, block: how many blocks of how many tokens; an incomplete last block is dropped.
        per_block: mean negative log-likelihood of every block.
    """

    value: float
    nll: float
    targets: int
    blocks: int
    block: int
    per_block: list[float]


def perplexity(
    loaded: Loaded,
    text: Source,
    *,
    block: int = 4096,
    blocks: int | None = None,
    batch: int = 1,
    progress: Callable[[int, int, str], None] | None = None,
) -> Perplexity:
    """Perplexity of a model on a text, without BOS or EOS added.

    Args:
        loaded: the model and its tokenizer.
        text: see :func:`linearize.text.tokenize`.
        block: tokens per block; blocks: only the first so many; batch: blocks per forward pass
            (the result does not depend on it).
        progress: called with (blocks done, blocks in all, message).

    Raises:
        TextError: the text is shorter than one block, or than ``blocks`` blocks.
    """
    measured = block_nll(loaded, text, block=block, blocks=blocks, batch=batch, progress=progress)
    return mean_perplexity([nll for _, nll in measured])


def block_nll(
    loaded: Loaded,
    text: Source,
    *,
    block: int,
    blocks: int | None,
    batch: int,
    progress: Callable[[int, int, str], None] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The blocks of a text ``[block]``, each with its tokens' negative log-likelihoods ``[block - 1]``.

    Arguments and errors are those of :func:`perplexity`.
    """
    if block < 2 or batch < 1 or (blocks is not None and blocks < 1):
        raise TextError(
            f"perplexity on {blocks or 'all'} blocks of {block} tokens, {batch} a pass",
            "nothing to score",
            "Use blocks of two tokens or more, and at least one block at once.",
        )
    tokens = tokenize(text, loaded.tokenizer)
    chosen = split_blocks(tokens, block, need=blocks or 1)[:blocks]
    done, total = 0, 0.0
    for start in range(0, len(chosen), batch):
        part = chosen[start : start + batch]
        for one, nll in zip(part, token_nll(loaded.model, part), strict=True):
            done, total = done + 1, total + float(nll.mean())
            yield one, nll
        if progress is not None:
            progress(done, len(chosen), f"perplexity so far {_exp(total / done):.2f}")


def mean_perplexity(blocks: Sequence[Tensor]) -> Perplexity:
    """The perplexity of blocks of equal length from their tokens' negative log-likelihoods."""
    per_block = [float(nll.mean()) for nll in blocks]
    nll, scored = sum(per_block) / len(per_block), len(blocks[0])
    return Perplexity(
        _exp(nll), nll, len(per_block) * scored, len(per_block), scored + 1, per_block
    )


def sequence_nll(
    model: PreTrainedModel, sequences: Sequence[Tensor], batch: int = 1
) -> list[tuple[float, int]]:
    """Summed negative log-likelihood in nats and number of scored tokens of every sequence.

    Sequences may differ in length; padding is neither read nor scored, so ``batch`` has no effect
    on the result. The first token of a sequence is not scored.
    """
    results = []
    for start in range(0, len(sequences), batch):
        for nll in token_nll(model, sequences[start : start + batch]):
            results.append((float(nll.sum()), len(nll)))
    return results


@torch.no_grad()
def token_nll(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Negative log-likelihood of every token but the first, ``[n - 1]`` per sequence, fp64.

    Raises:
        ModelError: the model's logits are NaN.
    """
    lengths = [len(sequence) for sequence in sequences]
    ids = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : lengths[row]] = sequence
        mask[row, : lengths[row]] = 1
    padded = {} if bool(mask.all()) else {"attention_mask": mask.to(model.device)}
    logits = model(input_ids=ids.to(model.device), use_cache=False, **padded).logits
    result = []
    for row, length in enumerate(lengths):
        parts = []
        for start in range(0, length - 1, HEAD_ROWS):
            stop = min(start + HEAD_ROWS, length - 1)
            target = ids[row, start + 1 : stop + 1].to(logits.device)
            rows = logits[row, start:stop].float()
            parts.append(torch.nn.functional.cross_entropy(rows, target, reduction="none"))
        nll = torch.cat(parts).double().cpu() if parts else torch.zeros(0, dtype=torch.float64)
        if bool(nll.isnan().any()):
            raise ModelError(
                "a likelihood", "NaN logits", "Check the weights and the dtype of the model."
            )
        result.append(nll)
    return result


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
