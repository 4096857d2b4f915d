"""Multiple choice by log-likelihood, zero-shot (SPEC section 6).

The options of a question follow its context after one space; only their tokens are scored, and the
option with the highest score under the task's normalisation is the model's answer. Nothing is added
to the text: no BOS, no EOS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linearize.errors import ModelError, TextError
from linearize.evaluate.logits import logits_from
from linearize.evaluate.tasks import NORMALISATIONS, PER_CHARACTER, PER_TOKEN, Question, Task
from linearize.models import Loaded

__all__ = ["Choice", "Continuation", "choice", "continuation_likelihoods", "encode"]


@dataclass(frozen=True)
class Choice:
    """How many questions of a task a model answers rightly.

    Attributes:
        task: its name. normalisation: of the log-likelihoods that decide, in words.
        accuracy: share of right answers; standard_error: of this share over questions (the sample's
            standard deviation over ``√count``; NaN for one question).
        count: questions. chance: expected accuracy of a guess.
        accuracies: the accuracy under every normalisation, the task's own among them.
        chosen: the model's answer to every question, zero-based, in the order of the file.
        scored_tokens: tokens of all options. seconds, questions_per_second: of the scoring.
    """

    task: str
    normalisation: str
    accuracy: float
    standard_error: float
    count: int
    chance: float
    accuracies: dict[str, float]
    chosen: list[int]
    scored_tokens: int
    seconds: float
    questions_per_second: float


@dataclass(frozen=True)
class Continuation:
    """Tokens of a context and its continuation; those from ``start`` on are the continuation's."""

    ids: tuple[int, ...]
    start: int


def choice(
    loaded: Loaded,
    task: Task,
    questions: Sequence[Question],
    *,
    batch: int = 8,
    progress: Callable[[int, int, str], None] | None = None,
) -> Choice:
    """Accuracy of a model on the questions of a task.

    Args:
        loaded: any model, converted or not, with its tokenizer.
        task, questions: see :func:`linearize.evaluate.read_questions`.
        batch: sequences per forward pass; has no effect on the result.
        progress: called with (sequences done, sequences in all, message).

    Raises:
        ModelError: no tokenizer, or NaN logits. TextError: a question is longer than the model's
            positions, or an option has no token of its own.
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ModelError(f"task {task.name}", "a model without tokenizer", "Load it with one.")
    started = time.perf_counter()
    encoded = [
        encode(tokenizer, question.context, f" {option}")
        for question in questions
        for option in question.options
    ]
    likelihoods = iter(continuation_likelihoods(loaded.model, encoded, batch, progress))
    chosen: dict[str, list[int]] = {name: [] for name in NORMALISATIONS}
    for question in questions:
        found = [next(likelihoods) for _ in question.options]
        for name in NORMALISATIONS:
            scores = [
                normalised(likelihood, option, name)
                for likelihood, option in zip(found, question.options, strict=True)
            ]
            chosen[name].append(scores.index(max(scores)))
    seconds = time.perf_counter() - started
    accuracies = {
        name: sum(map(_right, questions, answers)) / len(questions)
        for name, answers in chosen.items()
    }
    share, count = accuracies[task.normalisation], len(questions)
    return Choice(
        task=task.name,
        normalisation=task.normalisation,
        accuracy=share,
        standard_error=math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else math.nan,
        count=count,
        chance=sum(1 / len(question.options) for question in questions) / count,
        accuracies=accuracies,
        chosen=chosen[task.normalisation],
        scored_tokens=sum(len(one.ids) - one.start for one in encoded),
        seconds=seconds,
        questions_per_second=count / seconds,
    )


def normalised(likelihood: Tensor, option: str, normalisation: str) -> float:
    """The score of an option from the log-likelihoods ``[tokens]`` of its tokens, in nats."""
    total = float(likelihood.sum())
    if normalisation == PER_TOKEN:
        return total / len(likelihood)
    return total / len(option) if normalisation == PER_CHARACTER else total


def encode(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> Continuation:
    """Tokens of ``context + continuation``, cut where they leave those of the context alone.

    Tokenizing both at once gives the tokens the model would see in running text; a token that reaches
    across the seam counts to the continuation.

    Raises:
        TextError: the context or the continuation has no token.
    """
    alone, whole = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for text in (context, context + continuation)
    )
    start = 0
    while start < min(len(alone), len(whole)) and alone[start] == whole[start]:
        start += 1
    if not 0 < start < len(whole):
        raise TextError(
            f"the likelihood of {continuation!r} after {context!r}",
            f"{start} tokens of context in {len(whole)}",
            "Both need a token that the tokenizer keeps.",
        )
    return Continuation(tuple(whole), start)


def continuation_likelihoods(
    model: PreTrainedModel,
    continuations: Sequence[Continuation],
    batch: int = 8,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Tensor]:
    """Log-likelihoods in nats of every continuation's tokens, ``[tokens]`` each, fp64.

    What is to be read for one continuation is often the beginning of what is read for another (of
    the same context, or all but the last token); such share one pass. Sequences are sorted by
    length; padding is neither read nor scored, so ``batch`` has no effect on the result.

    Raises:
        TextError: a sequence is longer than the model's positions. ModelError: NaN logits.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max((len(one.ids) for one in continuations), default=0)
    if limit is not None and longest > limit:
        raise TextError(
            "a question scored in one pass",
            f"one of {longest} tokens for {limit} positions",
            "Leave it out, or use a model with a longer context.",
        )
    read = _homes({one.ids[:-1] for one in continuations})
    waiting: dict[tuple[int, ...], list[int]] = {}
    for at, one in enumerate(continuations):
        waiting.setdefault(read[one.ids[:-1]], []).append(at)
    rows = sorted(waiting, key=len, reverse=True)  # what takes most memory fails first
    result: list[Tensor] = [torch.empty(0)] * len(continuations)
    for begin in range(0, len(rows), batch):
        part = rows[begin : begin + batch]
        first = min(continuations[at].start for row in part for at in waiting[row]) - 1
        ids, mask = _padded(part)
        logits = logits_from(model, ids, first, mask)
        for number, row in enumerate(part):
            for at in waiting[row]:
                one = continuations[at]
                target = torch.tensor(one.ids[one.start :], device=logits.device)
                kept = logits[number, one.start - 1 - first :][: len(target)].float()
                loss = torch.nn.functional.cross_entropy(kept, target, reduction="none")
                result[at] = -loss.double().cpu()
                if bool(result[at].isnan().any()):
                    raise ModelError(
                        "a likelihood",
                        "NaN logits",
                        "Check the weights and the dtype of the model.",
                    )
        if progress is not None:
            progress(min(begin + batch, len(rows)), len(rows), "")
    return result


def _homes(inputs: set[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For every input the longest one that begins with it."""
    ordered = sorted(inputs, reverse=True)  # what continues an input stands right before it
    home = {one: one for one in ordered[:1]}
    for longer, one in pairwise(ordered):
        home[one] = home[longer] if longer[: len(one)] == one else one
    return home


def _padded(rows: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor | None]:
    """Rows as ids ``[B, N]``, padded behind, and their mask; no mask where nothing is padded."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
        mask[at, : len(row)] = 1
    return ids, None if bool(mask.all()) else mask


def _right(question: Question, answer: int) -> bool:
    return question.gold == answer
