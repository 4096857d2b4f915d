"""The errors users see. Each says what was asked, what was found and what to do."""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CheckpointError",
    "LinearizeError",
    "ModelError",
    "OutputError",
    "PlanError",
    "TextError",
]


class LinearizeError(Exception):
    """Base of every error raised on purpose.

    Args:
        asked: what the caller requested, e.g. ``"layers 3-99"``.
        found: what is there instead, e.g. ``"the model has layers 0-29"``.
        remedy: what to do about it, as an instruction.
    """

    def __init__(self, asked: str, found: str, remedy: str) -> None:
        self.asked, self.found, self.remedy = asked, found, remedy
        super().__init__(f"asked for {asked}; found {found}. {remedy}")


class PlanError(LinearizeError):
    """The plan itself, or its fit to the model, is not possible."""


class ModelError(LinearizeError):
    """The model cannot be loaded, inspected, or run as needed."""


class TextError(LinearizeError):
    """The text, blocks or task file are missing, too short or malformed."""


class CheckpointError(LinearizeError):
    """A folder is not a converted model, is damaged, or belongs to another base."""


class BackendError(LinearizeError):
    """A named backend cannot run here."""


class OutputError(LinearizeError):
    """An output path cannot be written without destroying something."""
