"""Queries, keys and values of a layer, seen from a few positions; kernels moved off their start."""

from __future__ import annotations

import torch
from torch import Tensor

import kernel_cases as cases
from linearize.diagnose.hybrid import Sampled, sample
from linearize.fitting import Activations
from linearize.kernels import HeadShape, Kernel

SHAPE = HeadShape(4, 2, 8, 5, 8**-0.5)
TOKENS, SEQUENCES, POSITIONS = 40, 2, 6


def activations(*, tokens: int = TOKENS, seed: int = 0, size: float = 1.5) -> Activations:
    """Keys with two large coordinates, queries that resemble some key."""
    q, k, v = cases.inputs(SHAPE, tokens, batch=SEQUENCES, seed=seed, dtype=torch.float32)
    large = torch.ones(8)
    large[[2, 5]] = 2.5
    return Activations(size * q * large, size * k * large, v)


def sampled(**options: float) -> Sampled:
    source = torch.Generator().manual_seed(3)
    return sample(activations(**options), SHAPE.scale, POSITIONS, source)  # type: ignore[arg-type]


def kernel(name: str, seed: int = 0) -> Kernel:
    return cases.make(name, SHAPE, seed)


def selection(*rows: list[int]) -> Tensor:
    """Boolean ``[Hq, d]`` from the coordinates of every head."""
    chosen = torch.zeros(SHAPE.query_heads, SHAPE.head_dim, dtype=torch.bool)
    for head, row in enumerate(rows):
        chosen[head, row] = True
    return chosen


SOME = ([2, 5], [0], [1, 3, 6], [7, 2])
