"""Can a pretrained model look up what its context says? Measured without training.

For every number of pairs and every distance, contexts of :mod:`linearize.probe.retrieval_data` pass
through the model once. An answer counts as *exact* if it has the highest logit of the whole
vocabulary (what greedy decoding would write), and as *chosen* if it has the highest logit among the
values of its own context, where chance is one over the number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linearize.errors import PlanError
from linearize.evaluate.logits import logits_from
from linearize.models import Loaded
from linearize.probe.retrieval_data import Contexts, make_contexts, ordinary_words
from linearize.text import Source, tokenize

__all__ = [
    "DISTANCES",
    "EXAMPLES",
    "PAIRS",
    "QUESTIONS",
    "Retrieval",
    "RetrievalCell",
    "check_settings",
    "retrieval",
]

PAIRS, DISTANCES, QUESTIONS, EXAMPLES = (4, 16, 64), (0, 256, 1024), 8, 16


@dataclass(frozen=True)
class RetrievalCell:
    """One number of pairs at one distance.

    Attributes:
        pairs, distance: the setting; distance in tokens of text between pairs and questions.
        length: tokens of a context. gap: mean tokens between a pair and its question.
        answers: how many were scored.
        exact: share of answers with the highest logit of the vocabulary; exact_error: its standard
            error over contexts.
        choice, choice_error: the same among the values of the context. chance: what guessing gets.
    """

    pairs: int
    distance: int
    length: int
    gap: float
    answers: int
    exact: float
    exact_error: float
    choice: float
    choice_error: float
    chance: float


@dataclass(frozen=True)
class Retrieval:
    """All cells, pairs ascending, then distance; with what decided them."""

    cells: list[RetrievalCell]
    questions: int
    examples: int
    words: int
    seed: int


def retrieval(
    loaded: Loaded,
    text: Source | None = None,
    *,
    pairs: Sequence[int] = PAIRS,
    distances: Sequence[int] = DISTANCES,
    questions: int = QUESTIONS,
    examples: int = EXAMPLES,
    batch: int = 8,
    seed: int = 42,
    progress: Callable[[int, int, str], None] | None = None,
) -> Retrieval:
    """Retrieval accuracy of a model by number of pairs and distance.

    Args:
        loaded: any model, converted or not, with its tokenizer.
        text: what the distance is filled with; the standard library's documentation by default.
        pairs, distances: the settings; every combination is measured.
        questions: answers per context, at most one per pair. examples: contexts per combination.
        batch: contexts per forward pass; has no effect on the result.
        progress: called with (combinations done, combinations in all, message).

    Raises:
        PlanError: no tokenizer, or a combination that is not possible; the inequality that fails is
            named. TextError: the text is shorter than a distance.
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise PlanError("a retrieval probe", "a model without tokenizer", "Load it with one.")
    settings = [(p, d) for p in sorted(set(pairs)) for d in sorted(set(distances))]
    check_settings(settings, questions, examples, batch)
    words = ordinary_words(tokenizer)
    filler = tokenize(text, tokenizer)
    contexts = [
        make_contexts(
            tokenizer,
            words,
            filler,
            pairs=p,
            distance=d,
            questions=min(questions, p),
            examples=examples,
            seed=seed,
            positions=getattr(loaded.model.config, "max_position_embeddings", None),
        )
        for p, d in settings
    ]
    cells: list[RetrievalCell] = []
    for (p, d), drawn in zip(settings, contexts, strict=True):
        cells.append(_cell(loaded, drawn, p, d, batch))
        if progress is not None:
            message = f"{p} pairs at {d}: {cells[-1].choice:.2f}"
            progress(len(cells), len(settings), message)
    return Retrieval(cells, questions, examples, len(words), seed)


def check_settings(
    settings: Sequence[tuple[int, int]], questions: int, examples: int, batch: int
) -> None:
    """Refuse settings that measure nothing, whatever the model.

    Raises:
        PlanError: names the inequality that fails.
    """
    few = min((p for p, _ in settings), default=0)
    near = min((d for _, d in settings), default=-1)
    for value, least, what in (
        (few, 2, "pairs in a context"),
        (near, 0, "tokens of distance"),
        (questions, 1, "questions in a context"),
        (examples, 1, "contexts of each kind"),
        (batch, 1, "contexts in a pass"),
    ):
        if value < least:
            raise PlanError(
                f"{value} {what}", f"{value} < {least}", f"Ask for {least} or more everywhere."
            )


def _cell(
    loaded: Loaded, contexts: Contexts, pairs: int, distance: int, batch: int
) -> RetrievalCell:
    exact, choice = [], []
    for start in range(0, len(contexts.ids), batch):
        part = Contexts(*(each[start : start + batch] for each in vars(contexts).values()))
        scores = _answer_logits(loaded, part)
        among = scores.gather(2, part.values[:, None].expand(-1, scores.shape[1], -1))
        right = part.values.gather(1, part.gold)
        exact.append(scores.argmax(-1) == right)
        choice.append(among.argmax(-1) == part.gold)
    exact_share, exact_error = _share(torch.cat(exact))
    choice_share, choice_error = _share(torch.cat(choice))
    return RetrievalCell(
        pairs,
        distance,
        contexts.ids.shape[1],
        float(contexts.gaps.double().mean()),
        contexts.gold.numel(),
        exact_share,
        exact_error,
        choice_share,
        choice_error,
        1 / pairs,
    )


def _answer_logits(loaded: Loaded, part: Contexts) -> Tensor:
    """Logits ``[B, Q, vocabulary]`` where the answers are asked for, on the CPU in fp32."""
    first = int(part.asked.min())
    logits = logits_from(loaded.model, part.ids, first)
    at = (part.asked - first).to(logits.device)
    return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])).float().cpu()


def _share(right: Tensor) -> tuple[float, float]:
    """Share of right answers ``[E, Q]`` and its standard error over contexts, which are independent."""
    means = right.double().mean(1)
    spread = float(means.std()) if len(means) > 1 else math.nan
    return float(means.mean()), spread / math.sqrt(len(means))
