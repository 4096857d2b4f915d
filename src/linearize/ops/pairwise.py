"""The O(N²) definition of every kernel, window and sink: the oracle for the fast paths."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.ops.features import KernelMap
from linearize.ops.partial import beside_exact, exact_partial, local_partial, merge, with_ones

__all__ = ["attend"]


def attend(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    sinks: int = 0,
    window: int = 0,
    saturation: int | None = None,
    key_mask: Tensor | None = None,
    query_at: Tensor | None = None,
    kernel_k: Tensor | None = None,
) -> Tensor:
    """Causal attention with all pairwise weights at once.

    The first ``sinks`` real keys and the last ``window`` keys weigh ``e^s``, all others
    ``kernel.weights``; one shared denominator (SPEC sections 1 to 3). With ``saturation = n`` a query
    that m > n keys reach through the kernel takes these weights times n / m.

    Args:
        q, k, v: ``[B, Hq, n, d]``, ``[B, Hkv, N, d]``, ``[B, Hkv, N, dv]``; computed in
            ``kernel.dtype``.
        key_mask: ``[B, N]``, true for real tokens; ``None`` if all are.
        query_at: ``[n]``, the positions of the queries; ``None`` for all ``N``.
        kernel_k: the keys as the kernel sees them, like ``k``; ``None`` for ``k`` itself.

    Returns:
        ``[B, Hq, n, dv]`` in ``kernel.dtype``; zeros for queries that see no key.
    """
    kernel_k = k if kernel_k is None else kernel_k
    q, k, v, kernel_k = (x.to(kernel.dtype) for x in (q, k, v, kernel_k))
    tokens = k.shape[2]
    if key_mask is None:
        key_mask = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device)
    position = torch.arange(tokens, device=q.device)
    distance = (position if query_at is None else query_at)[:, None] - position
    allowed = (distance >= 0) & key_mask[:, None, :]
    is_sink = (key_mask.cumsum(1) <= sinks)[:, None, :]
    exact = (allowed & (is_sink | (distance < window)))[:, None]
    through_kernel = (allowed[:, None]) & ~exact

    u = with_ones(v, key_mask)
    kernel_part = local_partial(kernel.weights(q, kernel_k), u, through_kernel)
    if not (sinks or window):
        return merge([kernel_part])
    kernel_part = beside_exact(kernel_part, through_kernel[:, 0].sum(-1), saturation)
    return merge([exact_partial(q, k, u, exact, scale), kernel_part])
