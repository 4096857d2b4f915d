"""The grouped quadratic on keys that lie in r directions: ``1 + r + r(r+1)/2`` features.

With keys ``k' = U z``, ``z [r]``, every group score is linear in z: ``s_g = (q masked to g)ᵀ U z · scale``.
So ``ε + ‖Lᵀ [1, s]‖² = ε + Σ_l (c_l + w_l·z)²`` with ``w_l = scale · Σ_g L_gl Uᵀ (q masked to g)``: a
quadratic in z whose coefficients the query holds. Exact for the projected keys; groups cost the query
side alone, the state does not know of them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from linearize.ops.features import Features, Weights
from linearize.ops.partial import fold_heads, unfold_heads
from linearize.ops.quadratic import feature_count, quadratic_features

__all__ = ["ProjectedQuadratic"]


class ProjectedQuadratic:
    """OAL on key coordinates ``z`` (see :class:`linearize.ops.quadratic.GroupedQuadratic`).

    Args:
        groups: ``[Hq, d]``; factor: ``[Hq, G+1, G+1]``; eps: as for the grouped quadratic.
        directions: ``[Hkv, d, r]``: ``U`` of every KV head.
        scale: factor on every contribution.
        dtype: precision of features and sums.

    Keys are given as coordinates: ``k [B, Hkv, N, r]``.
    """

    shared_state = True

    def __init__(
        self,
        groups: Tensor,
        factor: Tensor,
        directions: Tensor,
        *,
        eps: float,
        scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        lower = factor.to(dtype).tril()
        heads = torch.arange(groups.shape[0], device=groups.device)[:, None]
        slope = lower[heads, groups.long() + 1] * scale  # [Hq, d, G+1]
        shared = directions.to(dtype).repeat_interleave(len(groups) // len(directions), dim=0)
        maps = slope[..., None] * shared[:, :, None]  # [Hq, d, G+1, r]
        self._maps = pad(maps, (1, 0)).flatten(2)  # [Hq, d, (G+1)(r+1)], nothing for the offsets
        self._offset = pad(lower[:, 0, :, None], (0, directions.shape[-1])).flatten(1)[:, None]
        self._rank = directions.shape[-1]
        self._eps = eps

    def query_features(self, q: Tensor) -> Features:
        """``[ε + Σ c_l², 2 Σ c_l w_l, Σ w_l w_lᵀ packed]``: ``[B, Hq, N, d]`` -> ``[B, Hq, N, F]``."""
        components = self._components(q)
        products = (components.transpose(-1, -2) @ components).flatten(-2)
        place, twice, first = _packing(self._rank + 1, q.dtype, q.device)
        return Features(torch.addcmul(first * self._eps, products.index_select(-1, place), twice))

    def key_features(self, k: Tensor) -> Features:
        """``[1, z, z_r z_t (r ≤ t)]``."""
        return Features(quadratic_features(k))

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """``G + 1`` products of width r + 1, squared and summed; of one query all at once."""
        heads, kv_heads = q.shape[1], k.shape[1]
        keys = pad(k, (1, 0), value=1.0).transpose(-1, -2)
        components = self._components(q)
        parts = components.split(1, -2) if q.shape[2] > 1 else [components]
        total: Tensor | float = self._eps
        for part in parts:
            scores = unfold_heads(fold_heads(part.flatten(2, 3), kv_heads) @ keys, heads)
            squared = scores.square()
            total = total + (squared.sum(2, keepdim=True) if q.shape[2] == 1 else squared)
        assert isinstance(total, Tensor)
        return Weights(total)

    def _components(self, q: Tensor) -> Tensor:
        """``[c_l, w_l]`` of every row l of the factor: ``[B, Hq, N, G+1, r+1]``."""
        return (q @ self._maps + self._offset).unflatten(-1, (-1, self._rank + 1))

    @property
    def feature_count(self) -> int:
        """``1 + r + r(r+1)/2``."""
        return feature_count(self._rank)


@cache
def _packing(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where the upper triangle of a flat ``[size, size]`` lies, how often it counts, and its first."""
    rows, columns = torch.triu_indices(size, size, device=device)
    twice = 2 - (rows == columns).to(dtype)
    return rows * size + columns, twice, torch.eye(1, len(rows), dtype=dtype, device=device)[0]
