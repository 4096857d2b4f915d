"""TaylorShift against its formula."""

import math

import pytest
import torch

from kernel_cases import inputs, make, map_in, shape_of
from linearize.kernels.taylorshift import TaylorShift


@torch.no_grad()
def test_weights_follow_the_formula() -> None:
    kernel = make("taylorshift", shape_of(4, 2, dim=3))
    assert isinstance(kernel, TaylorShift)
    q, k, _ = inputs(kernel.shape, 3, batch=1)
    weights = map_in(kernel, torch.float64).weights(q, k).values
    for head in range(4):
        for i in range(3):
            for j in range(3):
                query, key = q[0, head, i].tolist(), k[0, head // 2, j].tolist()
                cosine = sum(a * b for a, b in zip(query, key, strict=True))
                cosine /= math.hypot(*query) * math.hypot(*key)
                s = float(kernel.temperature[head]) * cosine
                assert float(weights[0, head, i, j]) == pytest.approx(1 + s + s * s / 2)


def test_starts_at_temperature_one_and_shares_its_state() -> None:
    kernel = TaylorShift(shape_of(14, 2, dim=64))
    assert bool((kernel.temperature == 1).all())
    assert kernel.trainable_numbers == 14
    assert (kernel.state_heads, kernel.feature_count) == (2, 2145)


def test_only_directions_count() -> None:
    kernel = make("taylorshift", shape_of(2, 1))
    q, k, _ = inputs(kernel.shape, 4)
    assert torch.allclose(kernel.weights(q, k).values, kernel.weights(100 * q, k / 100).values)


def test_zero_vectors_are_neutral() -> None:
    kernel = TaylorShift(shape_of(1, 1))
    q, k, _ = inputs(kernel.shape, 2, batch=1)
    k[:, :, 0] = 0
    k.requires_grad_()
    weights = kernel.weights(q, k).values
    assert weights[..., 0].flatten().tolist() == [1, 1]
    weights.sum().backward()
    assert k.grad is not None and bool(k.grad.isfinite().all())
