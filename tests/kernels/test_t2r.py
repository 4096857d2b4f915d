"""T2R against its formula."""

import pytest
import torch

from kernel_cases import inputs, make, map_in, shape_of
from linearize.kernels.t2r import T2R
from linearize.ops import kernel_attention


@torch.no_grad()
def test_weights_follow_the_formula() -> None:
    kernel = make("t2r", shape_of(4, 2, dim=3))
    assert isinstance(kernel, T2R)

    def features(x: list[float], head: int) -> list[float]:
        rows, bias = kernel.weight[head].tolist(), kernel.bias[head].tolist()
        mapped = [
            sum(w * value for w, value in zip(row, x, strict=True)) + b
            for row, b in zip(rows, bias, strict=True)
        ]
        return [max(value, 0) + 1e-6 for value in mapped]

    q, k, _ = inputs(kernel.shape, 3, batch=1)
    weights = map_in(kernel, torch.float64).weights(q, k).values
    for head in range(4):
        for i in range(3):
            for j in range(3):
                query = features(q[0, head, i].tolist(), head)
                key = features(k[0, head // 2, j].tolist(), head)
                expected = sum(a * b for a, b in zip(query, key, strict=True))
                assert float(weights[0, head, i, j]) == pytest.approx(expected, rel=1e-6)


def test_size_of_an_affine_map() -> None:
    kernel = T2R(shape_of(3, 1, dim=64))
    assert kernel.trainable_numbers == 3 * 4160  # d m + m, OAL paper, appendix F.1
    assert float(kernel.weight.abs().max()) <= 1 / 8


def test_a_query_without_any_feature_still_has_an_output() -> None:
    kernel = T2R(shape_of(1, 1))
    with torch.no_grad():
        kernel.weight.zero_()
        kernel.bias.fill_(-1)
    q, k, v = inputs(kernel.shape, 6, batch=1, dtype=torch.float32)
    output, _ = kernel_attention(kernel, q, k, v, scale=1.0)
    mean = v.cumsum(2) / torch.arange(1, 7)[:, None]
    assert torch.allclose(output, mean, atol=1e-5)
