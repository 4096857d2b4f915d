"""Sequence mixers of the recall models: every kernel of the library, and the layers around it.

A mixer maps ``[B, N, width]`` to ``[B, N, width]`` and never looks ahead. Kernels mix through the same
engines that serve converted models, so what is trained here is what is deployed there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linearize.fitting.solve import taylor_factor
from linearize.grouping import contributions, fixed_groups
from linearize.kernels import HeadShape, Kernel, get
from linearize.kernels.oal import OAL
from linearize.ops import kernel_attention
from linearize.ops.partial import exact_partial, merge, with_ones

__all__ = ["PAIRWISE_UP_TO", "KernelMixer", "ShortConvolution", "engine", "projection"]

PAIRWISE_UP_TO = 256  # tokens up to which all pairs at once train faster than chunks of 128
OAL_NOISE = 0.1  # of the largest entry of L: the Taylor factor itself is a saddle


def engine(tokens: int) -> str:
    """The backend that trains faster at this length."""
    return "pairwise" if tokens <= PAIRWISE_UP_TO else "chunked"


def projection(width: int, out: int, initial: float | None = None) -> nn.Linear:
    """A linear map without bias, normal with standard deviation ``initial``, or ``width^{-1/2}``."""
    linear = nn.Linear(width, out, bias=False)
    nn.init.normal_(linear.weight, std=width**-0.5 if initial is None else initial)
    return linear


class ShortConvolution(nn.Module):
    """``u + (w * u) ⊙ (P u + b)``: a causal depthwise convolution, gated (Based, BaseConv).

    Args:
        width: channels.
        size: taps w of the convolution, the present token included; 1 mixes nothing.
        initial: standard deviation of P at the start; gate: b at the start.
    """

    def __init__(
        self, width: int, size: int = 3, *, initial: float | None = None, gate: float = 1.0
    ) -> None:
        super().__init__()
        self.gate = projection(width, width, initial)
        self.offset = nn.Parameter(torch.full((width,), gate))
        self.taps = nn.Parameter(torch.empty(size, width).uniform_(-(size**-0.5), size**-0.5))

    def forward(self, u: Tensor) -> Tensor:
        """``[B, N, width]`` -> the same."""
        mixed = u * self.taps[0]
        for back, tap in enumerate(self.taps[1:], 1):
            mixed = mixed + nn.functional.pad(u[:, :-back], (0, 0, back, 0)) * tap
        return u + mixed * (self.gate(u) + self.offset)


class KernelMixer(nn.Module):
    """Multi-head causal attention with a kernel: projections, :func:`kernel_attention`, projection.

    Queries and keys of every head have few dimensions (the feature dimension), values share the
    width.

    Args:
        width: channels of input and output.
        heads: number of heads, at most ``width``.
        feature_dim: dimensions of queries and keys.
        kernel: name of a kernel; options: its settings.
        initial: standard deviation of the projections at the start.
        seed: seed of what the kernel draws.

    Raises:
        PlanError: no such kernel, or it cannot have this shape.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        feature_dim: int,
        kernel: str,
        options: dict[str, Any] | None = None,
        *,
        initial: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        shape = HeadShape(heads, heads, feature_dim, width // heads, feature_dim**-0.5)
        known = {"seed": seed, **(options or {})}
        self.kernel: Kernel = get(kernel).build(shape, known)
        self.seed = seed
        self.sizes = [heads * feature_dim, heads * feature_dim, heads * shape.value_dim]
        self.inputs = projection(width, sum(self.sizes), initial)
        self.output = projection(self.sizes[2], width, initial)

    def forward(self, x: Tensor, backend: str | None = None) -> Tensor:
        """``[B, N, width]`` -> the same; ``backend`` as in :func:`kernel_attention`."""
        q, k, v = self.project(x)
        mixed = self.attend(q, k, v, backend or engine(x.shape[1]))
        return self.output(mixed.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``q, k [B, H, N, feature_dim]`` and ``v [B, H, N, width // H]``."""
        parts = self.inputs(x).split(self.sizes, dim=-1)
        heads = self.kernel.shape.query_heads
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        """Normalised attention ``[B, H, N, dv]``; softmax keeps every key exact."""
        tokens, scale = q.shape[2], self.kernel.shape.scale
        if self.kernel.exact and backend == "pairwise":  # only the exact piece of the engine
            causal = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
            return merge([exact_partial(q, k, with_ones(v), causal, scale)])
        window = tokens if self.kernel.exact else 0
        return kernel_attention(
            self.kernel.map(), q, k, v, scale=scale, window=window, backend=backend
        )[0]

    @torch.no_grad()
    def attention_map(self, x: Tensor) -> Tensor:
        """Normalised weights ``[B, H, N, N]``: what attention makes of one-hot values."""
        q, k, _ = self.project(x)
        one_hot = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        return self.attend(q, k, one_hot.expand(*q.shape[:2], -1, -1), "pairwise")

    @torch.no_grad()
    def prepare(self, x: Tensor) -> None:
        """Fix the structure a kernel finds in activations, from the first batch ``[B, N, width]``.

        OAL splits every head's dimensions at the largest gaps of their contributions under the
        initial projections, into as many groups as its settings say; L starts at the Taylor
        expansion of e^s plus noise and is trained with the rest.
        """
        if not isinstance(self.kernel, OAL):
            return
        q, k, _ = self.project(x)
        profile = contributions(q, k, self.kernel.shape.scale).mean(0)
        count = self.kernel.factor.shape[-1] - 1
        factor = taylor_factor(count).float()
        source = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(len(profile), *factor.shape, generator=source).tril()
        self.kernel.assign(fixed_groups(profile, count), factor + OAL_NOISE * noise)
