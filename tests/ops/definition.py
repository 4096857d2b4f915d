"""The definitions of SPEC sections 1 and 2 written out with loops, in fp64, sharing no library code."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

Array = NDArray[np.float64]
Weight = Callable[[int, Array, Array], Array]  # (query head, q [d], k [m, d]) -> weights [m]


def grouped_weight(groups: Tensor, factor: Tensor, *, eps: float, scale: float) -> Weight:
    """``eps + s̄ᵀ L Lᵀ s̄``, with ``s̄ = [1, s_1, …, s_G]`` and ``s_g`` the scaled sum over group g."""
    member, lower = groups.numpy(), np.tril(_array(factor))

    def weight(head: int, q: Array, k: Array) -> Array:
        result = np.empty(len(k))
        gram = lower[head] @ lower[head].T
        for j, key in enumerate(k):
            extended = np.zeros(len(gram))
            extended[0] = 1
            for r, (a, b) in enumerate(zip(q, key, strict=True)):
                extended[1 + member[head, r]] += a * b * scale
            result[j] = eps + extended @ gram @ extended
        return result

    return weight


def dimension_weight(a: Tensor, b: Tensor, c: Tensor, *, scale: float) -> Weight:
    """``a + Σ_r b_r x_r + Σ_{r,t} C_rt x_r x_t`` with ``x_r = q_r k_r scale``."""
    constant, linear, quadratic = _array(a), _array(b), _array(c)

    def weight(head: int, q: Array, k: Array) -> Array:
        x = q * k * scale
        squares = np.einsum("jr,rt,jt->j", x, quadratic[head], x)
        return constant[head] + x @ linear[head] + squares

    return weight


def attention(
    weight: Weight | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    sinks: int = 0,
    window: int = 0,
    saturation: int | None = None,
    key_mask: Tensor | None = None,
    logarithmic: bool = False,
) -> Tensor:
    """Causal normalised attention, query by query; ``weight=None`` is softmax.

    The first ``sinks`` real keys and the latest ``window`` keys weigh ``exp(q·k scale)``, the others
    ``weight`` (its exponential if ``logarithmic``), under one denominator. Beside exact keys, more
    than ``saturation`` others weigh as much as that many. Queries that see no key give zeros.
    """
    queries, keys, values = _array(q), _array(k), _array(v)
    batch, heads, tokens, _ = queries.shape
    ratio = heads // keys.shape[1]
    real = np.ones((batch, tokens), bool) if key_mask is None else key_mask.numpy().astype(bool)
    output = np.zeros((batch, heads, tokens, values.shape[-1]))
    for row in range(batch):
        first = set(np.flatnonzero(real[row])[:sinks].tolist())
        for head in range(heads):
            for i in range(tokens):
                seen = [j for j in range(i + 1) if real[row, j]]
                if not seen:
                    continue
                key, value = keys[row, head // ratio, seen], values[row, head // ratio, seen]
                query = queries[row, head, i]
                exact = np.array(
                    [weight is None or j in first or i - j < window for j in seen], dtype=bool
                )
                log = np.full(len(seen), -math.inf)
                log[exact] = key[exact] @ query * scale
                sign = np.ones(len(seen))
                if weight is not None and not exact.all():
                    kernel = weight(head, query, key[~exact])
                    if logarithmic:
                        log[~exact] = kernel
                    else:
                        log[~exact] = np.log(np.abs(kernel).clip(1e-300))
                        sign[~exact] = np.sign(kernel)
                    if saturation is not None and (sinks or window):
                        log[~exact] += math.log(min(1.0, saturation / np.sum(~exact)))
                weights = sign * np.exp(log - log.max())
                output[row, head, i] = weights @ value / weights.sum()
    return from_numpy(output)


def _array(x: Tensor) -> Array:
    return x.detach().double().numpy()
