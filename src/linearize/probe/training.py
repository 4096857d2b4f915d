"""Training one recall model from scratch, with early stop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from linearize.errors import PlanError
from linearize.probe.model import RecallModel
from linearize.probe.mqar import Examples
from linearize.schedule import cosine

__all__ = ["Check", "Recipe", "Training", "accuracy", "train"]

PASS_TOKENS = 1 << 18  # tokens of one forward pass; larger batches are added up


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    AdamW with a learning rate that falls as a cosine over all steps, and fresh order of the same
    examples in every epoch. Training stops once validation accuracy is ``stop_at`` or more in
    ``patience`` checks in a row; a loss that is not finite stops it as well. The parameters of the
    best check are kept.

    Attributes:
        examples: sequences to train on; validation, test: sequences to check and to report.
        epochs: passes over the examples; batch: sequences per step.
        check_every: steps between checks; 0 checks once an epoch.
        stop_at, patience: see above.
        weight_decay: on all parameters, as published.
    """

    examples: int
    validation: int
    test: int
    epochs: int
    batch: int
    check_every: int = 0
    stop_at: float = 0.99
    patience: int = 1
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        counts = (self.validation, self.test, self.epochs, self.batch, self.patience)
        if min(counts) < 1 or self.examples < self.batch:
            raise PlanError(
                f"training with {self}",
                "a count below 1, or fewer examples than a batch",
                "Take counts of 1 or more, and batch ≤ examples.",
            )

    @property
    def steps(self) -> int:
        """Steps if nothing stops training; an incomplete last batch of an epoch is left out."""
        return self.epochs * (self.examples // self.batch)


class Check(NamedTuple):
    """Mean training loss since the last check, and validation accuracy after ``step`` steps."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Training:
    """What a training run came to.

    Attributes:
        checks: in order; best: the highest validation accuracy.
        ended: ``"solved"``, ``"epochs"`` or ``"diverged"``.
    """

    checks: list[Check]
    ended: str

    @property
    def best(self) -> float:
        """Highest validation accuracy of any check; 0 without one."""
        return max((check.accuracy for check in self.checks), default=0.0)


def train(
    model: RecallModel,
    examples: Examples,
    validation: Examples,
    recipe: Recipe,
    lr: float,
    generator: torch.Generator,
    progress: Callable[[int, int, str], None] = lambda done, total, message: None,
) -> Training:
    """Train ``model`` in place.

    Args:
        model: prepared here on the first ``batch`` examples.
        examples, validation: on the model's device.
        lr: learning rate at the start.
        generator: source of the order of the examples.
        progress: called with (steps done, steps at most, message) at every check.

    Returns:
        the checks; the model has the parameters of the best one.
    """
    model.prepare(examples.tokens[: recipe.batch])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=recipe.weight_decay)
    batches = _batches(len(examples.tokens), recipe, generator)
    every = recipe.check_every or recipe.steps // recipe.epochs
    checks: list[Check] = []
    losses: list[float] = []
    best, solved = copy.deepcopy(model.state_dict()), 0
    ended = "epochs"
    for step, rows in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * cosine(step - 1, recipe.steps)
        model.train()
        optimizer.zero_grad()
        losses.append(_add_gradients(model, examples.part(rows.to(examples.tokens.device))))
        if not math.isfinite(losses[-1]):
            ended = "diverged"
            break
        optimizer.step()
        if step % every and step < recipe.steps:
            continue
        check = Check(step, sum(losses) / len(losses), accuracy(model, validation))
        losses = []
        if check.accuracy > max((one.accuracy for one in checks), default=-1):
            best = copy.deepcopy(model.state_dict())
        checks.append(check)
        progress(step, recipe.steps, f"loss {check.loss:.3f}, accuracy {check.accuracy:.3f}")
        solved = solved + 1 if check.accuracy >= recipe.stop_at else 0
        if solved == recipe.patience:
            ended = "solved"
            break
    model.load_state_dict(best)
    return Training(checks, ended)


def _batches(count: int, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of every batch; each epoch in an order of its own, without the incomplete last batch."""
    for _ in range(recipe.epochs):
        yield from torch.randperm(count, generator=generator).split(recipe.batch)[
            : count // recipe.batch
        ]


def _add_gradients(model: RecallModel, batch: Examples) -> float:
    """Gradients of the mean cross-entropy at the queries, in as many passes as memory asks for."""
    count, tokens = batch.tokens.shape
    total = 0.0
    for piece in batch.split(max(1, PASS_TOKENS // tokens)):
        asked = piece.sources >= 0
        share = len(piece.tokens) / count  # every example asks for equally many
        loss = cross_entropy(model(piece.tokens, asked), piece.labels[asked]) * share
        loss.backward()
        total += float(loss.detach())
    return total


@torch.no_grad()
def accuracy(model: RecallModel, examples: Examples) -> float:
    """Share of the queries whose value has the highest logit of the vocabulary."""
    model.eval()
    right = asked = 0
    for piece in examples.split(max(1, PASS_TOKENS // 4 // examples.tokens.shape[1])):
        at = piece.sources >= 0
        answers = model(piece.tokens, at).argmax(-1)
        right += int((answers == piece.labels[at]).sum())
        asked += len(answers)
    return right / asked
