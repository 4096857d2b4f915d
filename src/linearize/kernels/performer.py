"""Performer: positive orthogonal random features of the softmax kernel (FAVOR+)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.errors import PlanError
from linearize.kernels.base import HeadShape, Kernel
from linearize.ops.features import Features

__all__ = ["Performer"]


class Performer(Kernel):
    """``φ(x) = exp(ω x − ‖x‖²/2) / √m``, whose inner products are ``e^{q·k·scale}`` on average.

    ``x`` is a query or key times ``√scale`` (``d^{-1/4}``); the m rows of ω are orthogonal in blocks
    of d and as long as Gaussian vectors, drawn for every query head and fixed. Features and sums
    are fp64.

    The paper shifts log-features by a query's own maximum and by one maximum over all keys, and
    lets both cancel in the normalised output. Here every token is shifted by its own maximum and
    the shift travels with the features as their ``log_scale``. That is the streaming form of the
    same thing: nothing looks ahead, and the weights keep their absolute size beside exact keys.

    Args:
        shape: head geometry.
        features: m, the number of random features of a query head.
        seed: seed of the projections.

    Raises:
        PlanError: ``features`` is not positive.
    """

    name = "performer"
    title = "Performer"
    source = "Rethinking Attention with Performers, sections 2.3-2.4 (FAVOR+)"
    shared_state = False
    dtype = torch.float64

    def __init__(self, shape: HeadShape, *, features: int = 250, seed: int = 0) -> None:
        super().__init__(shape, seed=seed)
        if features < 1:
            raise PlanError(
                f"performer with features={features}",
                "a count below 1",
                "Set features to 1 or more.",
            )
        generator = torch.Generator(device="cpu").manual_seed(seed)
        rows = [
            _gaussian_orthogonal(features, shape.head_dim, generator)
            for _ in range(shape.query_heads)
        ]
        self.projection: Tensor
        self.register_buffer("projection", torch.stack(rows).float())  # ω, [Hq, m, d]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "features": self.feature_count}

    @property
    def feature_count(self) -> int:
        return self.projection.shape[1]

    def query_features(self, q: Tensor) -> Features:
        return self._features(q)

    def key_features(self, k: Tensor) -> Features:
        return self._features(self.repeat_keys(k))

    def _features(self, x: Tensor) -> Features:
        """``x [B, Hq, N, d]`` -> positive features and the logarithm they were divided by."""
        x = x * self.shape.scale**0.5
        projected = x @ self.projection.to(x.dtype).transpose(-1, -2)
        log = projected - x.square().sum(-1, keepdim=True) / 2
        shift = log.detach().amax(-1, keepdim=True)
        return Features(torch.exp(log - shift) * self.feature_count**-0.5, shift)


def _gaussian_orthogonal(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """``[rows, dim]`` in fp64: every row is N(0, I), those of one block of ``dim`` are orthogonal."""
    blocks = []
    for start in range(0, rows, dim):
        square = torch.randn(dim, dim, generator=generator, dtype=torch.float64, device="cpu")
        basis, triangle = torch.linalg.qr(square)
        uniform = basis * triangle.diagonal().sign()  # the sign makes the basis Haar distributed
        blocks.append(uniform.T[: rows - start])
    gaussian = torch.randn(rows, dim, generator=generator, dtype=torch.float64, device="cpu")
    return torch.cat(blocks) * gaussian.norm(dim=1, keepdim=True)
