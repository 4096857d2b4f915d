"""ReBased: a square whose zero is placed by learning. Two forms of the same idea."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from linearize.kernels.base import HeadShape, Kernel
from linearize.ops.features import Features, Weights
from linearize.ops.partial import fold_heads, unfold_heads
from linearize.ops.quadratic import feature_count, quadratic_features

__all__ = ["Rebased", "RebasedOuter"]


class Rebased(Kernel):
    """``φ(x) = (γ norm(x) + β)²`` element by element, ``κ = φ(q)·φ(k)``.

    γ and β are trained, for queries and for keys of every query head; ``norm`` is layer
    normalisation without an affine map. Either piece can be left out, which gives the ladder of the
    ablation: raw square, norm, affine, both. With an affine map the key features differ between
    query heads and each keeps a state.

    Args:
        shape: head geometry.
        norm: normalise first.
        affine: apply γ and β.
        seed: unused; nothing is random.
    """

    name = "rebased"
    title = "ReBased"
    source = "Linear Transformers with Learnable Kernel Functions (ReBased), element-wise square"

    def __init__(
        self, shape: HeadShape, *, norm: bool = True, affine: bool = True, seed: int = 0
    ) -> None:
        super().__init__(shape, seed=seed)
        self.norm = norm
        self.query_affine = _Affine(shape) if affine else None
        self.key_affine = _Affine(shape) if affine else None
        self.shared_state = not affine

    def settings(self) -> dict[str, Any]:
        affine = self.query_affine is not None
        return {**super().settings(), "norm": self.norm, "affine": affine}

    @property
    def feature_count(self) -> int:
        return self.shape.head_dim

    def query_features(self, q: Tensor) -> Features:
        return Features(self.see_queries(q).square())

    def key_features(self, k: Tensor) -> Features:
        k = self.normalise(k)
        if self.key_affine is not None:
            k = self.key_affine(self.repeat_keys(k))
        return Features(k.square())

    def normalise(self, x: Tensor) -> Tensor:
        """Layer normalisation of the last dimension, if asked for."""
        return layer_norm(x, x.shape[-1:]) if self.norm else x

    def see_queries(self, q: Tensor) -> Tensor:
        """``γ norm(q) + β``, ``[B, Hq, N, d]``."""
        q = self.normalise(q)
        return q if self.query_affine is None else self.query_affine(q)


class RebasedOuter(Rebased):
    """``κ = (q'·k')²`` of the normalised, affine-mapped vectors, as in the released code.

    With the key map written out, ``q'·k' = c + w·norm(k)`` where ``w = q' γ_k`` and ``c = q'·β_k``.
    So the key features are ``[1, n, n nᵀ]`` of ``n = norm(k)`` alone, one state serves all query
    heads of a KV head, and γ_k, β_k enter at readout. Without an affine map c is zero and only the
    products remain. A weight near zero is a difference of larger terms: where it is a query's only
    one (a first token), the state gives it fewer digits than :meth:`weights`.
    """

    name = "rebased-outer"
    title = "ReBased (outer product)"
    source = "Linear Transformers with Learnable Kernel Functions (ReBased), released code"

    def __init__(
        self, shape: HeadShape, *, norm: bool = True, affine: bool = True, seed: int = 0
    ) -> None:
        super().__init__(shape, norm=norm, affine=affine, seed=seed)
        self.shared_state = True

    @property
    def feature_count(self) -> int:
        return feature_count(self.shape.head_dim) - self._unused

    def query_features(self, q: Tensor) -> Features:
        slope, constant = self._read(q)
        dim = q.shape[-1]
        rows, columns = torch.triu_indices(dim, dim, device=q.device)
        twice = torch.where(rows == columns, 1, 2).to(q.dtype)
        products = quadratic_features(slope)[..., 1 + dim :] * twice
        if constant is None:
            return Features(products)
        return Features(torch.cat([constant.square(), 2 * constant * slope, products], dim=-1))

    def key_features(self, k: Tensor) -> Features:
        return Features(quadratic_features(self.normalise(k))[..., self._unused :])

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        slope, constant = self._read(q)
        keys = self.normalise(k).transpose(-1, -2)
        product = unfold_heads(fold_heads(slope, k.shape[1]) @ keys, q.shape[1])
        return Weights((product if constant is None else product + constant).square())

    @property
    def _unused(self) -> int:
        """How many leading features (constant and linear) have no part in the kernel."""
        return 1 + self.shape.head_dim if self.key_affine is None else 0

    def _read(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """``w [B, Hq, N, d]`` and ``c [B, Hq, N, 1]`` (``None`` for zero)."""
        q = self.see_queries(q)
        if self.key_affine is None:
            return q, None
        gamma, beta = self.key_affine.gamma.to(q.dtype), self.key_affine.beta.to(q.dtype)
        return q * gamma[:, None], (q * beta[:, None]).sum(-1, keepdim=True)


class _Affine(nn.Module):
    """``γ x + β`` for ``x [B, Hq, N, d]`` with γ, β ``[Hq, d]``, starting as the identity."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size = (shape.query_heads, shape.head_dim)
        self.gamma = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.beta = nn.Parameter(torch.zeros(size, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.to(x.dtype)[:, None] + self.beta.to(x.dtype)[:, None]
