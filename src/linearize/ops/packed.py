"""Packed products ``[1, x_r, x_r x_t (r ≤ t)]`` with the features in front of the tokens.

Feature by feature a whole row of tokens is multiplied at once, contiguous in memory; token by token
the rows would be as short as the dimension. All buffers and views are made once for many chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PackedProducts"]


class PackedProducts:
    """Features of ``heads`` rows of up to ``tokens`` vectors, and their gradients.

    Attributes:
        features: ``[heads, F, tokens]`` of the vectors last given to :meth:`form`.
    """

    def __init__(self, heads: int, dim: int, tokens: int, like: Tensor) -> None:
        count = 1 + dim + dim * (dim + 1) // 2
        self.features = like.new_empty(heads, count, tokens)
        self.features[:, 0] = 1
        self._x = self.features[:, 1 : 1 + dim]  # the linear features are the vectors themselves
        self._places = []
        start = 1 + dim
        for row in range(dim):
            self._places.append(slice(start, start + dim - row))
            start += dim - row
        self._views: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}

    def form(self, first: int, *vectors: Tensor) -> Tensor:
        """Features of ``vectors [h, n, d]``, one after the other as heads from ``first`` on.

        Tokens beyond n are zero vectors. Returns these heads of :attr:`features`.
        """
        head = first
        for x in vectors:
            rows = slice(head, head + x.shape[0])
            self._x[rows, :, : x.shape[1]] = x.transpose(1, 2)
            self._x[rows, :, x.shape[1] :] = 0
            head = rows.stop
        if (first, head) not in self._views:
            heads = slice(first, head)
            x, features = self._x[heads], self.features[heads]
            self._views[first, head] = [
                (x[:, row:], x[:, row : row + 1], features[:, place])
                for row, place in enumerate(self._places)
            ]
        for several, one, place in self._views[first, head]:
            torch.mul(several, one, out=place)
        return self.features[first:head]

    def backward(self, grad: Tensor, first: int) -> Tensor:
        """Gradient ``[h, F, tokens]`` of the features of heads from ``first`` on -> ``[h, tokens, d]``.

        ``grad`` is overwritten.
        """
        dim = self._x.shape[1]
        x = self._x[first : first + grad.shape[0]]
        total = grad[:, 1 : 1 + dim].clone()
        for row, place in enumerate(self._places):
            part = grad[:, place]
            total[:, row:].addcmul_(part, x[:, row : row + 1])
            total[:, row] += part.mul_(x[:, row:]).sum(1)
        return total.transpose(1, 2)
