"""Versions that decide a result, stored with every artefact."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Versions of linearize, Python and the packages that compute."""
    found = {"python": platform.python_version()}
    for package in ("linearize", "torch", "transformers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
