"""Positive quadratic kernels in the coordinates' contributions, and their linear-time features.

With ``x_r = q_r k_r · scale`` the dimension-aware kernel is ``a + Σ b_r x_r + Σ C_rt x_r x_t``; the
grouped kernel of OAL, ``ε + ‖Lᵀ s̄‖²``, is the case ``C = M_{g(r) g(t)}`` with ``M = L Lᵀ`` (OAL paper,
sections 4.1 and 4.3). Both are read from one packed symmetric state of ``1 + d + d(d+1)/2`` features.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from linearize.ops.features import Features, Grouped, Weights
from linearize.ops.partial import fold_heads, unfold_heads

__all__ = [
    "DimensionQuadratic",
    "GroupedQuadratic",
    "feature_count",
    "packed_coefficients",
    "quadratic_features",
]

FEW = 4  # tokens up to which a gather of all pairs is faster than a loop over rows


def feature_count(dim: int) -> int:
    """``1 + d + d(d+1)/2``: constant, linear and packed symmetric quadratic features."""
    return 1 + dim + dim * (dim + 1) // 2


class DimensionQuadratic:
    """The general dimension-aware quadratic ``a + Σ b_r x_r + Σ C_rt x_r x_t``.

    Args:
        a: ``[Hq]``; b: ``[Hq, d]``; c: ``[Hq, d, d]``, symmetric.
        scale: factor on every contribution.
        dtype: precision of features and sums.
    """

    shared_state = True

    def __init__(
        self, a: Tensor, b: Tensor, c: Tensor, *, scale: float, dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        rows, columns = _pairs(b.shape[-1], b.device)
        twice = torch.where(rows == columns, 1, 2).to(dtype)
        quadratic = c.to(dtype)[:, rows, columns] * (twice * scale**2)
        coefficients = torch.cat([a.to(dtype)[:, None], b.to(dtype) * scale, quadratic], dim=1)
        self._coefficients = coefficients[:, None]  # [Hq, 1, F], multiplicities included

    def query_features(self, q: Tensor) -> Features:
        """Coefficients and multiplicities are folded in here, so the state needs none."""
        return Features(quadratic_features(q, self._coefficients))

    def key_features(self, k: Tensor) -> Features:
        """``[1, k, k_r k_t (r ≤ t)]``."""
        return Features(quadratic_features(k))

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """All pairs through the features (the general form has no shorter route)."""
        query, keys = self.query_features(q).values, self.key_features(k).values
        return Weights(
            unfold_heads(fold_heads(query, k.shape[1]) @ keys.transpose(-1, -2), q.shape[1])
        )


class GroupedQuadratic(DimensionQuadratic):
    """OAL: ``ε + ‖Lᵀ [1, s_1, …, s_G]‖²`` with ``s_g = Σ_{r in g} x_r``.

    Args:
        groups: ``[Hq, d]`` integer group of every coordinate, ``0 … G-1``.
        factor: ``[Hq, G+1, G+1]``; the part above the diagonal is ignored. Heads with fewer groups
            are zero-padded.
        eps: the positive floor ``ε``.
    """

    def __init__(
        self,
        groups: Tensor,
        factor: Tensor,
        *,
        eps: float,
        scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        lower = factor.to(dtype).tril()
        gram = lower @ lower.transpose(-1, -2)
        heads = torch.arange(groups.shape[0], device=groups.device)[:, None]
        member = groups.long() + 1
        super().__init__(
            a=gram[:, 0, 0] + eps,
            b=2 * gram[heads, 0, member],
            c=gram[heads[..., None], member[:, :, None], member[:, None, :]],
            scale=scale,
            dtype=dtype,
        )
        self._groups, self._lower = groups.long(), lower
        self._eps, self._scale = eps, scale
        self._offset = lower[:, 0]  # [Hq, G+1]: constant of every component of Lᵀ s̄
        self._slope = lower[heads, member] * scale  # [Hq, d, G+1]: its slope in q_r k_r

    def grouped(self, q: Tensor, k: Tensor) -> Grouped:
        """See :class:`linearize.ops.features.Grouped`."""
        return Grouped(q, k, self._groups, self._lower, self._eps, self._scale)

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """``G + 1`` small products of group-weighted queries with the keys, squared and summed."""
        heads, kv_heads, keys = q.shape[1], k.shape[1], k.transpose(-1, -2)
        if q.shape[2] == k.shape[2] == 1:  # one pair: all components at once
            contributions = (q.unflatten(1, (kv_heads, -1)) * k[:, :, None]).flatten(1, 2)
            components = contributions @ self._slope + self._offset[:, None]
            return Weights(components.square_().sum(-1, keepdim=True) + self._eps)
        total: Tensor | float = self._eps
        for component in range(self._offset.shape[1]):
            weighted = q * self._slope[:, None, :, component]
            score = unfold_heads(fold_heads(weighted, kv_heads) @ keys, heads)
            total = total + (score + self._offset[:, component, None, None]).square()
        assert isinstance(total, Tensor)
        return Weights(total)


def packed_coefficients(groups: Tensor, factor: Tensor, eps: float, scale: float) -> Tensor:
    """Coefficients of the packed products in ``ε + ‖Lᵀ [1, s]‖²``, multiplicities included.

    ``groups [Hq, d]``, ``factor [Hq, G+1, G+1]`` lower-triangular -> ``[Hq, 1 + d + d(d+1)/2]``.
    """
    dim, size = groups.shape[1], factor.shape[-1]
    gram = factor @ factor.transpose(-1, -2)
    rows, columns = _pairs(dim, groups.device)
    member = groups + 1
    products = member[:, rows] * size + member[:, columns]
    at = torch.cat([torch.zeros_like(member[:, :1]), member, products], dim=1)
    twice = torch.where(rows == columns, 1, 2).to(factor) * scale**2
    times = torch.cat([twice.new_ones(1), twice.new_full((dim,), 2 * scale), twice])
    constant = torch.cat([twice.new_full((1,), eps), twice.new_zeros(len(times) - 1)])
    return gram.flatten(1).gather(1, at) * times + constant


def quadratic_features(x: Tensor, coefficients: Tensor | None = None) -> Tensor:
    """``[1, x_r, x_r x_t (r ≤ t, row by row)]``, times ``coefficients`` (broadcast) if given.

    ``[..., d]`` -> ``[..., 1 + d + d(d+1)/2]``.
    """
    features: Tensor = _QuadraticFeatures.apply(x, coefficients)
    return features


class _QuadraticFeatures(torch.autograd.Function):
    """Row-wise slices into one buffer: the fastest form in plain PyTorch on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficients: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, coefficients)
        features = _products(x)
        return features if coefficients is None else features.mul_(coefficients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, coefficients = ctx.saved_tensors
        grad, grad_coefficients = grads[0], None
        if coefficients is not None:
            if ctx.needs_input_grad[1]:
                grad_coefficients = (grad * _products(x)).sum_to_size(coefficients.shape)
            grad = grad * coefficients
        dim = x.shape[-1]
        rows, columns = _pairs(dim, x.device)
        place = torch.empty(dim, dim, dtype=torch.long, device=x.device)
        place[rows, columns] = place[columns, rows] = torch.arange(len(rows), device=x.device)
        full = grad[..., 1 + dim :][..., place.flatten()].unflatten(-1, (dim, dim))
        full.diagonal(dim1=-2, dim2=-1).mul_(2)
        return grad[..., 1 : 1 + dim] + (full @ x[..., None])[..., 0], grad_coefficients


def _products(x: Tensor) -> Tensor:
    dim = x.shape[-1]
    if x.shape[-2] <= FEW:
        rows, columns = (at.expand(*x.shape[:-1], -1) for at in _pairs(dim, x.device))
        products = x.gather(-1, rows) * x.gather(-1, columns)
        return torch.cat([torch.ones_like(x[..., :1]), x, products], dim=-1)
    features = x.new_empty(*x.shape[:-1], feature_count(dim))
    features[..., 0] = 1
    features[..., 1 : 1 + dim] = x
    start = 1 + dim
    for row in range(dim):
        stop = start + dim - row
        torch.mul(x[..., row:], x[..., row : row + 1], out=features[..., start:stop])
        start = stop
    return features


@cache
def _pairs(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(dim, dim, device=device)
    return rows, columns
