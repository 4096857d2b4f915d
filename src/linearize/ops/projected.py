"""The grouped quadratic on keys that lie in r directions: ``1 + r + r(r+1)/2`` features.

With keys ``k' = U z``, ``z [r]``, every group score is linear in z: ``s_g = (q masked to g)ᵀ U z · scale``.
So ``ε + ‖Lᵀ [1, s]‖² = ε + Σ_l (c_l + w_l·z)²`` with ``w_l = scale · Σ_g L_gl Uᵀ (q masked to g)``: a
quadratic in z whose coefficients the query holds. Exact for the projected keys; groups cost the query
side alone, the state does not know of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        self._rank = directions.shape[-1]
        self._offset = lower[:, 0]  # [Hq, G+1]
        self._constant = self._offset.square().sum(-1) + eps
        self._maps = slope[..., None] * shared[:, :, None]  # [Hq, d, G+1, r]
        self._eps = eps

    def query_features(self, q: Tensor) -> Features:
        """``[ε + Σ c_l², 2 Σ c_l w_l, Σ w_l w_lᵀ packed]``: ``[B, Hq, N, d]`` -> ``[B, Hq, N, F]``."""
        components = (q @ self._maps.flatten(2)).unflatten(-1, self._maps.shape[2:])
        linear = 2 * (components * self._offset[:, None, :, None]).sum(-2)
        constant = self._constant[:, None, None].expand(*q.shape[:3], 1)
        twice = torch.full((self._rank, self._rank), 2.0, dtype=q.dtype, device=q.device)
        twice.fill_diagonal_(1)
        products = [
            (components[..., row:] * components[..., row : row + 1]).sum(-2) * twice[row, row:]
            for row in range(self._rank)
        ]
        return Features(torch.cat([constant, linear, *products], dim=-1))

    def key_features(self, k: Tensor) -> Features:
        """``[1, z, z_r z_t (r ≤ t)]``."""
        return Features(quadratic_features(k))

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """``G + 1`` products of width r, squared and summed."""
        heads, kv_heads, keys = q.shape[1], k.shape[1], k.transpose(-1, -2)
        total: Tensor | float = self._eps
        for component in range(self._offset.shape[1]):
            weighted = q @ self._maps[:, :, component]
            score = unfold_heads(fold_heads(weighted, kv_heads) @ keys, heads)
            total = total + (score + self._offset[:, component, None, None]).square()
        assert isinstance(total, Tensor)
        return Weights(total)

    @property
    def feature_count(self) -> int:
        """``1 + r + r(r+1)/2``."""
        return feature_count(self._rank)
