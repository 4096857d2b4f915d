"""What an adaptation did, as it is stored beside the adapted model."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linearize.errors import CheckpointError
from linearize.models import Loaded
from linearize.versions import versions

__all__ = ["ADAPTATION", "Adaptation", "AdaptationReport", "Curves", "read_adaptation"]

ADAPTATION = "adaptation.json"


@dataclass
class Curves:
    """One number an update in every list but the last two, which have one a validation.

    Attributes:
        loss: in nats per token, before the update (transfer updates: the relative output error).
        lr: learning rate of LoRA (of the kernels where they alone are trained).
        gradient_norm: before clipping.
        tokens_per_second: of all processes together.
        validated, nll: updates done at each validation, and the mean negative log-likelihood then.
    """

    loss: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)

    @property
    def best(self) -> int | None:
        """Which validation was best: its place in the lists, the first of equals."""
        return min(range(len(self.nll)), key=self.nll.__getitem__) if self.nll else None


@dataclass(frozen=True)
class AdaptationReport:
    """The account of an adaptation.

    Attributes:
        settings: all of them. plan: how the model was converted, ``None`` for softmax.
        base: what was adapted. text, validation_text: what it was adapted to, by name.
        train_blocks, validation_blocks: how many blocks there were.
        tokens: tokens trained on, repetitions counted.
        curves: along the updates; the first ``transfer_steps`` are attention transfer.
        best_step, best_nll: the validation whose weights were kept. start_nll: before the first
            update.
        lora_numbers, kernel_numbers: trained.
        seconds: of all runs together. peak_memory: largest resident memory of a process, bytes.
        processes: how many. teacher: what was distilled from, ``None`` for the model itself or
            nothing. versions: of everything that matters.
    """

    settings: dict[str, Any]
    plan: dict[str, Any] | None
    base: str | None
    text: list[str]
    validation_text: list[str]
    train_blocks: int
    validation_blocks: int
    tokens: int
    curves: Curves
    best_step: int
    best_nll: float
    start_nll: float
    lora_numbers: int
    kernel_numbers: int
    seconds: float
    peak_memory: int
    processes: int
    teacher: str | None = None
    versions: dict[str, str] = field(default_factory=versions)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @property
    def start_perplexity(self) -> float:
        """Validation perplexity before the first update."""
        return math.exp(min(700.0, self.start_nll))

    @property
    def best_perplexity(self) -> float:
        """Validation perplexity of the weights that were kept."""
        return math.exp(min(700.0, self.best_nll))


@dataclass(frozen=True)
class Adaptation:
    """The adapted model with its best weights, and the account of it."""

    loaded: Loaded
    report: AdaptationReport


def read_adaptation(folder: str | Path) -> AdaptationReport | None:
    """The account of an adaptation that a folder holds; ``None`` if it holds none.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = Path(folder) / ADAPTATION
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return AdaptationReport(**content | {"curves": Curves(**content["curves"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}",
            f"an account that cannot be read ({type(error).__name__}: {error})",
            "Adapt again, or use the version of linearize that wrote it.",
        ) from error
