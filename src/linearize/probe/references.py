"""Mamba and RWKV from transformers, as mixers beside the kernels.

Structure, parameters and their initial values are transformers' own. Its forward passes are not used:
without compiled kernels they index into whole sequences token by token, which makes a training step
quadratic in the length (27 s for 64 sequences of 128 tokens and two Mamba layers). The same
recurrences are written out here over tensors split once, and agree with transformers' results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus
from transformers import MambaConfig, MambaModel, RwkvConfig, RwkvModel

__all__ = ["Mamba", "Rwkv", "mamba_layers", "rwkv_layers"]


class Mamba(nn.Module):
    """One selective state space layer: ``h_t = e^{Δ_t A} h_{t-1} + Δ_t B_t u_t``, ``y_t = C_t h_t + D u_t``.

    Args:
        inner: a ``MambaMixer`` of transformers, which holds the parameters.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, width]`` -> the same."""
        inner, tokens = self.inner, x.shape[1]
        u, gate = inner.in_proj(x).chunk(2, dim=-1)
        conv = inner.conv1d
        u = conv1d(
            u.transpose(1, 2), conv.weight, conv.bias, padding=conv.padding, groups=conv.groups
        )
        u = silu(u[..., :tokens]).transpose(1, 2)
        sizes = [inner.time_step_rank, inner.ssm_state_size, inner.ssm_state_size]
        step, into, out = inner.x_proj(u).split(sizes, dim=-1)
        step = softplus(inner.dt_proj(step))
        scanned: Tensor = _SelectiveScan.apply(step, step * u, into, out, -inner.A_log.exp())
        return inner.out_proj((scanned + u * inner.D) * silu(gate))


class _SelectiveScan(torch.autograd.Function):
    """``y_t = h_t c_t`` with ``h_t = exp(step_t A) ⊙ h_{t-1} + drive_t b_tᵀ``, one token at a time.

    ``step, drive [B, N, D]``, ``b, c [B, N, S]``, ``A [D, S]`` -> ``[B, N, D]``. Only the states h are
    kept for the backward pass; everything else of size ``D S`` lives for one token.
    """

    @staticmethod
    def forward(
        ctx: Any, step: Tensor, drive: Tensor, b: Tensor, c: Tensor, rate: Tensor
    ) -> Tensor:
        batch, tokens, width = step.shape
        states = step.new_empty(tokens + 1, batch, width, rate.shape[1])
        states[0] = 0
        outputs = step.new_empty(batch, tokens, width)
        for t in range(tokens):
            decay = (step[:, t, :, None] * rate).exp_()
            torch.mul(decay, states[t], out=states[t + 1])
            states[t + 1].addcmul_(drive[:, t, :, None], b[:, t, None])
            outputs[:, t] = (states[t + 1] @ c[:, t, :, None])[..., 0]
        ctx.save_for_backward(step, drive, b, c, rate, states)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        step, drive, b, c, rate, states = ctx.saved_tensors
        (grad,) = grads
        results = tuple(torch.empty_like(x) for x in (step, drive, b, c))
        for_step, for_drive, for_b, for_c = results
        for_rate = torch.zeros_like(rate)
        ahead = torch.zeros_like(states[0])  # gradient of h_t
        for t in reversed(range(step.shape[1])):
            ahead.addcmul_(grad[:, t, :, None], c[:, t, None])
            for_c[:, t] = (grad[:, t, None] @ states[t + 1])[:, 0]
            for_drive[:, t] = (ahead @ b[:, t, :, None])[..., 0]
            for_b[:, t] = (drive[:, t, None] @ ahead)[:, 0]
            ahead.mul_((step[:, t, :, None] * rate).exp_())
            through = ahead * states[t]  # gradient of the exponent
            for_step[:, t] = (through * rate).sum(-1)
            for_rate += (through * step[:, t, :, None]).sum(0)
        return *results, for_rate


class Rwkv(nn.Module):
    """The time mixing of RWKV-4: an exponentially decaying average of values, weighted by ``e^k``.

    Args:
        inner: an ``RwkvSelfAttention`` of transformers, which holds the parameters.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner

    def forward(self, x: Tensor) -> Tensor:
        """``[B, N, width]`` -> the same."""
        receptance, key, value, _ = self.inner.extract_key_value(x)
        mixed = _decaying_average(self.inner.time_decay, self.inner.time_first, key, value)
        return self.inner.output(receptance * mixed)


def _decaying_average(decay: Tensor, first: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``Σ_j w_tj v_j / Σ_j w_tj``, channel by channel.

    ``w_tj = e^{k_j - (t-1-j) e^{decay}}`` before t, ``e^{k_t + first}`` at t. ``[B, N, C]`` -> the
    same. Sums carry a running maximum of the exponents, so nothing overflows; it cancels, and needs
    no gradient.
    """
    rate = decay.exp()
    total = weight = torch.zeros_like(key[:, 0])
    largest = torch.full_like(total, -1e38)
    outputs = []
    for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
        now = k + first
        top = torch.maximum(largest, now.detach())
        past, present = (largest - top).exp(), (now - top).exp()
        outputs.append((past * total + present * v) / (past * weight + present))
        faded = largest - rate
        top = torch.maximum(faded, k).detach()
        past, present = (faded - top).exp(), (k - top).exp()
        total, weight, largest = past * total + present * v, past * weight + present, top
    return torch.stack(outputs, dim=1)


def mamba_layers(width: int, layers: int) -> list[nn.Module]:
    """The mixers of a new ``MambaModel``: state 16, expansion 2, convolution over 4 tokens."""
    config = MambaConfig(vocab_size=1, hidden_size=width, state_size=16, num_hidden_layers=layers)
    blocks: Any = MambaModel(config).layers
    return [Mamba(block.mixer) for block in blocks]


def rwkv_layers(width: int, layers: int, tokens: int) -> list[nn.Module]:
    """The time mixers of a new ``RwkvModel``; its channel mixers are left out, as no mixer has one."""
    config = RwkvConfig(
        vocab_size=1,
        hidden_size=width,
        attention_hidden_size=width,
        num_hidden_layers=layers,
        context_length=tokens,
    )
    blocks: Any = RwkvModel(config).blocks
    return [Rwkv(block.attention) for block in blocks]
