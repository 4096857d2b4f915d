"""One token at a time: the decoding step, O(1) in the context length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from linearize.ops.features import KernelMap
from linearize.ops.partial import (
    Partial,
    exact_partial,
    local_partial,
    merge,
    only_where,
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
        output, state = _step(kernel, *inputs, mask, state, scale, sinks, window, own)
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
    overwrite: bool,
) -> tuple[Tensor, State]:
    """Read everything once, the key that leaves the window pair by pair; then add it to the state.

    Read through the state, the only key of a first token would return its value times a quotient of
    two sums that are rounded apart: off by percents where its weight is near the kernel's floor.
    """
    query = q.to(kernel.dtype)
    read = state_partial(kernel.query_features(query), state.sums_in(kernel.dtype), state.log_scale)
    if not (sinks or window or state.recent_keys.shape[2]):
        return _pure_step(kernel, query, k, v, key_mask, state, read, overwrite)
    if key_mask is None:
        key_mask = torch.ones(q.shape[0], 1, dtype=torch.bool, device=q.device)
    dtype = kernel.dtype
    partials = [read]
    in_state = state.real - state.recent_mask.sum(1) > sinks
    local_k = torch.cat([state.recent_keys, k], dim=2)
    local_v = torch.cat([state.recent_values, v], dim=2)
    local_mask = torch.cat([state.recent_mask, key_mask], dim=1)
    is_sink = state.sink_mask(local_mask)
    taken = local_mask & ~is_sink
    state = state.with_sinks(k, v, key_mask, is_sink[:, -1:])
    leaving = max(0, local_k.shape[2] - window)
    if leaving:
        gone = slice(0, leaving)
        joins = taken[:, gone]
        u, keys = with_ones(local_v[:, :, gone].to(dtype), joins), local_k[:, :, gone].to(dtype)
        partials.append(local_partial(kernel.weights(query, keys), u, joins[:, None, None]))
        in_state = in_state | joins.any(1)
        state = absorb(kernel, state, keys, u, joins, overwrite=overwrite)
    keep = slice(leaving, None)
    state = replace(
        state,
        recent_keys=local_k[:, :, keep],
        recent_values=local_v[:, :, keep],
        recent_mask=local_mask[:, keep],
    )
    if sinks or window:
        partials = [only_where(partial, in_state[:, None, None, None]) for partial in partials]
        filled = torch.arange(sinks, device=q.device) < state.real[:, None]
        mask = torch.cat([filled, taken[:, keep]], dim=1)
        exact_k = torch.cat([state.sink_keys, state.recent_keys], dim=2).to(dtype)
        exact_v = torch.cat([state.sink_values, state.recent_values], dim=2).to(dtype)
        exact_u = with_ones(exact_v, mask)
        partials.append(exact_partial(query, exact_k, exact_u, mask[:, None, None], scale))
    return merge(partials).to(v.dtype), state


def _pure_step(
    kernel: KernelMap,
    query: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State,
    read: Partial,
    overwrite: bool,
) -> tuple[Tensor, State]:
    """The step without exact keys: the token joins the state at once."""
    keys, u = k.to(kernel.dtype), with_ones(v.to(kernel.dtype), key_mask)
    allowed = None if key_mask is None else key_mask[:, None, None]
    inside = local_partial(kernel.weights(query, keys), u, allowed)
    count = 1 if key_mask is None else key_mask.sum(1)
    state = replace(state, real=state.real + count)
    state = absorb(kernel, state, keys, u, key_mask, overwrite=overwrite)
    return merge([read, inside]).to(v.dtype), state
