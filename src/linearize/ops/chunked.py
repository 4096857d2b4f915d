"""Linear-time attention in plain PyTorch: a state between chunks, pairwise weights inside them.

With a window of W keys the kernel lags behind: query i meets the keys up to i - W through the kernel
and the later ones exactly. Its kernel sums are those of a causal kernel over keys shifted by W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from linearize.ops.band import band_partial
from linearize.ops.features import KernelMap, grouped_form
from linearize.ops.partial import Partial, beside_exact, merge, state_partial, with_ones
from linearize.ops.state import State
from linearize.ops.sums import WIDE, Sums, absorb, of_features, of_groups

__all__ = ["attend"]

CHUNK = 256  # of a kernel in grouped form
SEGMENT = 4  # chunks worked on together
PAIRS = 390  # times d / (G + 8): tokens up to which grouped weights cost less than states
FEATURES = 64  # chunk of a kernel with explicit features
BYTES = 2**22  # of query features that exist at once, unless a single chunk has more
KEPT = 1024  # bytes of one token's features up to which they are kept for the gradient


class _Settings(NamedTuple):
    """How a call is cut, and what is exact in it."""

    scale: float
    sinks: int
    window: int
    saturation: int | None
    chunk: int
    grouped: Callable[..., Sums] | None


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
    chunk: int | None = None,
    return_state: bool = True,
    grouped: Callable[..., Sums] = of_groups,
) -> tuple[Tensor, State | None]:
    """Causal attention from ``state``, in time linear in N; see :func:`linearize.ops.pairwise.attend`.

    Memory beyond inputs and outputs does not depend on N without gradients; with gradients what is
    kept is of the size of the inputs and of small features, and a state for every segment; the rest
    is computed again.

    Args:
        chunk: tokens between two states; by default what costs least.
        return_state: whether the state after the last token is wanted.
        grouped: what sums a kernel in grouped form; see :func:`linearize.ops.sums.of_groups`.

    Returns:
        the output ``[B, Hq, N, dv]`` in ``v``'s dtype and the state after the last token (``None``
        unless wanted).
    """
    fresh = state is None
    if state is None:
        state = State.empty(kernel, q, k, v, sinks)
    tokens = q.shape[2]
    if key_mask is None:
        key_mask = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device)
    gradient, recompute = torch.is_grad_enabled(), False
    form = grouped_form(kernel, q[:, :, :1].to(kernel.dtype), k[:, :, :1].to(kernel.dtype))
    if form is not None:
        if chunk is None:
            pairs = PAIRS * form.key.shape[-1] // (form.factor.shape[-1] + 7)
            chunk = tokens if fresh and tokens <= pairs else CHUNK
        segment = chunk * SEGMENT
    else:
        if chunk is None:
            chunk = CHUNK if state.sums.shape[2] > WIDE else FEATURES
        width = state.sums.shape[2] * state.sums.element_size()
        row = q.shape[0] * q.shape[1] * width
        segment = chunk * max(1, min(4 * SEGMENT, BYTES // (chunk * row)))
        recompute = gradient and width > KEPT
    settings = _Settings(scale, sinks, window, saturation, chunk, None if form is None else grouped)
    whole = v.new_empty(*q.shape[:3], v.shape[-1]) if not gradient and segment < tokens else None
    outputs = []
    for start in range(0, tokens, segment):
        part = slice(start, min(start + segment, tokens))
        keep = return_state or part.stop < tokens
        inputs = (q[:, :, part], k[:, :, part], v[:, :, part], key_mask[:, part], state)
        if recompute:
            output, state = checkpoint(
                _segment, kernel, *inputs, fresh, keep, settings, use_reentrant=False
            )
        else:
            output, state = _segment(kernel, *inputs, fresh, keep, settings)
        fresh = False
        if whole is None:
            outputs.append(output)
        else:
            whole[:, :, part] = output  # no second copy of the output at the end
    if whole is None:
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return whole, state if return_state else None


def _segment(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: State,
    fresh: bool,
    keep: bool,
    settings: _Settings,
) -> tuple[Tensor, State]:
    """A stretch of tokens; ``fresh`` says that nothing has reached the kernel's state yet."""
    sinks, window, dtype = settings.sinks, settings.window, kernel.dtype
    if state.recent_keys.shape[2] > window:
        state = _narrowed(kernel, state, window)
        fresh = False
    tokens, before = q.shape[2], state.recent_keys.shape[2]
    local_k, local_v, local_mask = k, v, key_mask
    if before:
        local_k = torch.cat([state.recent_keys, k], dim=2)
        local_v = torch.cat([state.recent_values, v], dim=2)
        local_mask = torch.cat([state.recent_mask, key_mask], dim=1)
    is_sink = state.sink_mask(local_mask)
    taken = local_mask & ~is_sink
    query, keys, u = q.to(dtype), local_k.to(dtype), with_ones(local_v.to(dtype), taken)

    absorbed = (state.real - state.recent_mask.sum(1) - sinks).clamp(min=0)
    leaving = max(0, before + tokens - window)
    sums: Sums | None = None
    partials: list[Partial] = []
    if leaving:
        ahead = tokens - leaving  # queries that nothing has left yet
        joins = pad(taken[:, :leaving], (ahead, 0))
        gone_k, gone_u = (pad(x[:, :, :leaving], (0, 0, ahead, 0)) for x in (keys, u))
        sums = _kernel_sums(kernel, query, gone_k, gone_u, joins, state, fresh, keep, settings)
        partials = [sums.partial]
    elif not fresh or torch.is_grad_enabled():
        joins = torch.zeros_like(key_mask)
        some = query[:, :, :1] if fresh else query  # zeros for all, but parameters stay connected
        read = state_partial(kernel.query_features(some), state.sums_in(dtype), state.log_scale)
        log = read.log_scale
        partials = [
            Partial(
                read.sums.expand(-1, -1, tokens, -1),
                None if log is None else log.expand(-1, -1, tokens, -1),
            )
        ]

    after = state.with_sinks(k, v, key_mask, is_sink[:, before:])
    if sinks or window:
        if partials:
            count = absorbed[:, None] + joins.cumsum(1)
            partials = [beside_exact(one, count, settings.saturation) for one in partials]
        seen = state.real[:, None] + key_mask.cumsum(1)
        filled = torch.arange(sinks, device=q.device) < after.real[:, None]
        exact = band_partial(
            query,
            keys,
            u,
            taken,
            window=window,
            scale=settings.scale,
            sink_k=after.sink_keys.to(dtype),
            sink_u=with_ones(after.sink_values.to(dtype), filled),
            sink_count=seen,
        )
        partials.append(exact)
    output = merge(partials).to(v.dtype)
    if not keep:
        return output, state
    if sums is not None:
        assert sums.state is not None
        kept = sums.state.to(state.sums.dtype)
        after = replace(after, sums=kept, log_scale=sums.log_scale)
    stay = slice(leaving, None)
    return output, replace(
        after,
        recent_keys=local_k[:, :, stay].clone(),  # no view that keeps the whole segment alive
        recent_values=local_v[:, :, stay].clone(),
        recent_mask=local_mask[:, stay].clone(),
    )


