"""The settings of an adaptation: validated once, then stored with its result."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from linearize.errors import PlanError
from linearize.schedule import cosine

__all__ = ["PRESETS", "AdaptSettings"]

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},  # the defaults below
    "small": {
        "steps": 128,
        "block": 2048,
        "eval_every": 32,
        "validation_blocks": 8,
    },
}


class AdaptSettings(BaseModel):
    """Everything that decides the outcome of an adaptation besides model and text.

    Defaults are the paper's (SPEC section 6): 512 updates of one 4,096-token block, LoRA of rank 8
    on the query, key, value and output projections of every layer, kernel parameters beside it.

    Attributes:
        steps: updates. block: tokens per block. batch: blocks per forward pass. accumulate: forward
            passes per update and process.
        lr: peak learning rate of LoRA. kernel_lr: that of the kernels; ``lr`` by default.
        train_kernels: whether kernel parameters are trained.
        rank, alpha, dropout: of LoRA; rank 0 adds none.
        weight_decay, clip: of AdamW; largest gradient norm.
        warmup: share of the updates with a linearly rising rate; a cosine follows.
        distill: share of the loss that is the divergence from the distribution of the original model
            or of a teacher; the rest is the next-token loss.
        transfer_steps, transfer_lr: updates of attention transfer before the others, and their peak
            learning rate: kernels alone, on the error of each layer's output against softmax.
        eval_every: updates between two validations; there is one at the start and one at the end.
        validation_blocks: blocks of a validation. skip_blocks: first blocks of the text, not trained
            on.
        seed: seed of LoRA, of the order of blocks and of dropout.
        dtype: ``"bf16"`` computes the model under autocast; kernels, their sums and everything that
            is trained stay in fp32. ``"fp32"`` computes in the precision of the weights.
        gradient_checkpointing: recompute layers in the backward pass, to save memory.
        checkpoint_seconds: time between two checkpoints; the one setting a resumed run may change.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(512, ge=0)
    block: int = Field(4096, ge=2)
    batch: int = Field(1, ge=1)
    accumulate: int = Field(1, ge=1)
    lr: float = Field(5e-4, gt=0)
    kernel_lr: float | None = Field(None, gt=0)
    train_kernels: bool = True
    rank: int = Field(8, ge=0)
    alpha: float = Field(16, gt=0)
    dropout: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(1.0, gt=0)
    warmup: float = Field(0.05, ge=0, le=1)
    distill: float = Field(0.0, ge=0, le=1)
    transfer_steps: int = Field(0, ge=0)
    transfer_lr: float = Field(1e-3, gt=0)
    eval_every: int = Field(128, ge=1)
    validation_blocks: int = Field(32, ge=1)
    skip_blocks: int = Field(0, ge=0)
    seed: int = 42
    dtype: Literal["bf16", "fp32"] = "bf16"
    gradient_checkpointing: bool = False
    checkpoint_seconds: float = Field(30.0, ge=0)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise PlanError(
                f"{name}={first.get('input')!r}",
                first["msg"],
                f"Set {name} to a valid value; linearize.AdaptSettings documents each field.",
            ) from None

    @staticmethod
    def preset(name: str, **changes: Any) -> AdaptSettings:
        """``"paper"`` (512 × 4,096 tokens) or ``"small"`` (128 × 2,048, for two cores), changed.

        Raises:
            PlanError: there is no such preset, or a value is invalid.
        """
        if name not in PRESETS:
            raise PlanError(f"preset {name!r}", f"presets {', '.join(PRESETS)}", "Choose one.")
        return AdaptSettings(**PRESETS[name] | changes)

    @property
    def total(self) -> int:
        """Updates of all stages."""
        return self.transfer_steps + self.steps

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        return self.model_dump(mode="json", exclude={"checkpoint_seconds"})

    def factor(self, update: int) -> float:
        """The learning rate of an update (from 0) as a share of its stage's peak."""
        steps = self.transfer_steps
        if update >= self.transfer_steps:
            update, steps = update - self.transfer_steps, self.steps
        rising = math.ceil(self.warmup * steps)
        if update < rising:
            return (update + 1) / rising
        return cosine(update - rising, max(1, steps - rising))
