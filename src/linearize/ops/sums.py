"""Kernel sums of a stretch of tokens, by the engine that suits the kernel.

Queries and keys are aligned: query i meets the keys 0 … i of the stretch, and those in the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from linearize.ops.features import Features, Grouped, KernelMap
from linearize.ops.grouped import grouped_sums
from linearize.ops.partial import Partial, combine, local_partial, state_partial
from linearize.ops.product import product_sums
from linearize.ops.quadratic import packed_coefficients
from linearize.ops.scores import GroupLayout

__all__ = ["WIDE", "Sums", "absorb", "of_features", "of_groups"]

WIDE = 640  # features from which the weights of a chunk are cheaper by the kernel's own definition
RANGE = {torch.float64: 300.0, torch.float32: 40.0}  # of key log-scales that one scale can serve


class Sums(NamedTuple):
    """Partial of every query, and the state after the last token.

    Attributes:
        partial: ``[B, Hq, N, c]`` and its log-scale.
        state: ``[B, Hs, F, c]``; ``None`` if it was not wanted.
        log_scale: of the state, ``[B, Hs, 1, 1]``, or ``None`` for zero.
    """

    partial: Partial
    state: Tensor | None
    log_scale: Tensor | None


def of_groups(
    form: Grouped, u: Tensor, state: Tensor | None, *, chunk: int, keep_state: bool
) -> Sums:
    """Sums of a kernel in grouped form.

    Args:
        form: of all queries and keys. u: ``[B, Hkv, N, c]``, zero where a key takes no part.
        state: ``[B, Hkv, F, c]`` before the first token, ``None`` for zero.
        chunk: tokens between two states. keep_state: whether the state after them is wanted.
    """
    batch = u.shape[0]
    coefficients = packed_coefficients(form.groups, form.factor, form.eps, form.scale)
    sums, after = grouped_sums(
        form.query.flatten(0, 1),
        form.key.flatten(0, 1),
        u.flatten(0, 1),
        layout=GroupLayout(form.groups.repeat(batch, 1), form.factor.shape[-1] - 1),
        lower=form.factor.repeat(batch, 1, 1),
        coefficients=coefficients.repeat(batch, 1),
        eps=form.eps,
        scale=form.scale,
        state=None if state is None else state.flatten(0, 1),
        chunk=chunk,
        keep_state=keep_state,
    )
    after = None if after is None else after.unflatten(0, (batch, -1))
    return Sums(Partial(sums.unflatten(0, (batch, -1)), form.query_log), after, None)


def of_features(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    joins: Tensor,
    state: Tensor,
    log_scale: Tensor | None,
    *,
    fresh: bool,
    chunk: int,
    keep_state: bool,
) -> Sums:
    """Sums of any kernel through its features.

    Args:
        kernel: the kernel. q, k: ``[B, Hq, N, d]``, ``[B, Hkv, N, d]`` in its precision.
        u: ``[B, Hkv, N, c]``, zero where ``joins [B, N]`` is false.
        state, log_scale: before the first token, as in :class:`linearize.ops.state.State`.
        fresh: whether the state is still zero.
        chunk: tokens between two states. keep_state: whether the state after them is wanted.
    """
    tokens = q.shape[2]
    if state.shape[2] > WIDE:
        return _chunk_by_chunk(kernel, q, k, u, joins, state, log_scale, chunk)
    behind = -tokens % min(chunk, tokens)
    if behind:
        q, k, u = (pad(x, (0, 0, 0, behind)) for x in (q, k, u))
        joins = pad(joins, (0, behind))
    query, key = kernel.query_features(q), kernel.key_features(k)
    reference = None
    if key.log_scale is not None:
        log = key.log_scale.masked_fill(~joins[:, None, :, None], -torch.inf)
        largest, smallest = _range(log.detach(), log_scale)
        if bool((largest - smallest > RANGE[q.dtype]).any()):
            q, k, u, joins = q[:, :, :tokens], k[:, :, :tokens], u[:, :, :tokens], joins[:, :tokens]
            return _chunk_by_chunk(kernel, q, k, u, joins, state, log_scale, chunk)
        reference = largest.masked_fill(largest == -torch.inf, 0)
        key = Features(key.values * torch.exp(log - reference))
        if log_scale is not None:
            state = state * torch.exp(log_scale - reference)
        log_scale = largest
    heads = key.values.shape[1]
    if heads != u.shape[1]:
        u = u.repeat_interleave(heads // u.shape[1], dim=1)
    sums, after = product_sums(
        query.values,
        key.values,
        u,
        state=None if fresh else state,
        chunk=min(chunk, tokens),
        keep_state=keep_state,
    )
    query_log = query.log_scale
    if reference is not None:
        reference = reference.repeat_interleave(q.shape[1] // heads, dim=1)
        query_log = reference if query_log is None else query_log + reference
        query_log = query_log.expand(*sums.shape[:3], 1)
    if query_log is not None:
        query_log = query_log[:, :, :tokens]
    return Sums(Partial(sums[:, :, :tokens], query_log), after, log_scale)


def absorb(
    kernel: KernelMap,
    sums: Tensor,
    total: Tensor | None,
    k: Tensor,
    u: Tensor,
    joins: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Add keys ``k [B, Hkv, m, d]`` with ``u = [v; 1]`` to a state where ``joins [B, m]``.

    The state and its log-scale are those of :class:`linearize.ops.state.State`.
    """
    features, log_scale = kernel.key_features(k)
    u = u.masked_fill(~joins[:, None, :, None], 0)
    if not kernel.shared_state:
        u = u.repeat_interleave(features.shape[1] // u.shape[1], dim=1)
    if log_scale is not None:
        assert total is not None
        log_scale = log_scale.masked_fill(~joins[:, None, :, None], -torch.inf)
        new = torch.maximum(total, log_scale.detach().amax(2, keepdim=True))
        reference = new.masked_fill(new == -torch.inf, 0)
        sums = sums * torch.exp(total - reference)
        u = u * torch.exp(log_scale - reference)
        total = new
    return sums + features.transpose(-1, -2) @ u, total


def _range(log: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Largest and smallest log-scale ``[B, Hs, 1, 1]`` of keys and state; ``-inf`` marks none."""
    largest = log.amax(2, keepdim=True)
    smallest = log.masked_fill(log == -torch.inf, torch.inf).amin(2, keepdim=True)
    if total is not None:
        largest = torch.maximum(largest, total)
        smallest = torch.minimum(smallest, total.masked_fill(total == -torch.inf, torch.inf))
    return largest, smallest


def _chunk_by_chunk(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    joins: Tensor,
    state: Tensor,
    log_scale: Tensor | None,
    chunk: int,
) -> Sums:
    """The same with the kernel's own weights, and a common scale of key features only within a chunk.

    For very many features, and for keys that differ too much in scale.
    """
    partials = []
    for start in range(0, q.shape[2], chunk):
        part = slice(start, start + chunk)
        queries, keys, values = q[:, :, part], k[:, :, part], u[:, :, part]
        causal = torch.ones(queries.shape[2], queries.shape[2], dtype=torch.bool, device=q.device)
        mask = (causal.tril() & joins[:, None, part])[:, None]
        inside = local_partial(kernel.weights(queries, keys), values, mask)
        read = state_partial(kernel.query_features(queries), state, log_scale)
        partials.append(combine([read, inside]))
        state, log_scale = absorb(kernel, state, log_scale, keys, values, joins[:, part])
    sums = torch.cat([partial.sums for partial in partials], dim=2)
    logs = [partial.log_scale for partial in partials if partial.log_scale is not None]
    return Sums(Partial(sums, torch.cat(logs, dim=2) if logs else None), state, log_scale)
