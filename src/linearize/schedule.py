"""How a learning rate falls."""

from __future__ import annotations

import math

__all__ = ["cosine"]


def cosine(done: int, total: int) -> float:
    """Share of the peak after ``done`` of ``total`` steps: 1 at first, 0 at the end."""
    return (1 + math.cos(math.pi * done / total)) / 2
