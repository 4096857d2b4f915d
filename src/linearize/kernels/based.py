"""Based: the second-order Taylor expansion of the exponential."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.base import Kernel
from linearize.ops.features import Features, Grouped, Weights
from linearize.ops.partial import fold_heads, unfold_heads
from linearize.ops.quadratic import feature_count, quadratic_features

__all__ = ["Based"]


class Based(Kernel):
    """``1 + t + t²/2`` of the logit ``t = q·k·scale``; never below 0.5, so it cannot score zero.

    Nothing is learned, and the key features are the keys' own products: one state serves all query
    heads of a KV head.
    """

    name = "based"
    title = "Based"
    source = (
        "Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff, section 4"
    )

    @property
    def feature_count(self) -> int:
        return feature_count(self.shape.head_dim)

    def query_features(self, q: Tensor) -> Features:
        """``[1, x_r, x_r x_t (r ≤ t)]`` times the Taylor coefficient of every product."""
        dim = q.shape[-1]
        rows, columns = torch.triu_indices(dim, dim, device=q.device)
        quadratic = torch.where(rows == columns, 0.5, 1.0).to(q.dtype)
        coefficients = torch.cat([quadratic.new_ones(1 + dim), quadratic])
        return Features(quadratic_features(self.see_queries(q), coefficients))

    def key_features(self, k: Tensor) -> Features:
        """``[1, x_r, x_r x_t (r ≤ t)]``."""
        return Features(quadratic_features(self.see_keys(k)))

    def grouped(self, q: Tensor, k: Tensor) -> Grouped:
        """``1/2 + (1 + t)²/2``: one group of all coordinates."""
        heads, dim = q.shape[1], q.shape[3]
        factor = q.new_tensor([[0.5**0.5, 0.0], [0.5**0.5, 0.0]]).expand(heads, -1, -1)
        groups = torch.zeros(heads, dim, dtype=torch.long, device=q.device)
        return Grouped(self.see_queries(q), self.see_keys(k), groups, factor, eps=0.5, scale=1.0)

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """The polynomial of the logits, as ``((1 + t)² + 1) / 2``."""
        queries, keys = self.see_queries(q), self.see_keys(k)
        logits = unfold_heads(fold_heads(queries, k.shape[1]) @ keys.transpose(-1, -2), q.shape[1])
        return Weights(((1 + logits).square() + 1) / 2)

    def see_queries(self, q: Tensor) -> Tensor:
        """The vectors ``[B, Hq, N, d]`` whose inner products with :meth:`see_keys` are t."""
        return q * self.shape.scale

    def see_keys(self, k: Tensor) -> Tensor:
        """``[B, Hkv, N, d]``; independent of the query head."""
        return k
