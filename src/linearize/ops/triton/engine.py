"""The engine: kernels in grouped form on the GPU, with windows, sinks and padding around them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from linearize.ops.features import Grouped, KernelMap, grouped_form
from linearize.ops.partial import Partial
from linearize.ops.quadratic import packed_coefficients
from linearize.ops.sums import Sums

__all__ = ["chunk_of", "of_groups", "why_not"]


def why_not(kernel: KernelMap, q: Tensor, k: Tensor) -> str | None:
    """Why this engine cannot run a call; ``None`` if it can.

    ``q [B, Hq, N, d]`` and ``k [B, Hkv, N, d]`` are the call's.
    """
    if find_spec("triton") is None:
        return "no triton package; it comes with torch for CUDA, or as the extra 'triton'"
    if not q.is_cuda and not _interpreted():
        return f"tensors on {q.device.type!r}, without TRITON_INTERPRET=1 when Python started"
    if kernel.dtype != torch.float32:
        return f"a kernel that computes in {kernel.dtype}, where these sum in fp32"
    if grouped_form(kernel, *(x[:, :, :1].to(kernel.dtype) for x in (q, k))) is None:
        return "a kernel that is no grouped quadratic"
    return None


def chunk_of(tokens: int) -> int:
    """Tokens between two states, for a call of so many."""
    return min(tokens, int(_kernels().CHUNK))


def of_groups(
    form: Grouped, u: Tensor, state: Tensor | None, *, chunk: int, keep_state: bool
) -> Sums:
    """As :func:`linearize.ops.sums.of_groups`; one token without gradients takes the decoding kernel."""
    sums = _kernels()
    batch, tokens = u.shape[0], u.shape[2]
    q, k, u = (x.flatten(0, 1) for x in (form.query, form.key, u))
    numbers = sums.Numbers.of(
        form.groups.repeat(batch, 1),
        form.factor.repeat(batch, 1, 1),
        packed_coefficients(form.groups, form.factor, form.eps, form.scale).repeat(batch, 1),
        form.eps,
        form.scale,
        len(k),
    )
    before = None if state is None else state.flatten(0, 1)
    if tokens == 1 and before is not None and not torch.is_grad_enabled():
        y, after = sums.decode_sums(q[:, 0], k[:, 0], u[:, 0], numbers, before)
        y = y[:, None]
    else:
        y, after = sums.grouped_sums(
            q, k, u, numbers, state=before, keep_state=keep_state, chunk=chunk
        )
    after = None if after is None else after.unflatten(0, (batch, -1))
    return Sums(Partial(y.unflatten(0, (batch, -1)), form.query_log), after, None)


def _interpreted() -> bool:
    """Whether Triton's kernels were defined under TRITON_INTERPRET=1, and so run on any tensor."""
    return type(_kernels().decode_kernel).__name__ == "InterpretedFunction"


def _kernels() -> Any:
    return importlib.import_module("linearize.ops.triton.sums")
