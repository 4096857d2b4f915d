"""Exact softmax sums over a sliding window and the sinks: one banded product for all blocks of queries.

Queries are cut into blocks; every block meets the sinks and the keys its window can reach. Only the
inputs are kept for the gradient, which is in closed form.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from linearize.ops.partial import Partial

__all__ = ["band_partial"]

BLOCK = 32
KEYS = 1024  # wider windows are read block by block, each only as far as it reaches
NEVER = -1e30  # a logit that counts for nothing; finite, so that a block without keys stays finite
LOG2E = math.log2(
    math.e
)  # logits are to base 2: exp2 is the faster one, above all where it underflows


def band_partial(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    mask: Tensor,
    *,
    window: int,
    scale: float,
    sink_k: Tensor,
    sink_u: Tensor,
    sink_count: Tensor,
) -> Partial:
    """Softmax weights of every query on the latest ``window`` keys and on the sinks.

    Args:
        q: ``[B, Hq, N, d]``.
        k: ``[B, Hkv, M, d]``, the last M keys, of which the newest N came with the queries.
        u: ``[B, Hkv, M, c]``, zero where ``mask`` is false.
        mask: ``[B, M]``, false for padding and for keys that are sinks.
        window: number of latest keys, the query's own included. scale: of the logits.
        sink_k: ``[B, Hkv, S, d]``; sink_u: ``[B, Hkv, S, c]``.
        sink_count: ``[B, N]``, how many of the sinks each query can see.

    Returns:
        sums ``[B, Hq, N, c]`` and their log-scale ``[B, Hq, N, 1]``, ``-inf`` where no key is seen.
    """
    tokens, before = q.shape[2], k.shape[2] - q.shape[2]
    size = min(BLOCK, tokens)
    rows = [slice(0, tokens)]
    if min(window, k.shape[2]) + size > KEYS:
        rows = [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]
    parts = []
    for row in rows:
        reach = min(window, before + row.stop)
        keys = slice(max(0, before + row.start - max(reach - 1, 0)), before + row.stop)
        settings = (reach, size, scale)
        tensors = (q[:, :, row], k[:, :, keys], u[:, :, keys], sink_k, sink_u)
        parts.append(_Band.apply(*tensors, mask[:, keys], sink_count[:, row], settings))
    if len(parts) == 1:
        return Partial(*parts[0])
    return Partial(*(torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)))


class _Band(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        sink_k: Tensor,
        sink_u: Tensor,
        mask: Tensor,
        sink_count: Tensor,
        settings: tuple[int, int, float],
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, u, sink_k, sink_u, mask, sink_count)
        ctx.settings = settings
        call = _Call(q, k, u, sink_k, sink_u, mask, sink_count, settings)
        weights, log_scale = call.weights()
        sums = call.join(weights @ call.u)
        log_scale = call.join(log_scale)
        ctx.mark_non_differentiable(log_scale)
        return sums, log_scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, u, sink_k, sink_u, mask, sink_count = ctx.saved_tensors
        call = _Call(q, k, u, sink_k, sink_u, mask, sink_count, ctx.settings)
        weights, _ = call.weights()
        grad = call.blocks(grad_sums)
        grad_u = weights.transpose(-1, -2) @ grad
        grad_logits = (grad @ call.u.transpose(-1, -2)).mul_(weights)
        grad_q = call.join(grad_logits @ call.k).mul_(call.scale)
        grad_keys = (grad_logits.transpose(-1, -2) @ call.q).mul_(1 / LOG2E)
        grad_k, grad_sink_k = call.spread(grad_keys)
        grad_u, grad_sink_u = call.spread(grad_u)
        return grad_q, grad_k, grad_u, grad_sink_k, grad_sink_u, None, None, None


class _Call:
    """The blocks of one call: queries ``[B, Hkv, nb, r·b, d]``, keys ``[B, Hkv, nb, S + w + b - 1, d]``."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        u: Tensor,
        sink_k: Tensor,
        sink_u: Tensor,
        mask: Tensor,
        sink_count: Tensor,
        settings: tuple[int, int, float],
    ) -> None:
        self.reach, self.size, self.scale = settings
        self.batch, self.heads, self.tokens = q.shape[:3]
        self.kv_heads, self.seen = k.shape[1], k.shape[2]
        self.ratio = self.heads // self.kv_heads
        self.count = -(-self.tokens // self.size)
        self.behind = self.count * self.size - self.tokens
        self.width = self.reach + self.size - 1 if self.reach else 0
        # the first block's first query sees `reach` keys back, some before the first key
        self.ahead = self.reach - 1 - (self.seen - self.tokens)
        self.sinks = sink_k.shape[2]
        self.q = self.blocks(q) * (self.scale * LOG2E)
        self.k = self.windows(k, sink_k)
        self.u = self.windows(u, sink_u)
        self._mask, self._sink_count = mask, sink_count

    def blocks(self, x: Tensor) -> Tensor:
        """``[B, Hq, N, f]`` -> ``[B, Hkv, nb, r·b, f]``."""
        if self.behind:
            x = pad(x, (0, 0, 0, self.behind))
        x = x.unflatten(2, (self.count, self.size)).unflatten(1, (self.kv_heads, self.ratio))
        return x.transpose(2, 3).flatten(3, 4)

    def join(self, x: Tensor) -> Tensor:
        """Undo :meth:`blocks`."""
        x = x.unflatten(3, (self.ratio, self.size)).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)[:, :, : self.tokens]

    def windows(self, x: Tensor, sink: Tensor) -> Tensor:
        """``[B, Hkv, M, f]`` and ``[B, Hkv, S, f]`` -> ``[B, Hkv, nb, S + w + b - 1, f]``."""
        parts = []
        if self.sinks:
            parts.append(sink[:, :, None].expand(-1, -1, self.count, -1, -1))
        if self.reach:
            x = pad(x, (0, 0, self.ahead, self.behind))
            parts.append(x.unfold(2, self.width, self.size).transpose(-1, -2))
        return torch.cat(parts, dim=3)

    def spread(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of what :meth:`windows` took."""
        grad_sink = grad[:, :, :, : self.sinks].sum(2)
        shape = (*grad.shape[:2], self.ahead + self.seen + self.behind, grad.shape[-1])
        if not self.reach:
            return grad.new_zeros(*shape[:2], self.seen, shape[3]), grad_sink
        total = grad.new_zeros(shape)
        # pieces of `size` of different blocks do not overlap
        for start in range(0, self.width, self.size):
            piece = slice(self.sinks + start, self.sinks + min(start + self.size, self.width))
            part = grad[:, :, :, piece]
            part = pad(part, (0, 0, 0, self.size - part.shape[3])).flatten(2, 3)
            stop = min(start + part.shape[2], total.shape[2])
            total[:, :, start:stop] += part[:, :, : stop - start]
        return total[:, :, self.ahead : self.ahead + self.seen], grad_sink

    def weights(self) -> tuple[Tensor, Tensor]:
        """``e^(s - m)``, ``[B, Hkv, nb, r·b, S + w + b - 1]``, and every query's log-scale m."""
        logits = self.q @ self.k.transpose(-1, -2)
        by_head = logits.unflatten(3, (self.ratio, self.size))
        by_head += self._allowed(logits)
        # the bound makes all weights zero where no key is seen
        largest = logits.amax(-1, keepdim=True).clamp_(min=NEVER / 2)
        logits.sub_(largest).exp2_()
        return logits, (largest / LOG2E).masked_fill_(largest == NEVER / 2, -torch.inf)

    def _allowed(self, like: Tensor) -> Tensor:
        """Zero where a query may see a key, else ``NEVER``: ``[B, 1, nb, 1, b, S + w + b - 1]``."""
        parts = []
        device = like.device
        if self.sinks:
            count = pad(self._sink_count, (0, self.behind)).unflatten(1, (self.count, self.size))
            parts.append(torch.arange(self.sinks, device=device) < count[..., None])
        if self.reach:
            row = torch.arange(self.size, device=device)[:, None]
            ahead = torch.arange(self.width, device=device) - row
            band = (ahead >= 0) & (ahead < self.reach)
            mask = pad(self._mask, (self.ahead, self.behind)).unfold(1, self.width, self.size)
            parts.append(mask[:, :, None] & band)
        allowed = torch.cat(parts, dim=-1)
        added = torch.zeros_like(allowed, dtype=like.dtype).masked_fill_(~allowed, NEVER)
        return added[:, None, :, None]
