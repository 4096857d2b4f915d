"""Writing results so that an interruption leaves either the old or the new, never half of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linearize.errors import OutputError

__all__ = ["check_writable", "new_folder", "write_json", "write_text"]


def check_writable(folder: str | Path, overwrite: bool) -> Path:
    """Refuse early to write where something would be lost.

    Raises:
        OutputError: the folder has content and ``overwrite`` is false, or cannot be created.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"output folder {folder}", "a file of that name", "Choose another path.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise OutputError(
            f"output folder {folder}",
            "a folder that is not empty",
            "Choose another, or --overwrite.",
        )
    parent = folder.resolve().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise OutputError(f"output folder {folder}", f"{parent} is not writable", "Choose another.")
    return folder


@contextmanager
def new_folder(folder: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling to write into; it takes the folder's place when the block succeeds.

    Raises:
        OutputError: see :func:`check_writable`, or the disk refuses the write.
    """
    folder = check_writable(folder, overwrite)
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        yield scratch
        _open_up(scratch)
        old = folder.with_name(f".{folder.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        scratch.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            f"writing {folder}", f"{error.strerror or error}", "Free space or choose another disk."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _open_up(folder: Path) -> None:
    """Give files the permissions new files have here; some writers make them private."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~mask)


def write_text(path: str | Path, text: str) -> None:
    """Write a file at once, creating its folder.

    Raises:
        OutputError: the disk refuses.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise OutputError(
            f"writing {path}", f"{error.strerror or error}", "Choose a writable path."
        ) from error


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON, indented; see :func:`write_text`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=True) + "\n")
