"""Versions that decide a result, stored with every artefact."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

__all__ = ["versions"]


def versions(*more: str) -> dict[str, str]:
    """Versions of linearize, Python, the packages that compute, and ``more`` of them."""
    found = {"python": platform.python_version()}
    for package in ("linearize", "torch", "transformers", "safetensors", "numpy", *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
