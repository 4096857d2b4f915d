"""Random but sensible kernels, inputs and calibrations for the kernel tests."""

from typing import Any

import torch
from torch import Tensor

from linearize import kernels
from linearize.fitting import Activations, Calibration
from linearize.kernels import HeadShape, Kernel
from linearize.kernels.oal import OAL
from linearize.ops import KernelMap
from linearize.ops.quadratic import GroupedQuadratic
from linearize.plan import Plan

OPTIONS: dict[str, dict[str, Any]] = {"performer": {"features": 20}}  # small ones, for speed

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, OPTIONS.get(name, {})) for name in kernels.available()},
    "rebased, norm": ("rebased", {"affine": False}),
    "rebased, affine": ("rebased", {"norm": False}),
    "rebased-outer, norm": ("rebased-outer", {"affine": False}),
    "rebased-outer, affine": ("rebased-outer", {"norm": False}),
    "spectraformer, released": ("spectraformer", {"released": True}),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def shape_of(query_heads: int, kv_heads: int, dim: int = 8, value_dim: int = 5) -> HeadShape:
    return HeadShape(query_heads, kv_heads, dim, value_dim, dim**-0.5)


def make(case: str, shape: HeadShape, seed: int = 0) -> Kernel:
    """The kernel of a case of ``VARIANTS`` with its parameters moved off their special start."""
    name, options = VARIANTS[case]
    kernel = kernels.get(name).build(shape, {"seed": seed, **options})
    source = generator(seed + 1)
    if isinstance(kernel, OAL):
        highest = kernel.factor.shape[-1] - 1
        groups = torch.randint(highest, (shape.query_heads, shape.head_dim), generator=source)
        groups[:, 0] = 0
        kernel.assign(groups, kernel.factor.detach())
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=source)
    return kernel


def map_in(kernel: Kernel, dtype: torch.dtype) -> KernelMap:
    """The kernel's map with everything in ``dtype``; parameters keep their gradients."""
    kernel.to(dtype)
    kernel.dtype = dtype
    if isinstance(kernel, OAL):  # its own map is always fp32
        scale = kernel.shape.scale
        return GroupedQuadratic(
            kernel.groups, kernel.factor, eps=kernel.eps, scale=scale, dtype=dtype
        )
    return kernel.map()


def inputs(
    shape: HeadShape,
    tokens: int,
    *,
    batch: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal ``q, k, v``."""
    source = generator(seed)
    sizes = (
        (batch, shape.query_heads, tokens, shape.head_dim),
        (batch, shape.kv_heads, tokens, shape.head_dim),
        (batch, shape.kv_heads, tokens, shape.value_dim),
    )
    q, k, v = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in sizes)
    return q, k, v


def calibration(
    shape: HeadShape, *, tokens: int = 40, blocks: int = 1, sharpness: float = 1.5, **plan: Any
) -> Calibration:
    """A synthetic layer: normal activations whose queries resemble some key, so weights are spiky."""
    q, k, v = inputs(shape, tokens, batch=2 * blocks, seed=7, dtype=torch.float32)
    q = sharpness * (k.repeat_interleave(shape.ratio, dim=1).roll(1, dims=2) + 0.5 * q)
    fit = Activations(q[:blocks], k[:blocks], v[:blocks])
    validation = Activations(q[blocks:], k[blocks:], v[blocks:])
    return Calibration(
        prompts=fit,
        fit=fit,
        validation=validation,
        kernel_prompts=fit,
        kernel_fit=fit,
        kernel_validation=validation,
        scale=shape.scale,
        layer=0,
        plan=Plan(**plan),
    )
