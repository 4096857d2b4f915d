"""Attention operators: definition, linear-time and one-token forms of the same kernels."""

from linearize.ops.api import (
    BACKENDS,
    dimension_quadratic_attention,
    grouped_quadratic_attention,
    kernel_attention,
    resolve_backend,
)
from linearize.ops.features import Features, KernelMap, Weights
from linearize.ops.state import State

__all__ = [
    "BACKENDS",
    "Features",
    "KernelMap",
    "State",
    "Weights",
    "dimension_quadratic_attention",
    "grouped_quadratic_attention",
    "kernel_attention",
    "resolve_backend",
]
