"""What the linear-time engines need to know of a kernel: its feature maps and its definition."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Features", "Grouped", "KernelMap", "Weights", "grouped_form"]


class Features(NamedTuple):
    """Feature vectors with an optional logarithmic scale per token.

    The true features are ``values * exp(log_scale)``; keeping the scale apart lets exponential
    features stay finite. ``values`` is ``[B, H, N, F]``, ``log_scale`` ``[B, H, N, 1]`` or ``None``
    for zero.
    """

    values: Tensor
    log_scale: Tensor | None = None


class Weights(NamedTuple):
    """Pairwise kernel weights ``values * exp(query_log + key_log)``.

    ``values`` is ``[B, Hq, Nq, Nk]``; ``query_log`` ``[B, Hq, Nq, 1]`` or ``None``; ``key_log``
    ``[B, Hq, 1, Nk]`` or ``None``.
    """

    values: Tensor
    query_log: Tensor | None = None
    key_log: Tensor | None = None


class Grouped(NamedTuple):
    """A kernel written as ``e^query_log (ε + ‖Lᵀ [1, s_1, …, s_G]‖²)``, ``s_g = scale Σ_{r in g} q_r k_r``.

    Attributes:
        query: ``[B, Hq, N, d]``; key: ``[B, Hkv, N, d]``: what the kernel makes of queries and keys.
        groups: ``[Hq, d]``, the group of each coordinate, ``0 … G-1``.
        factor: L, ``[Hq, G+1, G+1]``, zero above the diagonal.
        eps, scale: ε and the factor on every contribution.
        query_log: ``[B, Hq, N, 1]`` or ``None`` for zero.
    """

    query: Tensor
    key: Tensor
    groups: Tensor
    factor: Tensor
    eps: float
    scale: float
    query_log: Tensor | None = None


class KernelMap(Protocol):
    """A kernel as the engines see it: ``kappa(q, k) = <query_features(q), key_features(k)>``.

    A map may also have a method ``grouped(q, k) -> Grouped | None``: a kernel that can be written that
    way, and whose key features are the packed products ``[1, k', k'_r k'_t (r ≤ t)]`` of
    ``Grouped.key``, gets a faster engine.

    Attributes:
        dtype: precision of features, weights and sums (fp32 unless SPEC section 3 says fp64).
        shared_state: whether one state serves all query heads of a KV head (the key features do
            not depend on the query head) or every query head keeps its own.
    """

    dtype: torch.dtype
    shared_state: bool

    def query_features(self, q: Tensor) -> Features:
        """``q [B, Hq, N, d]`` -> features ``[B, Hq, N, F]``."""
        ...

    def key_features(self, k: Tensor) -> Features:
        """``k [B, Hkv, N, d]`` -> ``[B, Hkv, N, F]`` if the state is shared, else ``[B, Hq, N, F]``."""
        ...

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """``q [B, Hq, Nq, d]``, ``k [B, Hkv, Nk, d]`` -> pairwise weights ``[B, Hq, Nq, Nk]``."""
        ...


def grouped_form(kernel: KernelMap, q: Tensor, k: Tensor) -> Grouped | None:
    """The kernel on ``q [B, Hq, N, d]``, ``k [B, Hkv, N, d]`` in grouped form, if it has one."""
    method = getattr(kernel, "grouped", None)
    form: Grouped | None = None if method is None else method(q, k)
    return form
