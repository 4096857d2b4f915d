"""What a timed path must equal: the definition over all pairs in fp64, for some query rows."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from linearize.attention import LinearAttention
from linearize.ops.partial import beside_exact, exact_partial, local_partial, merge, with_ones

__all__ = ["BOUNDS", "deviation", "expected", "in_double"]

KEYS = 2048  # keys whose kernel weights exist at once

# Largest relative output error per head at which a path counts as the same computation, by the
# precision of the inputs: sums in fp32 for fp32; rounding of inputs, weights and outputs for the rest.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def in_double(layer: LinearAttention) -> LinearAttention:
    """A copy of a layer whose kernel computes in fp64, with the same numbers."""
    copied = copy.deepcopy(layer)
    copied.kernel.to(torch.float64)
    copied.kernel.dtype = torch.float64
    return copied


def expected(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Causal outputs ``[B, Hq, n, dv]`` of the queries at positions ``at [n]``, in fp64.

    ``q [B, Hq, n, d]`` are those queries, ``k, v [B, Hkv, N, ·]`` all keys and values. ``layer`` comes
    from :func:`in_double`. The same as ``ops.pairwise.attend``, with the keys taken in blocks.
    """
    kernel = layer.map()
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    position = torch.arange(k.shape[2], device=k.device)
    distance = at[:, None] - position
    exact = (distance >= 0) & ((position < layer.sinks) | (distance < layer.window))
    through_kernel = (distance >= 0) & ~exact
    count = through_kernel.sum(-1)[None]
    u = with_ones(v)
    partials = []
    if layer.sinks or layer.window:
        partials.append(exact_partial(q, k, u, exact, layer.kernel.shape.scale))
    for start in range(0, k.shape[2], KEYS):
        part = slice(start, start + KEYS)
        mask = through_kernel[:, part]
        if mask.any():
            found = local_partial(kernel.weights(q, k[:, :, part]), u[:, :, part], mask)
            partials.append(beside_exact(found, count, layer.saturation))
    return merge(partials)


def deviation(actual: Tensor, wanted: Tensor) -> float:
    """Largest ``‖actual − wanted‖ / ‖wanted‖`` over the heads of ``[B, H, ...]``; inf if not finite."""
    actual, wanted = (x.detach().to(torch.float64).flatten(2) for x in (actual, wanted))
    error = (actual - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-300)
    return float(error.max()) if bool(error.isfinite().all()) else math.inf
