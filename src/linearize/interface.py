"""The one attention function registered with transformers, for converted and retained layers alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from linearize.attention import LinearAttention, take_heads
from linearize.errors import ModelError

__all__ = ["NAME", "Call", "recording", "use_interface"]

NAME = "linearize"

Call = Callable[[nn.Module, Tensor, Tensor, Tensor, float, dict[str, Any]], Tensor | None]
_recorder: ContextVar[Call | None] = ContextVar("linearize_recorder", default=None)


@contextmanager
def recording(recorder: Call) -> Iterator[None]:
    """Show every attention call of this thread to ``recorder(module, q, k, v, scale, kwargs)``.

    A tensor ``[B, Hq, N, dv]`` it returns replaces the layer's output.
    """
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def use_interface(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention through this module for a while.

    Raises:
        ModelError: its architecture does not use transformers' attention interface.
    """
    before = model.config._attn_implementation
    set_interface(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def set_interface(model: PreTrainedModel) -> None:
    """Route the model's attention through this module from now on; see :func:`use_interface`."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ModelError(
            f"the attention of {type(model).__name__}",
            "an architecture without transformers' attention interface",
            "Use a model whose attention goes through ALL_ATTENTION_FUNCTIONS.",
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: ``[B, H, N, d]`` in, ``[B, N, Hq, dv]`` out.

    Post-RoPE queries, unrepeated KV heads. A module with a ``linear_attention`` child uses it;
    every other module falls through to SDPA.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    recorder = _recorder.get()
    if recorder is not None:
        replacement = recorder(module, query, key, value, scale, kwargs)
        if replacement is not None:
            return replacement.transpose(1, 2).contiguous(), None
    linear = getattr(module, "linear_attention", None)
    if isinstance(linear, LinearAttention) and linear.active:
        exact = partial(_exact, module, mask=attention_mask, dropout=dropout, scale=scale, **kwargs)
        return _linear(linear, query, key, value, attention_mask, exact), None
    return _exact(module, query, key, value, attention_mask, dropout, scale, **kwargs), None


def _exact(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    **kwargs: Any,
) -> Tensor:
    """Softmax attention, ``[B, N, Hq, dv]``."""
    output, _ = AttentionInterface()["sdpa"](
        module, q, k, v, mask, dropout=dropout, scaling=scale, **kwargs
    )
    return output


def _linear(
    linear: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    exact: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The layer's output ``[B, N, Hq, dv]``: its kernel's heads, and ``exact`` for the others."""
    key_mask = None if mask is None else _key_mask(mask, q.shape[2])[:, -q.shape[2] :]
    layer, linear.cache_layer = linear.cache_layer, None
    state = None if layer is None else layer.state
    given: dict[str, Any] = dict(key_mask=key_mask, state=state, return_state=layer is not None)
    given["overwrite"] = True  # the cache layer takes the new state
    if linear.heads is None:
        output, state = linear(q, k, v, **given)
        output = output.transpose(1, 2).contiguous()
    else:
        kv_heads, served = k.shape[1], list(linear.heads)
        others = [head for head in range(kv_heads) if head not in served]
        part, state = linear(*linear.served(q, k, v), **given)
        kept_k, kept_v = k[:, others], v[:, others]
        if layer is not None:
            kept_k, kept_v = layer.exact.update(kept_k, kept_v)
        kept = exact(take_heads(q, others, kv_heads), kept_k, kept_v).transpose(1, 2)
        order = torch.tensor([*served, *others], device=q.device).argsort()
        both = torch.cat([part, kept.to(part.dtype)], 1).unflatten(1, (kv_heads, -1))
        output = both[:, order].flatten(1, 2).transpose(1, 2).contiguous()
    if layer is not None:
        layer.state = state
    return output


def _key_mask(mask: Tensor, queries: int) -> Tensor:
    """The padding of a ``[B, 1, Nq, Nk]`` mask as ``[B, Nk]``, true for real keys.

    Remembered on the mask itself, which all layers of a forward pass share.

    Raises:
        ModelError: the mask is not causal attention over real keys.
    """
    known: Tensor | None = getattr(mask, "_linearize_key_mask", None)
    if known is not None:
        return known
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    additive = mask.dtype != torch.bool and bool((mask[allowed] != 0).any())
    key_mask = allowed[:, 0, -1]
    keys = key_mask.shape[1]
    at = torch.arange(keys - queries, keys, device=mask.device)
    causal = at[:, None] >= torch.arange(keys, device=mask.device)
    expected = (causal & key_mask[:, None])[:, None]
    if additive or bool((allowed != expected).any()):
        raise ModelError(
            f"an attention mask of shape {tuple(mask.shape)}",
            "a pattern other than causal attention with padding, which linear layers cannot honour",
            "Pass a 2-D padding mask; unpack packed sequences into a batch.",
        )
    mask._linearize_key_mask = key_mask  # type: ignore[attr-defined]
    return key_mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
