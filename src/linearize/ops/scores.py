"""Grouped quadratic weights pair by pair, tile by tile, and their gradients.

``κ = ε + ‖Lᵀ s̄‖²`` with ``s̄ = [1, s_1, …, s_G]``. The groups partition the coordinates, so all group
scores together cost one inner product a pair; what is left are products with the small matrix L.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GroupLayout", "PairWeights"]

CONTIGUOUS = torch.contiguous_format


class GroupLayout:
    """Coordinates sorted by group, every group padded to its size in the largest head.

    Args:
        groups: ``[H, d]``, the group of each coordinate, ``0 … count-1``.
        count: number of groups G.
    """

    def __init__(self, groups: Tensor, count: int) -> None:
        heads, dim = groups.shape
        sizes = torch.stack([(groups == g).sum(1) for g in range(count)], dim=1)  # [H, G]
        widths = sizes.amax(0)
        self.bounds = [0, *widths.cumsum(0).tolist()]
        self.trivial = count == 1
        if self.trivial:
            return
        order = groups.argsort(dim=1, stable=True)
        group = groups.gather(1, order)
        before = sizes.cumsum(1) - sizes
        rank = torch.arange(dim, device=groups.device) - before.gather(1, group)
        place = (widths.cumsum(0) - widths)[group] + rank  # where each sorted coordinate goes
        self._take = groups.new_full((heads, self.bounds[-1]), dim).scatter_(1, place, order)
        self._back = torch.empty_like(order).scatter_(1, order, place)

    def spread(self, x: Tensor) -> Tensor:
        """``[H, n, d]`` -> ``[H, n, K]``, zeros in the padding."""
        if self.trivial:
            return x
        padded = torch.cat([x, x.new_zeros(*x.shape[:2], 1)], dim=2)
        return padded.gather(2, self._take[:, None].expand(-1, x.shape[1], -1))

    def gather(self, x: Tensor) -> Tensor:
        """Undo :meth:`spread`."""
        if self.trivial:
            return x
        return x.gather(2, self._back[:, None].expand(-1, x.shape[1], -1))


class PairWeights:
    """Weights of tiles of queries and keys of one call.

    Args:
        q: ``[H, N, d]``; k: ``[Hk, N, d]``, query head h reads ``h // (H / Hk)``.
        layout: the groups.
        lower: L, ``[H, G+1, G+1]``, zero above the diagonal.
        eps, scale: numbers of the kernel.
        tile: the largest tile ``(queries, keys)``.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        layout: GroupLayout,
        lower: Tensor,
        eps: float,
        scale: float,
        tile: tuple[int, int],
    ) -> None:
        self._layout, self._lower, self._eps, self._scale = layout, lower, eps, scale
        self._heads, self._kv_heads = q.shape[0], k.shape[0]
        self._q = layout.spread(q * scale)
        self._k = layout.spread(k.repeat_interleave(q.shape[0] // k.shape[0], dim=0))
        components = lower.shape[1]
        size = self._heads * tile[0] * tile[1]
        self._scores = q.new_empty(components, size)
        self._scores[0] = 1
        self._components = q.new_empty(components * size)
        self._weights = q.new_empty(size)

    def tile(self, rows: slice, keys: slice) -> Tensor:
        """``[H, rows, keys]``, in a buffer that the next call overwrites."""
        queries, count = rows.stop - rows.start, keys.stop - keys.start
        pairs, heads = queries * count, self._heads
        bounds = self._layout.bounds
        for group in range(len(bounds) - 1):
            part = slice(bounds[group], bounds[group + 1])
            score = self._scores[group + 1, : heads * pairs].view(heads, queries, count)
            torch.bmm(self._q[:, rows, part], self._k[:, keys, part].transpose(1, 2), out=score)
        components = self._component_tile(pairs)
        torch.bmm(self._lower.transpose(1, 2), self._score_tile(pairs), out=components)
        weights = self._weights[: heads * pairs].view(heads, pairs)
        torch.mul(components[:, 0], components[:, 0], out=weights)
        for number in range(1, components.shape[1]):
            weights.addcmul_(components[:, number], components[:, number])
        return weights.add_(self._eps).view(heads, queries, count)

    def start_backward(self) -> None:
        """Zero the gradients that :meth:`backward` adds to."""
        # coordinates in front: a group of few would make a narrow product
        self._grad_q = torch.zeros_like(self._q.transpose(1, 2), memory_format=CONTIGUOUS)
        self._grad_k = torch.zeros_like(self._k.transpose(1, 2), memory_format=CONTIGUOUS)
        self._grad_lower = torch.zeros_like(self._lower)
        self._inner = self._lower[:, 1:].contiguous()  # the constant has no gradient
        self._by_group = torch.empty_like(self._components)

    def backward(self, rows: slice, keys: slice, grad: Tensor) -> None:
        """Add the gradients of the tile computed last, for ``grad [H, rows, keys]``."""
        heads, queries, count = grad.shape
        pairs = queries * count
        components, scores = self._component_tile(pairs), self._score_tile(pairs)
        components.mul_(grad.view(heads, 1, pairs))  # half the gradient of every component
        self._grad_lower += torch.bmm(scores, components.transpose(1, 2))
        bounds = self._layout.bounds
        shape = (heads, len(bounds) - 1, pairs)
        by_group = self._by_group[: heads * shape[1] * pairs].view(shape)
        torch.bmm(self._inner, components, out=by_group)
        for group in range(len(bounds) - 1):
            part = slice(bounds[group], bounds[group + 1])
            score = by_group[:, group].view(heads, queries, count)
            q, k = self._q[:, rows, part].transpose(1, 2), self._k[:, keys, part].transpose(1, 2)
            self._grad_q[:, part, rows] += torch.bmm(k, score.transpose(1, 2))
            self._grad_k[:, part, keys] += torch.bmm(q, score)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and L after all tiles."""
        grad_q = self._layout.gather(self._grad_q.transpose(1, 2)) * (2 * self._scale)
        grad_k = self._layout.gather(self._grad_k.transpose(1, 2))
        grad_k = 2 * grad_k.unflatten(0, (self._kv_heads, -1)).sum(1)
        return grad_q, grad_k, (2 * self._grad_lower).tril()

    def _score_tile(self, pairs: int) -> Tensor:
        """``s̄`` as ``[H, G+1, pairs]``."""
        scores, heads = self._scores, self._heads
        return scores.as_strided((heads, scores.shape[0], pairs), (pairs, scores.shape[1], 1))

    def _component_tile(self, pairs: int) -> Tensor:
        """``Lᵀ s̄`` as ``[H, G+1, pairs]``."""
        shape = (self._heads, self._scores.shape[0], pairs)
        return self._components[: shape[0] * shape[1] * pairs].view(shape)
