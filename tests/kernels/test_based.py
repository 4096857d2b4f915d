"""Based against its polynomial."""

import pytest
import torch

from kernel_cases import inputs, map_in, shape_of
from linearize.kernels.based import Based


def test_weights_follow_the_formula() -> None:
    kernel = Based(shape_of(4, 2, dim=3))
    q, k, _ = inputs(kernel.shape, 4, batch=1)
    view = map_in(kernel, torch.float64)
    weights = view.weights(q, k).values
    for head in range(4):
        for i in range(4):
            for j in range(4):
                t = float((q[0, head, i] * k[0, head // 2, j]).sum()) / 3**0.5
                assert float(weights[0, head, i, j]) == pytest.approx(1 + t + t * t / 2)


def test_hand_computed_features() -> None:
    kernel = Based(shape_of(1, 1, dim=2))
    q = torch.tensor([[[[2.0, 3.0]]]]) * 2**0.5  # so that q·scale is (2, 3)
    k = torch.tensor([[[[5.0, 7.0]]]])
    assert kernel.key_features(k).values.flatten().tolist() == [1, 5, 7, 25, 35, 49]
    expected = [1, 2, 3, 2, 6, 4.5]  # ½ on the squares, 2·½ on the product
    assert kernel.query_features(q).values.flatten().tolist() == pytest.approx(expected)


def test_no_pair_scores_below_one_half() -> None:
    kernel = Based(shape_of(1, 1, dim=1))
    t = torch.linspace(-4, 2, 601, dtype=torch.float64)
    weights = kernel.weights(t[None, None, :, None], torch.ones(1, 1, 1, 1, dtype=torch.float64))
    lowest = weights.values.flatten()
    assert float(lowest.min()) == pytest.approx(0.5)
    assert float(t[lowest.argmin()]) == pytest.approx(-1, abs=1e-9)
    assert kernel.trainable_numbers == 0
