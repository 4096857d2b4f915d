"""How close two computations of the same quantity must be, and why. The same here and in CI.

A bound is relative to the size of the compared tensor: ``|a − b| ≤ bound · max(1, max |b|)``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "assert_close", "bound"]


class Bound(NamedTuple):
    """A bound and the reason for its size."""

    value: float
    reason: str


TOLERANCES: dict[tuple[torch.dtype, str], Bound] = {
    (torch.float64, "output"): Bound(
        1e-9,
        "the same sums in another order; 1e-16 per term, amplified where weights nearly cancel",
    ),
    (torch.float64, "gradient"): Bound(
        1e-8, "as the output, once more through the quotient, whose derivative divides twice"
    ),
    (torch.float32, "output"): Bound(
        1e-4,
        "6e-8 per term; polynomial features of either sign lose up to three digits in their sum",
    ),
    (torch.float32, "gradient"): Bound(
        2e-4, "as the output; gradients to L sum over all pairs, in another order in every mode"
    ),
}


def bound(dtype: torch.dtype, quantity: str) -> float:
    """The bound for ``quantity`` computed in ``dtype``."""
    return TOLERANCES[dtype, quantity].value


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, quantity: str, message: str = ""
) -> None:
    """Assert that ``actual`` is ``expected`` within the table's bound."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} vs {tuple(expected.shape)}"
    if not actual.numel():
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = float((actual - expected).abs().max())
    size = max(1.0, float(expected.abs().max()))
    allowed = bound(dtype, quantity) * size
    assert difference <= allowed, f"{quantity} off by {difference:.3g} > {allowed:.3g} {message}"
