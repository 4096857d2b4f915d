"""Contexts that name pairs of words and ask for some of them again, for models as they are.

A context reads, with words drawn from the tokenizer's own vocabulary, one token each::

    Here is a list of pairs.
    - river: candle
    - stone: rabbit
    … ordinary text of a chosen length …
    The same pairs again, in another order.
    - stone: rabbit
    - river: candle

The second words of the last lines are the answers; each is scored given everything before it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from linearize.errors import PlanError, TextError

__all__ = ["Contexts", "make_contexts", "ordinary_words"]

OPENING, AGAIN = "Here is a list of pairs.\n", "\nThe same pairs again, in another order.\n"
BEFORE, BETWEEN, AFTER = "-", ":", "\n"
SPACE = "Ġ▁"  # how vocabularies write the space before a word
WORD = re.compile(f"[{SPACE}][a-z]{{3,10}}")
FALLBACK = re.compile(f"[{SPACE}]?[A-Za-z]+")
FEW = 64  # a vocabulary with fewer words than this has its letters and fragments taken, too


@dataclass(frozen=True)
class Contexts:
    """A batch of contexts of one setting.

    Attributes:
        ids: token ids ``[B, N]``.
        asked: position of the token before each answer, ``[B, Q]``.
        values: the second words of all pairs, ``[B, P]``.
        gold: which of them is the answer, ``[B, Q]``.
        gaps: tokens from a pair's second word to where it is asked for, ``[B, Q]``.
    """

    ids: Tensor
    asked: Tensor
    values: Tensor
    gold: Tensor
    gaps: Tensor


def ordinary_words(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that are a space and 3 to 10 lower-case letters.

    A vocabulary with hardly any, such as one of characters, gives all its tokens of letters.
    """
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for pattern in (WORD, FALLBACK):
        found = [
            at for at, name in enumerate(names) if at not in special and pattern.fullmatch(name)
        ]
        if len(found) >= FEW:
            break
    return found


def make_contexts(
    tokenizer: PreTrainedTokenizerBase,
    words: Sequence[int],
    filler: Tensor,
    *,
    pairs: int,
    distance: int,
    questions: int,
    examples: int,
    seed: int,
    positions: int | None = None,
) -> Contexts:
    """Draw contexts of equal length; the same arguments give the same contexts.

    Args:
        words: ids to draw the words from; no word occurs in two pairs of a context.
        filler: tokens ``[n]`` of ordinary text, of which a random piece lies between.
        pairs: pairs in a context. distance: tokens of ordinary text after them.
        questions: how many of the pairs are asked for. examples: contexts.
        positions: how many tokens a context may have.

    Raises:
        PlanError: pairs need more words than there are, there are more questions than pairs, or a
            context does not fit; the inequality that fails is named.
        TextError: the filler is shorter than the distance.
    """
    opening, again, before, between, after = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (OPENING, AGAIN, BEFORE, BETWEEN, AFTER)
    )
    line = len(before) + len(between) + len(after) + 2
    length = len(opening) + distance + len(again) + line * (pairs + questions)
    if 2 * pairs > len(words):
        raise PlanError(
            f"{pairs} pairs of words",
            f"2 · {pairs} > {len(words)} words in the vocabulary",
            "Ask for fewer pairs.",
        )
    if not 1 <= questions <= pairs:
        raise PlanError(
            f"{questions} questions about {pairs} pairs",
            f"not 1 ≤ {questions} ≤ {pairs}",
            "Ask for at least one pair and at most for every pair once.",
        )
    if distance > len(filler):
        raise TextError(
            f"a distance of {distance} tokens",
            f"{distance} > {len(filler)} tokens of text to fill it",
            "Give a longer text or a smaller distance.",
        )
    if positions is not None and length > positions:
        raise PlanError(
            f"{pairs} pairs and {questions} questions at a distance of {distance} tokens",
            f"{len(opening) + len(again)} + {line} · ({pairs} + {questions}) + {distance} = {length} "
            f"tokens > {positions} positions of the model",
            "Ask for fewer pairs or a smaller distance.",
        )
    draw = random.Random(f"{seed} {pairs} {distance} {questions}")
    ids, asked, values, gold, gaps = [], [], [], [], []
    for _ in range(examples):
        drawn = draw.sample(words, 2 * pairs)
        first, second = drawn[:pairs], drawn[pairs:]
        row, told = list(opening), []
        for key, value in zip(first, second, strict=True):
            row += [*before, key, *between, value, *after]
            told.append(len(row) - len(after) - 1)
        start = draw.randrange(len(filler) - distance + 1)
        row += [*filler[start : start + distance].tolist(), *again]
        chosen = draw.sample(range(pairs), questions)
        at = []
        for which in chosen:
            row += [*before, first[which], *between]
            at.append(len(row) - 1)
            row += [second[which], *after]
        ids.append(row)
        asked.append(at)
        values.append(second)
        gold.append(chosen)
        gaps.append([end + 1 - told[which] for end, which in zip(at, chosen, strict=True)])
    return Contexts(*(torch.tensor(each) for each in (ids, asked, values, gold, gaps)))
