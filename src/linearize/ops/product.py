"""Causal sums of explicit features: all chunks at once, their states by one prefix sum.

``y_i = φ(q_i)ᵀ S_0 + Σ_{j≤i} φ(q_i)·φ(k_j) u_j`` and ``S = S_0 + Σ_j φ(k_j) u_jᵀ``. For features so few
that the states of all chunks fit in memory together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["product_sums"]


def product_sums(
    query: Tensor, key: Tensor, u: Tensor, *, state: Tensor | None, chunk: int, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    """See the module. Gradients are in closed form; nothing but the inputs is kept for them.

    Args:
        query: query features, ``[B, H, N, F]``; H is a multiple of Hs.
        key: key features, ``[B, Hs, N, F]``.
        u: ``[B, Hs, N, c]``, zero for keys that do not take part.
        state: ``S_0``, ``[B, Hs, F, c]``; ``None`` for zero.
        chunk: tokens between two states; N is a multiple of it.
        keep_state: whether the state after the last token is wanted.

    Returns:
        ``y [B, H, N, c]`` and ``S [B, Hs, F, c]`` (``None`` unless wanted).
    """
    y, after = _ProductSums.apply(query, key, u, state, chunk, keep_state)
    return y, after


class _ProductSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        u: Tensor,
        state: Tensor | None,
        chunk: int,
        keep_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, u, state)
        ctx.chunk = chunk
        heads = key.shape[1]
        query, key, u = _chunks(query, chunk, heads), _chunks(key, chunk), _chunks(u, chunk)
        y = _pairs(query, key).tril_() @ u[:, :, None]
        alone = key.shape[2] == 1
        after = None
        if keep_state or not alone:
            before, after = _prefix(key.transpose(-1, -2) @ u, state)
        elif state is not None:
            before = state[:, :, None]
        if state is not None or not alone:
            y += query @ before[:, :, None]
        return y.flatten(3, 4).flatten(1, 2), after if keep_state else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, u, state = ctx.saved_tensors
        grad_y, grad_after = grads
        heads = key.shape[1]
        if grad_y is None:
            grad_y = query.new_zeros(*query.shape[:3], u.shape[-1])
        query, key, u = (
            _chunks(query, ctx.chunk, heads),
            _chunks(key, ctx.chunk),
            _chunks(u, ctx.chunk),
        )
        grad_y = _chunks(grad_y, ctx.chunk, heads)
        before, _ = _prefix(key.transpose(-1, -2) @ u, state)
        grad_read = (query.transpose(-1, -2) @ grad_y).sum(2)  # of the state before every chunk
        grad_sums, grad_state = _suffix(grad_read, grad_after)

        grad_weights = _pairs(grad_y, u).tril_()
        grad_query = grad_y @ before[:, :, None].transpose(-1, -2)
        grad_query += grad_weights @ key[:, :, None]
        grad_key = (grad_weights.transpose(-1, -2) @ query).sum(2)
        grad_key += u @ grad_sums.transpose(-1, -2)
        weights = _pairs(query, key).tril_()
        grad_u = (weights.transpose(-1, -2) @ grad_y).sum(2)
        grad_u += key @ grad_sums
        return (
            grad_query.flatten(3, 4).flatten(1, 2),
            grad_key.flatten(2, 3),
            grad_u.flatten(2, 3),
            None if state is None else grad_state,
            None,
            None,
        )


def _chunks(x: Tensor, chunk: int, heads: int | None = None) -> Tensor:
    """``[B, h, N, f]`` -> ``[B, h, N / chunk, chunk, f]``, or ``[B, heads, h / heads, …]``."""
    x = x.unflatten(2, (-1, chunk))
    return x if heads is None else x.unflatten(1, (heads, -1))


def _pairs(query: Tensor, key: Tensor) -> Tensor:
    """Inner products within chunks, ``[B, Hs, r, nc, chunk, chunk]``."""
    return query @ key[:, :, None].transpose(-1, -2)


def _prefix(sums: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of the chunks ``[B, Hs, nc, F, c]`` -> the state before every chunk, and after the last."""
    before = torch.empty_like(sums)
    before[:, :, 0] = 0 if state is None else state
    for number in range(1, sums.shape[2]):
        torch.add(before[:, :, number - 1], sums[:, :, number - 1], out=before[:, :, number])
    return before, before[:, :, -1] + sums[:, :, -1]


def _suffix(grad_read: Tensor, grad_after: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of the states before every chunk -> of every chunk's sum, and of the first state."""
    grad_sums = torch.empty_like(grad_read)
    grad_sums[:, :, -1] = 0 if grad_after is None else grad_after
    for number in range(grad_read.shape[2] - 1, 0, -1):
        torch.add(grad_sums[:, :, number], grad_read[:, :, number], out=grad_sums[:, :, number - 1])
    return grad_sums, grad_sums[:, :, 0] + grad_read[:, :, 0]
