"""Linear-time attention in plain PyTorch: a state between chunks, pairwise weights inside them.

With a window of W keys the kernel lags behind: while a chunk of n queries is read, the n oldest of
the W + n local keys leave the window. They are met pair by pair by the queries they have already
left, and join the state after the chunk. Without a window the leaving keys are the chunk itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linearize.ops.features import KernelMap
from linearize.ops.partial import (
    Partial,
    exact_partial,
    local_partial,
    merge,
    state_partial,
    with_ones,
)
from linearize.ops.state import State

__all__ = ["absorb", "attend", "only_where", "remember_sinks", "sink_mask"]

CHUNK = 128
SEGMENT = 8  # chunks between two saved states when gradients are needed


def attend(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    sinks: int = 0,
    window: int = 0,
    key_mask: Tensor | None = None,
    state: State | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, State]:
    """Causal attention from ``state``, in time linear in N; see :func:`linearize.ops.pairwise.attend`.

    Memory beyond inputs and outputs does not depend on N without gradients; with gradients one
    state is kept for every ``SEGMENT`` chunks and the rest is recomputed.

    Returns:
        the output ``[B, Hq, N, dv]`` in ``v``'s dtype and the state after the last token.
    """
    if state is None:
        state = State.empty(kernel, q, k, v, sinks)
    if key_mask is None:
        key_mask = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    settings: dict[str, Any] = dict(scale=scale, sinks=sinks, window=window)
    needs_gradient = torch.is_grad_enabled()
    if not needs_gradient:
        whole = v.new_empty(*q.shape[:3], v.shape[-1])  # no second copy of the output at the end
        for start in range(0, q.shape[2], chunk):
            part = slice(start, start + chunk)
            inputs = (q[:, :, part], k[:, :, part], v[:, :, part], key_mask[:, part], state)
            whole[:, :, part], state = _chunk(kernel, *inputs, **settings)
        return whole, state
    outputs = []
    for start in range(0, q.shape[2], chunk * SEGMENT):
        part = slice(start, start + chunk * SEGMENT)
        inputs = (q[:, :, part], k[:, :, part], v[:, :, part], key_mask[:, part], state)
        output, state = checkpoint(_segment, kernel, *inputs, chunk, settings, use_reentrant=False)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def _segment(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: State,
    chunk: int,
    settings: dict[str, Any],
) -> tuple[Tensor, State]:
    outputs = []
    for start in range(0, q.shape[2], chunk):
        part = slice(start, start + chunk)
        output, state = _chunk(
            kernel,
            q[:, :, part],
            k[:, :, part],
            v[:, :, part],
            key_mask[:, part],
            state,
            **settings,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def _chunk(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: State,
    *,
    scale: float,
    sinks: int,
    window: int,
) -> tuple[Tensor, State]:
    tokens, before = q.shape[2], state.recent_keys.shape[2]
    local_k = torch.cat([state.recent_keys, k], dim=2)
    local_v = torch.cat([state.recent_values, v], dim=2)
    local_mask = torch.cat([state.recent_mask, key_mask], dim=1)
    is_sink = sink_mask(state, local_mask, sinks)
    leaving = max(0, before + tokens - window)
    key_at = torch.arange(before + tokens, device=q.device)
    query_at = before + torch.arange(tokens, device=q.device)
    distance = query_at[:, None] - key_at

    dtype = kernel.dtype
    query, keys = q.to(dtype), local_k.to(dtype)
    u = with_ones(local_v.to(dtype), local_mask)
    left = key_at[:leaving]
    joins = (local_mask & ~is_sink)[:, :leaving]
    reach = (distance >= window)[:, left] & joins[:, None, :]
    partials = [state_partial(kernel.query_features(query), state.sums, state.log_scale)]
    if leaving:
        weights = kernel.weights(query, keys[:, :, :leaving])
        partials.append(local_partial(weights, u[:, :, :leaving], reach[:, None]))
    if sinks or window:
        in_state = state.real - state.recent_mask.sum(1) > sinks
        empty = ~(in_state[:, None] | reach.any(-1))[:, None, :, None]
        partials = [only_where(partial, ~empty) for partial in partials]
        exact_mask = (distance >= 0) & local_mask[:, None, :]
        exact_mask = exact_mask & torch.where(
            is_sink[:, None, :], (key_at >= before)[None, None], (distance < window)[None]
        )
        filled = torch.arange(sinks, device=q.device) < state.real[:, None]
        mask = torch.cat([filled[:, None].expand(-1, tokens, -1), exact_mask], dim=2)
        exact_k = torch.cat([state.sink_keys.to(dtype), keys], dim=2)
        exact_u = torch.cat([with_ones(state.sink_values.to(dtype), filled), u], dim=2)
        partials.append(exact_partial(query, exact_k, exact_u, mask[:, None], scale))
    output = merge(partials).to(v.dtype)

    state = remember_sinks(state, k, v, key_mask, is_sink[:, before:])
    if leaving:
        state = absorb(kernel, state, keys[:, :, :leaving], u[:, :, :leaving], joins)
    keep = slice(leaving, None)
    return output, replace(
        state,
        recent_keys=local_k[:, :, keep].clone(),  # no view that keeps the whole chunk alive
        recent_values=local_v[:, :, keep].clone(),
        recent_mask=local_mask[:, keep].clone(),
    )


def sink_mask(state: State, local_mask: Tensor, sinks: int) -> Tensor:
    """Which of the recent and new tokens (``[B, m]``) are among the first ``sinks`` real ones."""
    before = state.real - state.recent_mask.sum(1)
    return local_mask & (local_mask.cumsum(1) + before[:, None] <= sinks)


def absorb(kernel: KernelMap, state: State, k: Tensor, u: Tensor, joins: Tensor) -> State:
    """Add keys ``k [B, Hkv, m, d]`` with ``u = [v; 1]`` to the state where ``joins [B, m]``."""
    features, log_scale = kernel.key_features(k)
    u = u.masked_fill(~joins[:, None, :, None], 0)
    if not kernel.shared_state:
        u = u.repeat_interleave(features.shape[1] // u.shape[1], dim=1)
    sums, total = state.sums, state.log_scale
    if log_scale is not None:
        assert total is not None
        log_scale = log_scale.masked_fill(~joins[:, None, :, None], -torch.inf)
        new = torch.maximum(total, log_scale.detach().amax(2, keepdim=True))
        reference = new.masked_fill(new == -torch.inf, 0)
        sums = sums * torch.exp(total - reference)
        u = u * torch.exp(log_scale - reference)
        total = new
    return replace(state, sums=sums + features.transpose(-1, -2) @ u, log_scale=total)


def remember_sinks(state: State, k: Tensor, v: Tensor, key_mask: Tensor, is_sink: Tensor) -> State:
    """Count the new real tokens and store those that ``is_sink [B, n]`` marks."""
    real = state.real + key_mask.sum(1)
    sinks = state.sink_keys.shape[2]
    if sinks and bool(is_sink.any()):
        rank = state.real[:, None] + key_mask.cumsum(1) - 1
        slot = torch.arange(sinks, device=k.device)[None, :, None]
        place = ((rank[:, None] == slot) & is_sink[:, None])[:, None]
        return replace(
            state,
            real=real,
            sink_keys=state.sink_keys + place.to(k.dtype) @ k,
            sink_values=state.sink_values + place.to(v.dtype) @ v,
        )
    return replace(state, real=real)


def only_where(partial: Partial, taken: Tensor) -> Partial:
    """Mark the rows outside ``taken`` as empty, so that they do not set the common scale."""
    log_scale = partial.log_scale
    if log_scale is None:
        log_scale = torch.zeros_like(partial.sums[..., :1])
    return Partial(partial.sums, log_scale.masked_fill(~taken, -torch.inf))
