"""A kernel on some coordinates of a head, softmax on the others: the intervention of appendix A.2.

With the coordinates S selected, ``κ̃ = κ̂_S · exp(Σ_{r∉S} x_r)``: the kernel sees queries and keys
whose other coordinates are zero, and its weights are multiplied by the exact factor of those. The
product is normalised over the causal keys like any kernel.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linearize.fitting import Activations
from linearize.fitting.data import sample_positions
from linearize.kernels import Kernel
from linearize.ops import Weights
from linearize.ops.pairwise import attend
from linearize.ops.partial import exact_partial, local_partial, merge, with_ones

__all__ = ["Sampled", "full_errors", "hybrid_errors", "hybrid_outputs", "sample"]


@dataclass(frozen=True)
class Sampled:
    """Sequences seen from some of their query positions.

    Attributes:
        q: queries at these positions, ``[B, Hq, n, d]``.
        k, v: all keys and values, ``[B, Hkv, N, ·]``.
        at: the positions, ascending, ``[B, n]``.
        target: softmax attention there, ``[B, Hq, n, dv]`` in fp64.
        scale: logit scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    at: Tensor
    target: Tensor
    scale: float

    def __len__(self) -> int:
        return len(self.q)

    def causal(self, sequence: int) -> Tensor:
        """Which keys a query sees, ``[n, N]``."""
        return torch.arange(self.k.shape[2]) <= self.at[sequence, :, None]


def sample(data: Activations, scale: float, positions: int, source: torch.Generator) -> Sampled:
    """``positions`` random query positions of every sequence, with their softmax outputs."""
    tokens = data.q.shape[2]
    at = torch.stack([sample_positions(tokens, positions, source) for _ in range(len(data))])
    q = torch.stack([data.q[each, :, at[each]] for each in range(len(data))])
    found = Sampled(q, data.k, data.v, at, torch.empty(0), scale)
    target = []
    for each in range(len(found)):
        part = slice(each, each + 1)
        q64, k64, v64 = (x[part].double() for x in (q, data.k, data.v))
        target.append(
            merge([exact_partial(q64, k64, with_ones(v64), found.causal(each), scale)])[0]
        )
    return replace(found, target=torch.stack(target))


def full_errors(kernel: Kernel, data: Sampled) -> Tensor:
    """Mean square output error of the kernel on whole heads, ``[B, Hq]``."""
    errors = []
    for each in range(len(data)):
        q, k, v = (x[each : each + 1] for x in (data.q, data.k, data.v))
        output = attend(kernel.map(), q, k, v, scale=data.scale, query_at=data.at[each])
        errors.append(_error(output[0], data.target[each]))
    return torch.stack(errors)


def hybrid_errors(kernel: Kernel, data: Sampled, selected: Tensor) -> Tensor:
    """Mean square output error with the kernel on ``selected [Hq, d]`` only, ``[B, Hq]``."""
    errors = []
    for each in range(len(data)):
        q, k, v = (x[each : each + 1] for x in (data.q, data.k, data.v))
        output = hybrid_outputs(kernel, q, k, v, selected, scale=data.scale, query_at=data.at[each])
        errors.append(_error(output[0], data.target[each]))
    return torch.stack(errors)


def hybrid_outputs(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    *,
    scale: float,
    query_at: Tensor,
) -> Tensor:
    """Attention with the hybrid kernel, pair by pair.

    Args:
        kernel: works in its own precision; the exact factor and all sums are fp64.
        q, k, v: ``[B, Hq, n, d]``, ``[B, Hkv, N, d]``, ``[B, Hkv, N, dv]``.
        selected: the coordinates the kernel is applied to, boolean ``[Hq, d]``.
        query_at: positions of the queries, ``[n]``.

    Returns:
        ``[B, Hq, n, dv]`` in fp64.
    """
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, dim=1) for x in (k, v))
    chosen = selected[:, None]
    weights = _for_each_query_head(kernel).map().weights
    values, query_log, key_log = weights(
        (q * chosen).to(kernel.dtype), (k * chosen).to(kernel.dtype)
    )
    log = (q.double() * ~chosen * scale) @ k.double().transpose(-1, -2)
    if key_log is not None:
        log = log + key_log.double()
    if query_log is not None:
        query_log = query_log.double()
    causal = torch.arange(k.shape[2]) <= query_at[:, None]
    return merge(
        [local_partial(Weights(values.double(), query_log, log), with_ones(v.double()), causal)]
    )


def _for_each_query_head(kernel: Kernel) -> Kernel:
    """The same kernel for keys that are given once per query head: here every head masks its own."""
    alike = copy.copy(kernel)  # shares parameters and buffers
    alike.shape = replace(kernel.shape, kv_heads=kernel.shape.query_heads)
    return alike


def _error(output: Tensor, target: Tensor) -> Tensor:
    return (output.double() - target).square().mean((1, 2))
