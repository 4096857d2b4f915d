"""T2R: a learned single-layer feature map, from "Finetuning Pretrained Transformers into RNNs"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linearize.kernels.base import HeadShape, Kernel
from linearize.ops.features import Features

__all__ = ["T2R"]

EPS = 1e-6


class T2R(Kernel):
    """``φ(x) = ReLU(W x + b) + 1e-6``, W and b per query head, the same for queries and keys.

    The paper's map has no floor; without one a query may meet only zero weights and have no output.
    W and b start uniform in ``±1/√d``, as a linear layer does.
    """

    name = "t2r"
    title = "T2R"
    source = "Finetuning Pretrained Transformers into RNNs, section 2"
    shared_state = False

    def __init__(self, shape: HeadShape, *, seed: int = 0) -> None:
        super().__init__(shape, seed=seed)
        heads, dim = shape.query_heads, shape.head_dim
        generator = torch.Generator(device="cpu").manual_seed(seed)
        draw: dict[str, Any] = dict(generator=generator, dtype=torch.float32, device="cpu")
        self.weight = nn.Parameter((torch.rand(heads, dim, dim, **draw) * 2 - 1) * dim**-0.5)
        self.bias = nn.Parameter((torch.rand(heads, dim, **draw) * 2 - 1) * dim**-0.5)

    @property
    def feature_count(self) -> int:
        return self.shape.head_dim

    def query_features(self, q: Tensor) -> Features:
        return self._features(q)

    def key_features(self, k: Tensor) -> Features:
        return self._features(self.repeat_keys(k))

    def _features(self, x: Tensor) -> Features:
        """``x [B, Hq, N, d]`` -> ``[B, Hq, N, d]``."""
        mapped = x @ self.weight.to(x.dtype).transpose(-1, -2) + self.bias.to(x.dtype)[:, None]
        return Features(mapped.relu() + EPS)
