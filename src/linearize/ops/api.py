"""Public operators: one function a state form, with the engine chosen by name."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from linearize.errors import BackendError, LinearizeError
from linearize.ops import chunked, pairwise, recurrent
from linearize.ops.features import KernelMap
from linearize.ops.quadratic import DimensionQuadratic, GroupedQuadratic
from linearize.ops.state import State
from linearize.ops.triton import engine as triton

__all__ = [
    "BACKENDS",
    "dimension_quadratic_attention",
    "grouped_quadratic_attention",
    "kernel_attention",
    "resolve_backend",
]

BACKENDS = ("auto", "pairwise", "chunked", "recurrent", "triton")


def resolve_backend(backend: str, tokens: int) -> str:
    """The PyTorch engine ``auto`` takes for ``tokens`` new tokens: recurrent for one, else chunked.

    Raises:
        BackendError: the name is unknown.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r}", f"backends {', '.join(BACKENDS)}", "Choose one.")
    if backend != "auto":
        return backend
    return "recurrent" if tokens == 1 else "chunked"


def kernel_attention(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    sinks: int = 0,
    window: int = 0,
    saturation: int | None = None,
    key_mask: Tensor | None = None,
    state: State | None = None,
    backend: str = "auto",
    return_state: bool = True,
    overwrite: bool = False,
) -> tuple[Tensor, State | None]:
    """Causal normalised attention with any kernel map, optional exact sinks and window.

    Args:
        kernel: feature maps and definition.
        q, k, v: ``[B, Hq, N, d]``, ``[B, Hkv, N, d]``, ``[B, Hkv, N, dv]``; query head ``h`` reads KV
            head ``h // (Hq / Hkv)``.
        scale: logit scale of the exact part.
        sinks, window: number of first and of latest keys kept exact.
        saturation: beside exact keys, the kernel's part weighs no more than this many keys would: its
            sum over m keys is multiplied by ``min(1, saturation / m)``. Without exact keys the factor
            cancels.
        key_mask: ``[B, N]``, true for real tokens.
        state: the state to continue from.
        backend: ``"pairwise"``, ``"chunked"``, ``"recurrent"``, ``"triton"`` or ``"auto"``, which
            takes triton for tensors on CUDA where it can run, else what :func:`resolve_backend` says.
        return_state: whether the state after the last token is wanted; without it less is computed.
        overwrite: ``state`` is given up: its memory may hold the next state. Decoding without it
            makes a new state for every token.

    Returns:
        ``[B, Hq, N, dv]`` in ``v``'s dtype, and the state after the last token (``None`` if it is not
        wanted, and from the pairwise definition, which keeps none).

    Raises:
        LinearizeError: shapes do not fit together. BackendError: the backend is unknown, cannot
            continue from a state, or cannot run here.
    """
    _check_shapes(q, k, v, key_mask)
    key_mask = None if key_mask is None else key_mask.bool()
    name = _choose(backend, kernel, q, k)
    call: dict[str, Any] = dict(
        scale=scale, sinks=sinks, window=window, saturation=saturation, key_mask=key_mask
    )
    if name == "pairwise":
        if state is not None:
            raise BackendError(
                "the pairwise backend with a state",
                "a definition over whole sequences",
                'Use backend="chunked" or "recurrent" to continue.',
            )
        return pairwise.attend(kernel, q, k, v, **call).to(v.dtype), None
    call["state"] = state
    if name == "triton":
        call |= {"grouped": triton.of_groups, "chunk": triton.chunk_of(q.shape[2])}
    if name == "recurrent":
        output, after = recurrent.attend(kernel, q, k, v, **call, overwrite=overwrite)
        return output, after if return_state else None
    return chunked.attend(kernel, q, k, v, **call, return_state=return_state)


def _choose(backend: str, kernel: KernelMap, q: Tensor, k: Tensor) -> str:
    """The engine of a call.

    Raises:
        BackendError: the name is unknown, or names an engine that cannot run the call.
    """
    name = resolve_backend(backend, q.shape[2])
    if name == "triton":
        reason = triton.why_not(kernel, q, k)
        if reason is not None:
            raise BackendError("the triton backend", reason, 'Use backend="auto".')
    elif backend == "auto" and q.is_cuda and triton.why_not(kernel, q, k) is None:
        return "triton"
    return name


@overload
def grouped_quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    factor: Tensor,
    *,
    eps: float = ...,
    scale: float | None = ...,
    key_mask: Tensor | None = ...,
    state: State | None = ...,
    return_state: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def grouped_quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    factor: Tensor,
    *,
    eps: float = ...,
    scale: float | None = ...,
    key_mask: Tensor | None = ...,
    state: State | None = ...,
    return_state: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, State]: ...


