"""Partial attention results, and the one place where they are added and divided.

Attention over a set of keys is a numerator, a denominator and a logarithmic scale. Partials over
disjoint key sets add; every variant (pure kernel, sinks, window, continued cache) is a sum of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linearize.ops.features import Features, Weights

__all__ = [
    "Partial",
    "beside_exact",
    "combine",
    "exact_partial",
    "fold_heads",
    "local_partial",
    "log_held",
    "merge",
    "state_partial",
    "unfold_heads",
    "with_ones",
]


class Partial(NamedTuple):
    """Unnormalised attention: the truth is ``sums * exp(log_scale)``.

    ``sums`` is ``[B, Hq, n, dv + 1]`` with the denominator last; ``log_scale`` ``[B, Hq, n, 1]``,
    ``-inf`` where no key took part, or ``None`` for zero everywhere.
    """

    sums: Tensor
    log_scale: Tensor | None


def combine(partials: Sequence[Partial]) -> Partial:
    """Add partials over disjoint key sets, on a common scale."""
    if all(partial.log_scale is None for partial in partials):
        total = sum(partial.sums for partial in partials)
        assert isinstance(total, Tensor)
        return Partial(total, None)
    scales = [
        torch.zeros_like(partial.sums[..., :1]) if partial.log_scale is None else partial.log_scale
        for partial in partials
    ]
    reference = torch.stack(scales).amax(0).detach()
    finite = _finite(reference)
    total = sum(
        partial.sums * torch.exp(scale - finite)
        for partial, scale in zip(partials, scales, strict=True)
    )
    assert isinstance(total, Tensor)
    return Partial(total, reference)


def merge(partials: Sequence[Partial]) -> Tensor:
    """Add partials over disjoint key sets and divide once -> ``[B, Hq, n, dv]``.

    A query without any key gets zeros.
    """
    total = partials[0].sums if len(partials) == 1 else combine(partials).sums
    numerator, denominator = total[..., :-1], total[..., -1:]
    empty = denominator == 0
    return (numerator / denominator.masked_fill(empty, 1)).masked_fill(empty, 0)


def beside_exact(partial: Partial, count: Tensor, saturation: int | None) -> Partial:
    """A kernel's part as it stands beside exact keys, for queries it gives ``count [B, n]`` keys.

    From ``saturation`` keys on it weighs as much as that many would, a factor ``saturation / count``.
    Queries without a key are marked as empty, so that they do not set the common scale.
    """
    log_scale, count = partial.log_scale, count[:, None, :, None]
    if log_scale is None:
        log_scale = torch.zeros_like(partial.sums[..., :1])
    if saturation is not None:
        log_scale = log_scale + log_held(count, saturation, log_scale.dtype)
    return Partial(partial.sums, log_scale.masked_fill(count == 0, -torch.inf))


def log_held(count: Tensor, saturation: int, dtype: torch.dtype) -> Tensor:
    """Logarithm of ``min(1, saturation / count)``, by which a kernel's part of ``count`` keys is held."""
    return (count.to(dtype) / saturation).clamp(min=1).log().neg()


def exact_partial(q: Tensor, k: Tensor, u: Tensor, mask: Tensor | None, scale: float) -> Partial:
    """Softmax weights ``e^s`` of ``q [B, Hq, n, d]`` over ``k [B, Hkv, m, d]`` where ``mask`` allows.

    ``u`` is ``[B, Hkv, m, dv + 1]``; ``mask`` broadcasts to ``[B, Hq, n, m]``; ``None`` allows all.
    """
    heads = q.shape[1]
    logits = unfold_heads(fold_heads(q * scale, k.shape[1]) @ k.transpose(-1, -2), heads)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    log_scale = logits.detach().amax(-1, keepdim=True)
    return Partial(_apply(torch.exp(logits - _finite(log_scale)), u), log_scale)


def local_partial(weights: Weights, u: Tensor, mask: Tensor | None) -> Partial:
    """Kernel weights applied pair by pair, where ``mask`` (``[B, 1 | Hq, n, m]``; ``None``: all) allows."""
    values, query_log, key_log = weights
    log_scale = query_log
    if key_log is not None:
        allowed = key_log if mask is None else key_log.masked_fill(~mask, -torch.inf)
        reference = allowed.detach().amax(-1, keepdim=True)
        values = values * torch.exp(allowed - _finite(reference))
        log_scale = reference if query_log is None else query_log + reference
    values = values if mask is None else values.masked_fill(~mask, 0)
    return Partial(_apply(values, u), log_scale)


def state_partial(query: Features, sums: Tensor, log_scale: Tensor | None) -> Partial:
    """Read a state ``sums [B, Hs, F, dv + 1]`` with query features ``[B, Hq, n, F]``."""
    total = query.log_scale
    if log_scale is not None:
        log_scale = log_scale.repeat_interleave(query.values.shape[1] // log_scale.shape[1], dim=1)
        total = log_scale if total is None else total + log_scale
        total = total.expand(*query.values.shape[:3], 1)
    return Partial(_apply(query.values, sums), total)


def with_ones(v: Tensor, mask: Tensor | None = None) -> Tensor:
    """``u = [v; 1]``, zero where ``mask [B, m]`` is false: ``[B, H, m, dv]`` -> ``[B, H, m, dv + 1]``."""
    u = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)
    return u if mask is None else u.masked_fill(~mask[:, None, :, None], 0)


def fold_heads(x: Tensor, heads: int) -> Tensor:
    """Stack the query heads of each KV head along the tokens: ``[B, Hq, n, f]`` -> ``[B, heads, r·n, f]``."""
    batch, query_heads, tokens, width = x.shape
    return x.reshape(batch, heads, query_heads // heads * tokens, width)


def unfold_heads(x: Tensor, heads: int) -> Tensor:
    """Undo :func:`fold_heads`."""
    batch, folded, tokens, width = x.shape
    return x.reshape(batch, heads, tokens * folded // heads, width)


def _apply(weights: Tensor, u: Tensor) -> Tensor:
    """``[B, Hq, n, m] @ [B, H, m, c] -> [B, Hq, n, c]`` with query heads sharing ``u``."""
    return unfold_heads(fold_heads(weights, u.shape[1]) @ u, weights.shape[1])


def _finite(log_scale: Tensor) -> Tensor:
    return log_scale.masked_fill(log_scale == -torch.inf, 0)
