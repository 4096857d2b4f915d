"""DiJiang: a weighted cosine transform of queries and keys under a softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from linearize.kernels.base import HeadShape, Kernel
from linearize.ops.features import Features

__all__ = ["DiJiang"]


class DiJiang(Kernel):
    """``φ(x) = softmax(x C diag(w))``, ``κ = Σ_f D_f φ_f(q) · D_f φ_f(k)`` with ``D = exp(θ)``.

    ``x`` is a query or key times ``√scale`` (``d^{-1/4}``), C the orthonormal DCT-II matrix (a row
    per frequency, as in the released code) and w inverse-normal samples ``Φ^{-1}(U(0, 1))``, drawn
    once for the layer. θ is trained, one vector per query head, zero at the start. Both factors D
    are applied to the query, so the key features are those of the layer and one state serves all
    query heads of a KV head. The released decay factors, group norm and gate are omitted.
    """

    name = "dijiang"
    title = "DiJiang"
    source = "DiJiang: Efficient Large Language Models through Compact Kernelization, section 3"
    shared_state = True

    def __init__(self, shape: HeadShape, *, seed: int = 0) -> None:
        super().__init__(shape, seed=seed)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        uniform = torch.rand(shape.head_dim, generator=generator, dtype=torch.float64, device="cpu")
        samples = torch.special.ndtri(uniform.clamp(min=1e-12))
        self.projection: Tensor
        self.register_buffer("projection", (_cosines(shape.head_dim) * samples).float())
        size = (shape.query_heads, shape.head_dim)
        self.theta = nn.Parameter(torch.zeros(size, dtype=torch.float32))

    @property
    def feature_count(self) -> int:
        return self.shape.head_dim

    def query_features(self, q: Tensor) -> Features:
        weight = torch.exp(2 * self.theta.to(q.dtype))[:, None]
        return Features(self._transform(q) * weight)

    def key_features(self, k: Tensor) -> Features:
        return Features(self._transform(k))

    def _transform(self, x: Tensor) -> Tensor:
        return ((x * self.shape.scale**0.5) @ self.projection.to(x.dtype)).softmax(-1)


def _cosines(dim: int) -> Tensor:
    """The orthonormal DCT-II matrix ``[frequency, position]``, fp64."""
    at = torch.arange(dim, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi / dim * at[:, None] * (at + 0.5)) * math.sqrt(2 / dim)
    matrix[0] *= math.sqrt(0.5)
    return matrix
