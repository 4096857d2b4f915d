"""The plan: what to convert and how. Validated once, then stored in every artefact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from linearize.errors import PlanError

__all__ = ["Plan", "parse_layers"]

LayerChoice = str | tuple[int, ...]


class Plan(BaseModel):
    """Everything that decides the outcome of a conversion.

    Defaults are the paper's settings (OAL paper, section 5 and appendices B, C) where it names one.
    Layers are zero-based.

    Attributes:
        kernel: name of a discovered kernel; ``linearize.kernels.available()`` lists them.
        layers: ``"A-B"`` (inclusive), ``"all"``, ``"middle"`` (all but the first and last tenth),
            explicit indices, or ``"auto"`` to keep the softmax of those whose conversion costs most.
        window: how many of the latest keys stay exact (0: none). With kernel ``"softmax"``, a window
            makes it softmax over these and the sinks alone.
        sinks: how many of the first keys of each sequence stay exact (0: none).
        saturation: how many keys the kernel's part counts for at most beside the exact ones: its sum
            over m keys is multiplied by ``min(1, saturation / m)``. For contexts longer than those
            fitted on, where its weight would go on growing.
        center: subtract a fitted per-KV-head mean from every key before the kernel sees it.
        state_rank: how many directions of the keys the kernel sees, for a state of
            ``1 + r + r(r+1)/2`` features (OAL and the learned global quadratic); all by default.
        state_budget: bytes for the states of all converted layers of one sequence; the rank of every
            layer is chosen so that the logits lose least.
        heads: ``"all"``, or ``"auto"`` to keep the softmax of those KV heads whose conversion costs
            most. With it, or with ``layers="auto"``, one of the next three says how much is kept.
        keep: how many layers or KV heads keep their softmax: ``"16"`` or ``"10%"``.
        max_kl: keep as many as it takes to bring the divergence of the predictions from the
            original model's on text, in nats per token, down to this.
        memory_budget: keep as many as this many bytes of decoding memory allow, for one sequence of
            ``context`` tokens in fp32.
        fitting: ``"frozen"`` fits every layer on the original model's activations, ``"sequential"``
            on those of the model whose earlier layers are converted already.
        alpha, gamma, tau, min_groups, bootstrap: the bootstrap grouping of appendix B.
        groups: a fixed number of groups for every head instead of the bootstrap grouping.
        prompts, prompt_length: calibration prompts for the contribution profiles (tokens each).
        block: tokens per fitting block.
        skip_blocks, fit_blocks, validation_blocks: how the text is divided, in this order; skipped
            blocks are never touched and serve as held-out text.
        positions: query positions of a fitting block that the moments take in, at random; validation
            blocks give four times as many.
        joint_steps: gradient steps in which the keys' mean and directions are learned together with
            the kernel, by output matching. A plan without ``center`` and ``state_rank`` takes none.
        solver: ``"moments"`` (full-batch on sufficient statistics) or ``"adam"`` (the paper's recipe).
        eps: the floor of the quadratic kernel.
        seed: seed of every random choice.
        options: extra settings of the chosen kernel, e.g. ``{"features": 128}``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str = "oal"
    layers: LayerChoice = "middle"
    window: int = Field(0, ge=0)
    sinks: int = Field(0, ge=0)
    saturation: int | None = Field(None, ge=1)
    center: bool = False
    state_rank: int | None = Field(None, ge=1)
    state_budget: int | None = Field(None, ge=1)
    heads: Literal["all", "auto"] = "all"
    keep: str | None = None
    max_kl: float | None = Field(None, gt=0)
    memory_budget: int | None = Field(None, ge=1)
    context: int = Field(8192, ge=1)
    fitting: Literal["frozen", "sequential"] = "frozen"
    alpha: float = Field(0.25, gt=0, le=1)
    gamma: float = Field(0.9, ge=0, le=1)
    tau: float = Field(1.5, gt=0)
    min_groups: int = Field(2, ge=1)
    bootstrap: int = Field(1000, ge=1)
    groups: int | None = Field(None, ge=1)
    prompts: int = Field(40, ge=1)
    prompt_length: int = Field(128, ge=2)
    block: int = Field(4096, ge=2)
    skip_blocks: int = Field(16, ge=0)
    fit_blocks: int = Field(8, ge=1)
    validation_blocks: int = Field(2, ge=1)
    positions: int = Field(1024, ge=1)
    joint_steps: int = Field(400, ge=0)
    solver: Literal["moments", "adam"] = "moments"
    eps: float = Field(1e-6, gt=0)
    seed: int = 42
    options: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "plan"
            raise PlanError(
                f"{name}={first.get('input')!r}",
                first["msg"].removeprefix("Value error, "),
                f"Set {name} to a valid value; linearize.Plan documents each field.",
            ) from None

    @field_validator("layers", mode="before")
    @classmethod
    def _layers_as_text_or_tuple(cls, value: Any) -> Any:
        if isinstance(value, str):
            parse_layers(value, None)
            return value
        return tuple(value) if isinstance(value, Iterable) else value

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_as_count_or_share(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) else value
        if text is None:
            return None
        number, percent = (text[:-1], True) if str(text).endswith("%") else (text, False)
        try:
            fits = 0 < float(number) < 100 if percent else int(number) >= 1
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError('neither a number like "16" nor a share like "10%"')
        return text

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        targets = ("keep", "max_kl", "memory_budget")
        given = [name for name in targets if getattr(self, name) is not None]
        if self.automatic and len(given) != 1:
            raise ValueError(
                'layers="auto" and heads="auto" need one of keep, max_kl and memory_budget; '
                f"{', '.join(given) or 'none'} given"
            )
        if given and not self.automatic:
            raise ValueError(f'{given[0]} is for layers="auto" or heads="auto"')
        if self.state_rank is not None and self.state_budget is not None:
            raise ValueError("state_rank and state_budget exclude each other")
        if self.saturation is not None and not (self.sinks or self.window):
            raise ValueError("saturation is a limit beside exact keys, and sinks and window are 0")
        return self

    @property
    def automatic(self) -> bool:
        """Whether layers or heads are chosen by measurement."""
        return self.layers == "auto" or self.heads == "auto"

    @model_validator(mode="after")
    def _prompt_fits_block(self) -> Plan:
        if self.groups is not None and self.groups < self.min_groups and self.groups != 1:
            raise ValueError(f"groups={self.groups} is below min_groups={self.min_groups}")
        return self

    def layer_indices(self, count: int) -> list[int]:
        """The zero-based layers to convert in a model of ``count`` layers, ascending.

        Raises:
            PlanError: a layer lies outside the model, or none is chosen.
        """
        if isinstance(self.layers, str):
            chosen = parse_layers(self.layers, count)
        else:
            chosen = sorted(set(self.layers))
        outside = [index for index in chosen if not 0 <= index < count]
        if outside or not chosen:
            raise PlanError(
                f"layers {self.layers!r}",
                f"a model with layers 0-{count - 1}"
                + (f" (outside: {outside})" if outside else " and an empty choice"),
                "Choose layers inside the model, for example "
                f"{_middle(count)[0]}-{_middle(count)[-1]}.",
            )
        return chosen


def parse_layers(text: str, count: int | None) -> list[int]:
    """Read ``"3-26"``, ``"4,12,20"``, ``"0-2,5"``, ``"all"``, ``"auto"`` or ``"middle"``.

    ``count`` is the model's number of layers; ``None`` only checks the syntax.

    Raises:
        PlanError: the text has another form.
    """
    if text in ("all", "auto", "middle"):
        if count is None:
            return []
        return _middle(count) if text == "middle" else list(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise PlanError(
                f"layers {text!r}",
                f"{part!r}, which is neither an index nor a range",
                'Write layers like "3-26", "4,12,20", "all", "auto" or "middle".',
            )
        chosen.update(range(int(first), int(last or first) + 1))
    return sorted(chosen)


def _middle(count: int) -> list[int]:
    """All but the first and last tenth, at least one layer at each end when there are three."""
    edge = max(1, round(count / 10)) if count > 2 else 0
    return list(range(edge, count - edge))