def grouped_quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Tensor,
    factor: Tensor,
    *,
    eps: float = 1e-6,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, State]:
    """OAL attention (OAL paper, section 4.3): ``κ = eps + ‖Lᵀ [1, s_1, …, s_G]‖²``, normalised.

    Args:
        q: ``[B, Hq, N, d]``, k: ``[B, Hkv, N, d]``, v: ``[B, Hkv, N, dv]``.
        groups: integers ``[Hq, d]``, the group of each coordinate.
        factor: ``[Hq, Gmax+1, Gmax+1]``, lower-triangular, zero-padded.
        eps: positive floor.
        scale: contribution scale, ``1/sqrt(d)`` by default.
        key_mask: ``[B, N]``, true for real tokens.
        state: continue from here; return_state: also return the state after the last token.
        backend: see :func:`kernel_attention`; fp64 inputs are computed in fp64.

    Returns:
        ``[B, Hq, N, dv]``, and the state if asked.

    Raises:
        LinearizeError: shapes or group indices do not fit together.
    """
    _check_shapes(q, k, v, key_mask)
    heads, dim = q.shape[1], q.shape[3]
    size = factor.shape[-1]
    if groups.shape != (heads, dim) or factor.shape != (heads, size, size):
        raise LinearizeError(
            f"groups {tuple(groups.shape)} and factor {tuple(factor.shape)}",
            f"queries {tuple(q.shape)}",
            f"Pass groups [{heads}, {dim}] and factor [{heads}, G+1, G+1].",
        )
    if int(groups.min()) < 0 or int(groups.max()) > size - 2:
        raise LinearizeError(
            f"groups {int(groups.min())}..{int(groups.max())}",
            f"a factor for groups 0..{size - 2}",
            "Number groups from 0 and size the factor for the largest.",
        )
    scale = dim**-0.5 if scale is None else scale
    kernel = GroupedQuadratic(groups, factor, eps=eps, scale=scale, dtype=_precision(q))
    return _run(kernel, q, k, v, scale, key_mask, state, return_state, backend)


def dimension_quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, State]:
    """The ungrouped quadratic ``a + Σ b_r x_r + Σ C_rt x_r x_t`` (OAL paper, equation 3), normalised.

    ``a [Hq]``, ``b [Hq, d]``, ``c [Hq, d, d]`` symmetric; other arguments as in
    :func:`grouped_quadratic_attention`. Weights are positive only if the coefficients make them so.

    Raises:
        LinearizeError: shapes do not fit together.
    """
    _check_shapes(q, k, v, key_mask)
    heads, dim = q.shape[1], q.shape[3]
    if a.shape != (heads,) or b.shape != (heads, dim) or c.shape != (heads, dim, dim):
        raise LinearizeError(
            f"coefficients {tuple(a.shape)}, {tuple(b.shape)}, {tuple(c.shape)}",
            f"queries {tuple(q.shape)}",
            f"Pass a [{heads}], b [{heads}, {dim}], c [{heads}, {dim}, {dim}].",
        )
    scale = dim**-0.5 if scale is None else scale
    kernel = DimensionQuadratic(a, b, c, scale=scale, dtype=_precision(q))
    return _run(kernel, q, k, v, scale, key_mask, state, return_state, backend)


def _run(
    kernel: KernelMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    key_mask: Tensor | None,
    state: State | None,
    return_state: bool,
    backend: str,
) -> Tensor | tuple[Tensor, State]:
    output, after = kernel_attention(
        kernel,
        q,
        k,
        v,
        scale=scale,
        key_mask=key_mask,
        state=state,
        backend=backend,
        return_state=return_state,
    )
    if not return_state:
        return output
    if after is None:
        raise BackendError(
            "a state from the pairwise backend",
            "a definition that keeps none",
            'Use backend="chunked" or "recurrent".',
        )
    return output, after


def _precision(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and q.shape[0] == k.shape[0]
        and q.shape[2:] == k.shape[2:]
        and q.shape[1] % k.shape[1] == 0
        and (key_mask is None or key_mask.shape == (q.shape[0], q.shape[2]))
        and q.shape[2] > 0
    )
    if not fits:
        raise LinearizeError(
            "attention over q [B, Hq, N, d], k [B, Hkv, N, d], v [B, Hkv, N, dv], key_mask [B, N]",
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            + ("" if key_mask is None else f", key_mask {tuple(key_mask.shape)}"),
            "Give new keys only (N equal for all), with Hq a multiple of Hkv.",
        )
