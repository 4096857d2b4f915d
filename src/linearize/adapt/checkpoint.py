"""The checkpoint of an adaptation under way: one file, always the old one or the new one."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.adapt.result import Curves
from linearize.errors import CheckpointError, OutputError

__all__ = ["FILE", "CheckpointFile", "RunState"]

FILE = "checkpoint.pt"


@dataclass
class RunState:
    """Where a run is.

    Random numbers are no part of it: dropout of every forward pass is seeded by its number.

    Attributes:
        step: updates done. curves: so far. weights: the trained tensors by name. best: those of the
            best validation. optimizer: the state of AdamW. seconds: spent so far.
    """

    step: int = 0
    curves: Curves = field(default_factory=Curves)
    weights: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class CheckpointFile:
    """The checkpoint in a folder, with everything that decides the run it belongs to.

    Args:
        folder: where it is; ``None`` keeps nothing.
        identity: settings, model and text as JSON.
    """

    def __init__(self, folder: str | Path | None, identity: dict[str, Any]) -> None:
        self.path = None if folder is None else Path(folder) / FILE
        self._identity = identity

    def read(self) -> RunState | None:
        """The stored state, or ``None`` if there is none.

        Raises:
            CheckpointError: it is damaged, or belongs to another run: the message names what differs.
        """
        if self.path is None or not self.path.is_file():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            identity, state = content["identity"], content["state"]
            state["curves"] = Curves(**state["curves"])
            found = RunState(**state)
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            raise CheckpointError(
                f"the checkpoint {self.path}",
                f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                "Start again with --overwrite.",
            ) from error
        for name in sorted(identity.keys() | self._identity.keys()):
            wanted, there = self._identity.get(name), identity.get(name)
            if wanted != there:
                raise CheckpointError(
                    f"resuming with {name}={wanted!r}",
                    f"{name}={there!r} in {self.path}",
                    "Resume with the model, text and settings of the first run, or start again "
                    "with --overwrite.",
                )
        return found

    def write(self, state: RunState) -> None:
        """Replace the checkpoint; until the new one is whole on disk, the old one stays.

        Raises:
            OutputError: the disk refuses.
        """
        if self.path is None:
            return
        content = io.BytesIO()
        numbers = vars(state) | {"curves": vars(state.curves)}
        torch.save({"identity": self._identity, "state": numbers}, content)
        scratch = self.path.with_name(f".{self.path.name}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self.path)
            _sync(self.path.parent)
        except OSError as error:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            kept = (
                "The last good checkpoint is kept" if self.path.is_file() else "There is none yet"
            )
            raise OutputError(
                f"writing the checkpoint {self.path}",
                f"{error.strerror or error}",
                f"{kept}: free space or make the folder writable, then --resume.",
            ) from error


def _sync(folder: Path) -> None:
    """Make a rename inside a folder last, where folders can be synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
