"""TaylorShift: the second-order Taylor expansion on the unit sphere, with a temperature."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from linearize.kernels.base import HeadShape
from linearize.kernels.based import Based

__all__ = ["TaylorShift"]


class TaylorShift(Based):
    """``1 + s + s²/2`` with ``s = τ q̂·k̂``, unit-normalised; τ per query head, 1 at the start.

    τ scales the queries, so one state serves all query heads of a KV head. The released output
    normalisation, which depends on the sequence length, is omitted.
    """

    name = "taylorshift"
    title = "TaylorShift"
    source = "TaylorShift: Shifting the Complexity of Self-Attention, section 3 (Taylor-Softmax)"

    def __init__(self, shape: HeadShape, *, seed: int = 0) -> None:
        super().__init__(shape, seed=seed)
        self.temperature = nn.Parameter(torch.ones(shape.query_heads, dtype=torch.float32))

    def see_queries(self, q: Tensor) -> Tensor:
        return normalize(q, dim=-1) * self.temperature.to(q.dtype)[:, None, None]

    def see_keys(self, k: Tensor) -> Tensor:
        return normalize(k, dim=-1)
