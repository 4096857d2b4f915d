"""Does attention look where the answer is? Intersection over union with the true positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linearize.probe.model import RecallModel
from linearize.probe.mqar import Examples

__all__ = ["THRESHOLD", "Overlap", "attention_overlap", "overlap"]

THRESHOLD = 0.5  # of a query's largest weight: from here on a position counts as attended
PASS_NUMBERS = 1 << 20  # weights of one head that one pass may hold


class Overlap(NamedTuple):
    """Agreement of attention with the true positions, 1 if attention is an exact lookup.

    Attributes:
        iou: |attended ∩ true| / |attended ∪ true|, mean over queries. A position is attended if its
            weight, averaged over the heads, is at least ``THRESHOLD`` times the query's largest.
        soft: the same without a threshold: Σ min(w, t) / Σ max(w, t) over the positions, with t one
            at the true position; for normalised weights w/(2 - w) of the weight on it.
        weight: mean weight on the true position.
    """

    iou: float
    soft: float
    weight: float


def overlap(weights: Tensor, sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three measures of :class:`Overlap` for every query.

    Args:
        weights: ``[M, N]``, each row normalised.
        sources: ``[M]``, the true position of every query.

    Returns:
        three tensors ``[M]``.
    """
    true = torch.nn.functional.one_hot(sources, weights.shape[1]).bool()
    attended = weights >= THRESHOLD * weights.amax(1, keepdim=True)
    hard = (attended & true).sum(1) / (attended | true).sum(1)
    target = true.to(weights.dtype)
    soft = torch.minimum(weights, target).sum(1) / torch.maximum(weights, target).sum(1)
    return hard, soft, weights.gather(1, sources[:, None])[:, 0]


@torch.no_grad()
def attention_overlap(model: RecallModel, examples: Examples) -> Overlap | None:
    """Overlap of the last kernel layer's attention with the true positions, over all queries.

    True is the position of the value that answers. ``None`` for models without attention.
    """
    model.eval()
    if not model.attends:
        return None
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    tokens = examples.tokens.shape[1]
    for piece in examples.split(max(1, PASS_NUMBERS // tokens**2)):
        at = piece.sources >= 0
        weights = model.attention_maps(piece.tokens)[-1].mean(1)[at]
        measures = overlap(weights, piece.sources[at])
        sums += torch.stack([one.double().sum().cpu() for one in measures])
        count += len(weights)
    iou, soft, weight = (sums / count).tolist()
    return Overlap(iou, soft, weight)
