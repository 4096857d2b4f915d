"""What fitting works on: one layer's frozen activations, and the result of a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from linearize.ops.features import KernelMap
from linearize.plan import Plan

__all__ = ["Activations", "Calibration", "FitResult", "sample_positions", "softmax_outputs"]


@dataclass(frozen=True)
class Activations:
    """Post-RoPE ``q [n, Hq, N, d]``, ``k [n, Hkv, N, d]``, ``v [n, Hkv, N, dv]`` of n sequences.

    ``targets`` remembers the softmax outputs computed so far, by sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    targets: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return self.q.shape[0]

    def with_keys(self, k: Tensor) -> Activations:
        """The same with other keys (what the kernel sees after a key transform)."""
        return replace(self, k=k, targets={})


@dataclass(frozen=True)
class Calibration:
    """Everything a kernel may learn from, for one layer.

    Attributes:
        prompts: short sequences for data-dependent structure (groups).
        fit, validation: the sequences of the output matching, with the model's own keys.
        kernel_fit, kernel_validation, kernel_prompts: the same with the keys the kernel sees; equal
            to the others without a key transform.
        scale: logit scale of the layer.
        layer: zero-based index of the layer (a part of every random seed).
        plan: the plan.
        view: how the layer presents a kernel map to its queries (its gain beside exact keys).
        parameters: parameters of that view, trained together with the kernel's.
    """

    prompts: Activations
    fit: Activations
    validation: Activations
    kernel_prompts: Activations
    kernel_fit: Activations
    kernel_validation: Activations
    scale: float
    layer: int
    plan: Plan
    view: Callable[[KernelMap], KernelMap] = lambda kernel: kernel
    parameters: tuple[nn.Parameter, ...] = ()

    @staticmethod
    def plain(
        prompts: Activations,
        fit: Activations,
        validation: Activations,
        *,
        scale: float,
        layer: int,
        plan: Plan,
    ) -> Calibration:
        """Activations as they are: the kernel sees the model's own keys."""
        return Calibration(
            prompts, fit, validation, prompts, fit, validation, scale=scale, layer=layer, plan=plan
        )

    def generator(self, purpose: int) -> torch.Generator:
        """A generator that depends on the plan's seed, the layer and the purpose alone."""
        seed = (self.plan.seed * 1_000_003 + self.layer) * 101 + purpose
        return torch.Generator().manual_seed(seed % 2**63)


@dataclass(frozen=True)
class FitResult:
    """How one layer's fit went, per query head.

    Attributes:
        fit_mse: mean squared error of the normalised outputs on the fitting positions, ``[Hq]``.
        start: name of the winning start of every head.
        curve: fitting loss (mean over heads) at the start and along the fit.
    """

    fit_mse: list[float]
    start: list[str]
    curve: list[float]


def softmax_outputs(
    data: Activations, scale: float, block: int, query_at: Tensor | None = None
) -> Tensor:
    """Causal softmax attention of sequence ``block``: the fitting target, ``[Hq, n, dv]``.

    ``query_at [n]`` restricts it to some positions. Each sequence is computed once.
    """
    if block not in data.targets:
        data.targets[block] = torch.nn.functional.scaled_dot_product_attention(
            data.q[block, None],
            data.k[block, None],
            data.v[block, None],
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )[0]
    outputs = data.targets[block]
    return outputs if query_at is None else outputs[:, query_at]


def sample_positions(tokens: int, count: int, generator: torch.Generator) -> Tensor:
    """``min(count, tokens)`` distinct positions, ascending."""
    return torch.randperm(tokens, generator=generator)[:count].sort().values