def _kernel_sums(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    u: Tensor,
    joins: Tensor,
    state: State,
    fresh: bool,
    keep: bool,
    settings: _Settings,
) -> Sums:
    """Sums over aligned queries and keys by the kernel's engine."""
    grouped = settings.grouped
    form = grouped_form(kernel, q, k) if grouped else None
    if grouped and form:
        before = None if fresh else state.sums_in(q.dtype)
        return grouped(form, u, before, chunk=settings.chunk, keep_state=keep)
    return of_features(
        kernel,
        q,
        k,
        u,
        joins,
        state,
        fresh=fresh,
        chunk=settings.chunk,
        keep_state=keep,
    )


def _narrowed(kernel: KernelMap, state: State, window: int) -> State:
    """The state with no more than ``window`` recent keys, where an earlier call kept more."""
    out = slice(0, state.recent_keys.shape[2] - window)
    stay = slice(out.stop, None)
    is_sink = state.sink_mask(state.recent_mask)
    joins = (state.recent_mask & ~is_sink)[:, out]
    k = state.recent_keys[:, :, out].to(kernel.dtype)
    u = with_ones(state.recent_values[:, :, out].to(kernel.dtype), joins)
    return replace(
        absorb(kernel, state, k, u, joins),
        recent_keys=state.recent_keys[:, :, stay],
        recent_values=state.recent_values[:, :, stay],
        recent_mask=state.recent_mask[:, stay],
    )
