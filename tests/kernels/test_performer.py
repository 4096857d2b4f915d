"""Performer against its formula, and the random features against the kernel they estimate."""

import math

import pytest
import torch

from kernel_cases import inputs, make, map_in, shape_of
from linearize.errors import PlanError
from linearize.kernels.performer import Performer
from linearize.ops import kernel_attention


def true_features(kernel: Performer, x: list[float], head: int) -> list[float]:
    """``exp(ω x' − ‖x'‖²/2) / √m`` with ``x' = x d^{-1/4}``, one feature after another."""
    x = [value * len(x) ** -0.25 for value in x]
    square = sum(value * value for value in x)
    rows = kernel.projection[head].tolist()
    return [
        math.exp(sum(a * b for a, b in zip(row, x, strict=True)) - square / 2)
        / math.sqrt(len(rows))
        for row in rows
    ]


def test_weights_follow_the_formula() -> None:
    kernel = Performer(shape_of(2, 1, dim=4), features=6)
    q, k, _ = inputs(kernel.shape, 3, batch=1)
    values, query_log, key_log = map_in(kernel, torch.float64).weights(q, k)
    assert query_log is not None and key_log is not None
    weights = values * (query_log + key_log).exp()
    for head in range(2):
        for i in range(3):
            for j in range(3):
                query = true_features(kernel, q[0, head, i].tolist(), head)
                key = true_features(kernel, k[0, 0, j].tolist(), head)
                expected = sum(a * b for a, b in zip(query, key, strict=True))
                assert float(weights[0, head, i, j]) == pytest.approx(expected, rel=1e-6)


def test_unbiased_over_seeds() -> None:
    shape = shape_of(4, 1, dim=4)
    q, k, _ = inputs(shape, 3, batch=1)
    q, k = 0.4 * q, 0.4 * k
    estimates = []
    for seed in range(500):
        values, query_log, key_log = Performer(shape, features=12, seed=seed).weights(q, k)
        assert query_log is not None and key_log is not None
        estimates.append(values * (query_log + key_log).exp())
    sample = torch.stack(estimates)
    expected = torch.exp(q @ k.transpose(-1, -2) * 0.5)
    standard_error = sample.std(0) / len(sample) ** 0.5
    assert float(standard_error.max()) < 0.05  # or it says nothing
    assert bool(((sample.mean(0) - expected).abs() < 4 * standard_error).all())


def test_rows_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors() -> None:
    dim = 8
    kernel = Performer(shape_of(2, 1, dim=dim), features=20)
    for rows in kernel.projection.double():
        for start in (0, 8, 16):
            block = rows[start : start + dim]
            gram = block @ block.T
            assert float((gram - gram.diagonal().diag()).abs().max()) < 1e-5
    assert not torch.equal(*kernel.projection)
    lengths = Performer(shape_of(1, 1, dim=dim), features=4000).projection.square().sum(-1)
    assert float(lengths.mean()) == pytest.approx(dim, rel=0.03)  # chi-square with d degrees
    assert float(lengths.var()) == pytest.approx(2 * dim, rel=0.12)


def test_size_survives_beside_exact_keys() -> None:
    """With very many features the kernel is nearly softmax, also where both share a denominator."""
    shape = shape_of(1, 1, dim=2, value_dim=3)
    kernel = Performer(shape, features=20_000)
    q, k, v = inputs(shape, 12, batch=1)
    v = v + 3
    outputs = []
    for sinks, window in ((0, 0), (2, 3), (0, 12)):
        settings = {"scale": shape.scale, "sinks": sinks, "window": window}
        outputs.append(kernel_attention(kernel, q, k, v, **settings)[0])
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(outputs[2], softmax)
    assert float((outputs[0] - softmax).abs().max()) < 0.1
    assert float((outputs[1] - softmax).abs().max()) < 0.1


def test_long_vectors_neither_overflow_nor_vanish() -> None:
    kernel = make("performer", shape_of(1, 1))
    q, k, v = inputs(kernel.shape, 6, batch=1)
    output, _ = kernel_attention(kernel, 60 * q, 60 * k, v, scale=kernel.shape.scale)
    assert bool(output.isfinite().all())
    assert bool(
        (output[0, 0, 0] - v[0, 0, 0]).abs().max() < 1e-12
    )  # a single key, whatever its weight


def test_features_must_be_positive() -> None:
    with pytest.raises(PlanError, match="features=0"):
        Performer.build(shape_of(1, 1), {"features": 0})
