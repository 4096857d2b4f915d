"""One token at a time: the decoding step, O(1) in the context length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from linearize.ops.features import KernelMap
from linearize.ops.partial import (
    Partial,
    beside_exact,
    combine,
    exact_partial,
    local_partial,
    merge,
    state_partial,
    with_ones,
)
from linearize.ops.state import State
from linearize.ops.sums import absorb

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
    state: State | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, State]:
    """Feed tokens one by one; same arguments and results as :func:`linearize.ops.chunked.attend`.

    Args:
        overwrite: the caller gives ``state`` up, and its memory may be used for the next one. Where
            gradients are recorded it never is.
    """
    if state is None:
        state, overwrite = State.empty(kernel, q, k, v, sinks), True
    given, outputs = state.sums, []
    for at in range(q.shape[2]):
        token = slice(at, at + 1)
        inputs = (q[:, :, token], k[:, :, token], v[:, :, token])
        mask = None if key_mask is None else key_mask[:, token]
        own = overwrite or state.sums is not given
        output, state = _step(kernel, *inputs, mask, state, scale, sinks, window, saturation, own)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def _step(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State,
    scale: float,
    sinks: int,
    window: int,
    saturation: int | None,
    overwrite: bool,
) -> tuple[Tensor, State]:
    """Read everything once, the key that leaves the window pair by pair; then add it to the state.

    Read through the state, the only key of a first token would return its value times a quotient of
    two sums that are rounded apart: off by percents where its weight is near the kernel's floor.
    """
    dtype = kernel.dtype
    query = q.to(dtype)
    partial = state_partial(kernel.query_features(query), state.sums_in(dtype), state.log_scale)
    if not (sinks or window or state.recent_keys.shape[2]):
        state = replace(state, real=state.real + (1 if key_mask is None else key_mask.sum(1)))
        keys, u = k.to(dtype), with_ones(v.to(dtype), key_mask)
        partial = _with_pair(kernel, query, keys, u, key_mask, partial)
        state = absorb(kernel, state, keys, u, key_mask, overwrite=overwrite)
        return merge([partial]).to(v.dtype), state

    if key_mask is None:
        key_mask = torch.ones(q.shape[0], 1, dtype=torch.bool, device=q.device)
    local_k = torch.cat([state.recent_keys, k], dim=2)
    local_v = torch.cat([state.recent_values, v], dim=2)
    local_mask = torch.cat([state.recent_mask, key_mask], dim=1)
    gone_before = state.real - state.recent_mask.sum(1)
    count = (gone_before - sinks).clamp(min=0)
    taken: Tensor | None = local_mask  # `None` says that every local key takes part
    if bool((gone_before >= sinks).all()):  # all sinks have left the window
        state = replace(state, real=state.real + key_mask.sum(1))
        filled = None
        taken = None if bool(local_mask.all()) else local_mask
    else:
        is_sink = state.sink_mask(local_mask)
        taken = local_mask & ~is_sink
        state = state.with_sinks(k, v, key_mask, is_sink[:, -1:])
        filled = torch.arange(sinks, device=q.device) < state.real[:, None]
    leaving = max(0, local_k.shape[2] - window)
    keep, gone = slice(leaving, None), slice(0, leaving)
    if leaving:
        joins = None if taken is None else taken[:, gone]
        u, keys = with_ones(local_v[:, :, gone].to(dtype), joins), local_k[:, :, gone].to(dtype)
        partial = _with_pair(kernel, query, keys, u, joins, partial)
        count = count + (leaving if joins is None else joins.sum(1))
        state = absorb(kernel, state, keys, u, joins, overwrite=overwrite)
    state = replace(
        state,
        recent_keys=local_k[:, :, keep],
        recent_values=local_v[:, :, keep],
        recent_mask=local_mask[:, keep],
    )
    if not (sinks or window):
        return merge([partial]).to(v.dtype), state
    mask: Tensor | None = None
    if filled is not None or taken is not None:
        mask = torch.cat(
            [_true(filled, local_mask, sinks), _true(taken, local_mask, None)[:, keep]], 1
        )
    exact_k = torch.cat([state.sink_keys, state.recent_keys], dim=2).to(dtype)
    exact_v = torch.cat([state.sink_values, state.recent_values], dim=2).to(dtype)
    allowed = None if mask is None else mask[:, None, None]
    exact = exact_partial(query, exact_k, with_ones(exact_v, mask), allowed, scale)
    return merge([beside_exact(partial, count[:, None], saturation), exact]).to(v.dtype), state


def _with_pair(
    kernel: KernelMap, q: Tensor, k: Tensor, u: Tensor, joins: Tensor | None, read: Partial
) -> Partial:
    """What was read from the state and, pair by pair, the keys ``k [B, Hkv, m, d]``."""
    mask = None if joins is None else joins[:, None, None]
    pair = local_partial(kernel.weights(q, k), u, mask)
    if pair.log_scale is read.log_scale is None:
        return Partial(read.sums + pair.sums, None)
    return combine([read, pair])


def _true(mask: Tensor | None, like: Tensor, count: int | None) -> Tensor:
    """``mask``, or trues for ``None``: ``[B, count]``, by default of the shape of ``like``."""
    if mask is not None:
        return mask
    return like.new_ones(like.shape[0], like.shape[1] if count is None else count)
