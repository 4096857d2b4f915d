"""Finished parts of a long measurement, kept so that an interruption costs one part at most."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from linearize.errors import CheckpointError
from linearize.output import write_text

__all__ = ["Parts", "model_identity", "text_identity"]

T = TypeVar("T")
IDENTITY = 64  # numbers of every weight that tell one model from another


class Parts:
    """Parts as JSON files of their own, each with the settings it was made with.

    Args:
        folder: where they are; ``None`` keeps nothing.
        settings: everything that decides a part besides its name, as JSON.
    """

    def __init__(self, folder: str | Path | None, settings: dict[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._settings = settings

    def get(self, name: str) -> Any:
        """A stored part, or ``None``.

        Raises:
            CheckpointError: it is damaged or was made with other settings.
        """
        if self._folder is None or not (path := self._folder / f"{name}.json").is_file():
            return None
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            settings, value = stored["settings"], stored["value"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the stored part {path}",
                f"{type(error).__name__}: {error}",
                "Delete this file; it will be made again.",
            ) from error
        for key, wanted in self._settings.items():
            if settings.get(key) != wanted:
                raise CheckpointError(
                    f"parts with {key}={wanted!r}",
                    f"{key}={settings.get(key)!r} in {path}",
                    "Resume with the settings, text and model of the first run, or use another folder.",
                )
        return value

    def read(self, name: str, kind: type[T], what: str) -> T | None:
        """A stored part as the dataclass it was made from, nested ones too, or ``None``.

        ``what`` is its name in the error.

        Raises:
            CheckpointError: as for :meth:`get`, or its fields are not what this version writes.
        """
        value = self.get(name)
        try:
            return None if value is None else TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            raise CheckpointError(
                f"the stored {what} {name}",
                "; ".join(f"{each['msg']} at {each['loc']}" for each in error.errors()[:3]),
                "Delete its file; it will be made again.",
            ) from error

    def put(self, name: str, value: Any) -> None:
        """Store a part at once."""
        if self._folder is not None:
            content = json.dumps({"settings": self._settings, "value": value})
            write_text(self._folder / f"{name}.json", content + "\n")


def model_identity(model: PreTrainedModel) -> str:
    """A short hash of a model: names, shapes and the first numbers of all its weights."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        head = weight.detach().flatten()[:IDENTITY].double().cpu()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(head.numpy().tobytes())
    return digest.hexdigest()[:16]


def text_identity(tokens: Tensor) -> str:
    """A short hash of a text."""
    return hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:16]
