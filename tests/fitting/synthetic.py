"""Activations with a few large coordinates, as pretrained heads have them, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linearize.fitting import Activations, Calibration
from linearize.plan import Plan

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 6, 3
SCALE = DIM**-0.5


def activations(
    blocks: int = 2, tokens: int = 24, *, seed: int = 0, size: float = 1.0
) -> Activations:
    """Queries and keys whose last two coordinates are larger and carry a common offset."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.tensor([0.4, 0.5, 0.6, 0.7, 1.4, 2.0]) * size
    offset = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.8, -1.0]) * size
    return Activations(
        torch.randn(blocks, HEADS, tokens, DIM, generator=g) * weight + offset,
        torch.randn(blocks, KV_HEADS, tokens, DIM, generator=g) * weight + offset,
        torch.randn(blocks, KV_HEADS, tokens, VALUE_DIM, generator=g),
    )


def calibration(
    plan: Plan, *, blocks: int = 3, tokens: int = 32, seed: int = 0, size: float = 1.5
) -> Calibration:
    """One layer's data: other sequences for prompts, fit and validation, from one distribution."""
    prompts = activations(4, 12, seed=seed, size=size)
    fit = activations(blocks, tokens, seed=seed + 1, size=size)
    validation = activations(2, tokens, seed=seed + 2, size=size)
    return Calibration(
        prompts, fit, validation, prompts, fit, validation, scale=SCALE, layer=0, plan=plan
    )


def teacher(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``softmax_outputs`` of another teacher: ``attention(q, k, v)`` on whole sequences."""

    def outputs(
        data: Activations, scale: float, block: int, query_at: Tensor | None = None
    ) -> Tensor:
        part = slice(block, block + 1)
        result = attention(data.q[part], data.k[part], data.v[part])[0]
        return result if query_at is None else result[:, query_at]

    return outputs
