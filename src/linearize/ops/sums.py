"""Kernel sums of a stretch of tokens, by the engine that suits the kernel.

Queries and keys are aligned: query i meets the keys 0 … i of the stretch, and those in the state.
"""

from __future__ import annotations

from dataclasses import replace
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
from linearize.ops.state import State

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
    state: State,
    *,
    fresh: bool,
    chunk: int,
    keep_state: bool,
) -> Sums:
    """Sums of any kernel through its features.

    Args:
        kernel: the kernel. q, k: ``[B, Hq, N, d]``, ``[B, Hkv, N, d]`` in its precision.
        u: ``[B, Hkv, N, c]``, zero where ``joins [B, N]`` is false.
        state: before the first token. fresh: whether its sums are still zero.
        chunk: tokens between two states. keep_state: whether the state after them is wanted.
    """
    tokens, log_scale = q.shape[2], state.log_scale
    if state.sums.shape[2] > WIDE:
        return _chunk_by_chunk(kernel, q, k, u, joins, state, chunk)
    sums = None if fresh else state.sums_in(q.dtype)
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
            return _chunk_by_chunk(kernel, q, k, u, joins, state, chunk)
        reference = largest.masked_fill(largest == -torch.inf, 0)
        key = Features(key.values * torch.exp(log - reference))
        if sums is not None and log_scale is not None:
            sums = sums * torch.exp(log_scale - reference)
        log_scale = largest
    heads = key.values.shape[1]
    if heads != u.shape[1]:
        u = u.repeat_interleave(heads // u.shape[1], dim=1)
    y, after = product_sums(
        query.values,
        key.values,
        u,
        state=sums,
        chunk=min(chunk, tokens),
        keep_state=keep_state,
    )
    query_log = query.log_scale
    if reference is not None:
        reference = reference.repeat_interleave(q.shape[1] // heads, dim=1)
        query_log = reference if query_log is None else query_log + reference
        query_log = query_log.expand(*y.shape[:3], 1)
    if query_log is not None:
        query_log = query_log[:, :, :tokens]
    return Sums(Partial(y[:, :, :tokens], query_log), after, log_scale)


def absorb(
    kernel: KernelMap,
    state: State,
    k: Tensor,
    u: Tensor,
    joins: Tensor | None,
    *,
    overwrite: bool = False,
) -> State:
    """The state with the keys ``k [B, Hkv, m, d]`` and ``u = [v; 1]`` in its sums.

    ``joins [B, m]`` says which take part (``None``: all); u is zero for the others. With ``overwrite``
    the memory of ``state.sums`` is used again where no gradient is recorded.
    """
    features, log_scale = kernel.key_features(k)
    sums, total = state.sums_in(kernel.dtype), state.log_scale
    if features.shape[1] != u.shape[1]:
        u = u.repeat_interleave(features.shape[1] // u.shape[1], dim=1)
    shrink: Tensor | None = None
    if log_scale is not None:
        assert total is not None
        if joins is not None:
            log_scale = log_scale.masked_fill(~joins[:, None, :, None], -torch.inf)
        new = torch.maximum(total, log_scale.detach().amax(2, keepdim=True))
        reference = new.masked_fill(new == -torch.inf, 0)
        shrink = torch.exp(total - reference)
        u = u * torch.exp(log_scale - reference)
        total = new
    if overwrite and sums.dtype == state.sums.dtype and _free(sums, features, u, shrink):
        if shrink is not None:
            sums.mul_(shrink)
        if features.shape[2] == 1:
            sums.addcmul_(features.transpose(-1, -2), u)
        else:
            sums += features.transpose(-1, -2) @ u
    else:
        sums = sums if shrink is None else sums * shrink
        sums = (sums + features.transpose(-1, -2) @ u).to(state.sums.dtype)
    return replace(state, sums=sums, log_scale=total)


def _free(sums: Tensor, *others: Tensor | None) -> bool:
    """Whether ``sums`` may be changed in place by the others."""
    if sums.is_inference() and not torch.is_inference_mode_enabled():
        return False
    tensors = (sums, *others)
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


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
    state: State,
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
        sums = state.sums_in(q.dtype)
        read = state_partial(kernel.query_features(queries), sums, state.log_scale)
        partials.append(combine([read, inside]))
        state = absorb(kernel, state, keys, values, joins[:, part])
    y = torch.cat([partial.sums for partial in partials], dim=2)
    logs = [partial.log_scale for partial in partials if partial.log_scale is not None]
    total = Partial(y, torch.cat(logs, dim=2) if logs else None)
    return Sums(total, state.sums, state.log_scale)
