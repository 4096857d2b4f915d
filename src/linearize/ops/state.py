"""The recurrent state: everything attention must remember of the tokens it has seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from linearize.ops.features import KernelMap

__all__ = ["State"]


@dataclass(frozen=True)
class State:
    """Constant-size state of one attention layer. Hs is Hkv for a shared state, else Hq.

    Attributes:
        sums: ``[B, Hs, F, dv + 1]``, in the kernel's precision unless :meth:`stored_in`: sum of key
            features times ``[v; 1]`` over the keys that left the window and are no sinks.
        log_scale: ``[B, Hs, 1, 1]``: the true sums are ``sums * exp(log_scale)``; ``None`` while
            the kernel's features carry no scale.
        recent_keys, recent_values, recent_mask: the last ``min(window, seen)`` tokens,
            ``[B, Hkv, w, d]``, ``[B, Hkv, w, dv]``, ``[B, w]``.
        sink_keys, sink_values: the first real tokens, ``[B, Hkv, S, d]``, ``[B, Hkv, S, dv]``.
        real: ``[B]`` number of real (unpadded) tokens seen; ``min(real, S)`` sinks are filled.
    """

    sums: Tensor
    log_scale: Tensor | None
    recent_keys: Tensor
    recent_values: Tensor
    recent_mask: Tensor
    sink_keys: Tensor
    sink_values: Tensor
    real: Tensor

    @staticmethod
    def empty(kernel: KernelMap, q: Tensor, k: Tensor, v: Tensor, sinks: int) -> State:
        """The state before the first token, for inputs shaped like ``q, k, v``."""
        batch, kv_heads, _, dim = k.shape
        one = kernel.key_features(k.detach()[:, :, :1].to(kernel.dtype))
        heads, features = one.values.shape[1], one.values.shape[-1]
        return State(
            sums=torch.zeros(
                batch, heads, features, v.shape[-1] + 1, dtype=kernel.dtype, device=k.device
            ),
            log_scale=None
            if one.log_scale is None
            else torch.full((batch, heads, 1, 1), -torch.inf, dtype=kernel.dtype, device=k.device),
            recent_keys=k[:, :, :0],
            recent_values=v[:, :, :0],
            recent_mask=torch.ones(batch, 0, dtype=torch.bool, device=k.device),
            sink_keys=k.new_zeros(batch, kv_heads, sinks, dim),
            sink_values=v.new_zeros(batch, kv_heads, sinks, v.shape[-1]),
            real=torch.zeros(batch, dtype=torch.long, device=k.device),
        )

    def sums_in(self, dtype: torch.dtype) -> Tensor:
        """The sums in the precision ``dtype`` in which they are added to and read."""
        return self.sums if self.sums.dtype == dtype else self.sums.to(dtype)

    def stored_in(self, dtype: torch.dtype) -> State:
        """The same state with its sums kept in ``dtype`` from now on; half a type saves memory only.

        Sums are read and added in the kernel's precision, and rounded once a call.
        """
        return replace(self, sums=self.sums.to(dtype))

    def sink_mask(self, local_mask: Tensor) -> Tensor:
        """Which of the recent and the new tokens (``[B, w + n]``, true for real) are sinks.

        Sinks are the first real tokens.
        """
        sinks = self.sink_keys.shape[2]
        before = self.real - self.recent_mask.sum(1)
        return local_mask & (local_mask.cumsum(1) + before[:, None] <= sinks)

    def with_sinks(self, k: Tensor, v: Tensor, key_mask: Tensor, is_sink: Tensor) -> State:
        """Count new real tokens ``k, v [B, Hkv, n, ·]`` and store those that ``is_sink [B, n]`` marks."""
        real = self.real + key_mask.sum(1)
        sinks = self.sink_keys.shape[2]
        if not sinks or not bool(is_sink.any()):
            return replace(self, real=real)
        rank = self.real[:, None] + key_mask.cumsum(1) - 1
        slot = torch.arange(sinks, device=k.device)[None, :, None]
        place = ((rank[:, None] == slot) & is_sink[:, None])[:, None]
        return replace(
            self,
            real=real,
            sink_keys=self.sink_keys + place.to(k.dtype) @ k,
            sink_values=self.sink_values + place.to(v.dtype) @ v,
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """Apply ``function`` to every tensor (they all carry the batch first)."""
        changed = {
            field.name: function(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        return replace(self, **changed)

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)
