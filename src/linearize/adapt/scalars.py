"""Curves to TensorBoard, if it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["Scalars", "available"]


def available() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


class Scalars:
    """A TensorBoard writer, or nothing.

    Args:
        folder: where event files go; ``None`` writes none.
        step: updates done before; later events of an interrupted run are hidden.
    """

    def __init__(self, folder: str | Path | None, step: int) -> None:
        self._writer: Any = None
        if folder is not None and available():
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=step)

    def write(self, step: int, **values: float) -> None:
        """Add one point to every named curve."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        if self._writer is not None:
            self._writer.close()
