"""SpectraFormer against its formula, written out by hand."""

import math

import pytest
import torch

from kernel_cases import calibration, inputs, make, map_in, shape_of
from linearize.fitting import Activations, match_outputs
from linearize.kernels.spectraformer import SpectraFormer

Matrix = list[list[float]]


def hadamard(size: int) -> Matrix:
    """Entry (i, j) is −1 to the number of common binary digits of i and j."""
    return [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]


def product(a: Matrix, b: Matrix) -> Matrix:
    return [
        [sum(x * y for x, y in zip(row, c, strict=True)) for c in zip(*b, strict=True)] for row in a
    ]


def diagonal(values: list[float]) -> Matrix:
    return [[v if i == j else 0.0 for j in range(len(values))] for i, v in enumerate(values)]


def projection(kernel: SpectraFormer) -> Matrix:
    """``S H G Π H B / √P``, P × P, by full matrix products."""
    order = kernel.permutation.tolist()
    size = len(order)
    shuffle = [[1.0 if order[i] == j else 0.0 for j in range(size)] for i in range(size)]
    sign, gauss, stretch = (
        diagonal(p.detach().tolist()) for p in (kernel.sign, kernel.gauss, kernel.stretch)
    )
    matrix = stretch
    for factor in (hadamard(size), gauss, shuffle, hadamard(size), sign):
        matrix = product(matrix, factor)
    return [[value / math.sqrt(size) for value in row] for row in matrix]


def constants(phi: float, d: int) -> tuple[float, float, float]:
    """A, B, D of the optimal positive random features."""
    rho = (math.sqrt((2 * phi + d) ** 2 + 8 * d * phi) - 2 * phi - d) / (4 * phi)
    a = (1 - 1 / rho) / 8
    return a, math.sqrt(1 - 4 * a), (1 - 4 * a) ** (d / 4)


def features(kernel: SpectraFormer, x: list[float], released: bool = False) -> list[float]:
    d = len(x)
    x = [value * d**-0.25 for value in x]
    omega = [row[:d] for row in projection(kernel)]
    squares = [sum(w * w for w in row) for row in omega]
    squares.append(sum(squares) / len(squares))
    dots = [sum(w * v for w, v in zip(row, x, strict=True)) for row in omega]
    if released:
        dots = [dot * d**-0.25 for dot in dots]
        squares = [0.0] * len(squares)
    a, b, factor = constants(float(kernel.energy), d)
    norm = sum(value * value for value in x)
    log = [a * s + b * p - norm for s, p in zip(squares, [*dots, 1.0], strict=True)]
    return [factor * math.exp(value - max(log)) + 1e-4 for value in log]


@pytest.mark.parametrize("dim", [4, 3, 6])  # the latter two are padded to 4 and 8
@pytest.mark.parametrize("released", [False, True])
def test_features_follow_the_formula(dim: int, released: bool) -> None:
    case = "spectraformer, released" if released else "spectraformer"
    kernel = make(case, shape_of(2, 1, dim=dim))
    assert isinstance(kernel, SpectraFormer)
    q, k, _ = inputs(kernel.shape, 3, batch=1)
    view = map_in(kernel, torch.float64)
    weights = view.weights(q, k).values
    for head in range(2):
        for i in range(3):
            query = features(kernel, q[0, head, i].tolist(), released)
            assert view.query_features(q).values[0, head, i].tolist() == pytest.approx(
                query, rel=1e-6
            )
            for j in range(3):
                key = features(kernel, k[0, 0, j].tolist(), released)
                expected = sum(x * y for x, y in zip(query, key, strict=True))
                assert float(weights[0, head, i, j]) == pytest.approx(expected, rel=1e-6)


def test_size_of_the_paper() -> None:
    kernel = SpectraFormer(shape_of(14, 2, dim=64))
    assert kernel.feature_count == 65
    assert kernel.trainable_numbers == 192
    assert kernel.dtype == torch.float64
    assert all(p.dtype == torch.float32 for p in kernel.parameters())


def test_starts_from_the_fastfood_distributions() -> None:
    kernel = SpectraFormer(shape_of(1, 1, dim=64), seed=5)
    assert set(kernel.sign.tolist()) == {-1.0, 1.0}
    assert float(kernel.gauss.std()) == pytest.approx(1, abs=0.3)
    lengths = torch.tensor(projection(kernel)).square().sum(1)  # chi-square with 64 degrees
    assert torch.allclose(lengths, (kernel.stretch * kernel.gauss.norm()).square(), rtol=1e-4)
    assert float(lengths.mean()) == pytest.approx(64, rel=0.15)
    assert sorted(kernel.permutation.tolist()) == list(range(64))


def test_unshifted_features_are_unbiased_over_seeds() -> None:
    """``E D² e^{l(x) + l(y)} = exp(−‖x − y‖²/2)``, that is ``e^{xᵀy}`` up to one-token factors."""
    shape = shape_of(1, 1, dim=4)
    q, k, _ = inputs(shape, 4, batch=1)
    q, k = 0.7 * q, 0.7 * k
    estimates = []
    for seed in range(1500):
        with torch.no_grad():
            view = SpectraFormer(shape, seed=seed).map()
            logs = [view.log_features(x)[..., :-1] for x in (q, k)]  # type: ignore[attr-defined]
            query, keys = (view.factor * log.exp() for log in logs)  # type: ignore[attr-defined]
        estimates.append(query @ keys.transpose(-1, -2) / 4)
    sample = torch.stack(estimates)
    standard_error = sample.std(0) / len(sample) ** 0.5
    x, y = (t * 4**-0.25 for t in (q, k))
    expected = torch.exp(-(x[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / 2)
    assert float(standard_error.max()) < 0.05
    assert bool(((sample.mean(0) - expected).abs() < 4 * standard_error).all())
    softmax = (
        expected * ((x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :]) / 2).exp()
    )
    assert torch.allclose(softmax, torch.exp(q @ k.transpose(-1, -2) * shape.scale))


def test_optimal_constant_has_less_variance_than_ordinary_features() -> None:
    """A solves ``2φρ² + (2φ + d)ρ − d = 0``; without energy it is zero, FAVOR+."""
    a, _, _ = constants(6.0, 4)
    rho = 1 / (1 - 8 * a)
    assert 2 * 6 * rho**2 + (2 * 6 + 4) * rho - 4 == pytest.approx(0, abs=1e-12)
    assert a < 0
    assert constants(1e-9, 4)[0] == pytest.approx(0, abs=1e-6)


def test_energy_is_the_mean_over_all_pairs() -> None:
    kernel = SpectraFormer(shape_of(4, 2, dim=4))
    assert float(kernel.energy) == pytest.approx(2 * 4 * 0.5)  # two unit normal vectors
    q, k, v = inputs(kernel.shape, 5)
    kernel.measure(Activations(q, k, v))
    total, count = 0.0, 0
    for head in range(4):
        queries, keys = q[:, head].flatten(0, 1), k[:, head // 2].flatten(0, 1)
        for query in queries:
            for key in keys:
                total += float((query + key).square().sum()) * 4**-0.5
                count += 1
    assert float(kernel.energy) == pytest.approx(total / count, rel=1e-6)


def test_energy_is_stored() -> None:
    kernel = SpectraFormer(shape_of(1, 1))
    kernel.measure(Activations(*inputs(kernel.shape, 5)))
    assert torch.equal(kernel.state_dict()["energy"], kernel.energy)
    other = SpectraFormer(shape_of(1, 1), seed=9)
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other.energy, kernel.energy)


def test_fit_measures_the_energy_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SpectraFormer(shape_of(2, 1))
    data = calibration(kernel.shape)
    seen = []

    def short(*args, **settings):  # type: ignore[no-untyped-def]
        seen.append(float(kernel.energy))
        return match_outputs(*args, steps=2, **settings)

    monkeypatch.setattr("linearize.kernels.base.match_outputs", short)
    assert kernel.fit(data) is not None
    expected = SpectraFormer(kernel.shape)
    expected.measure(data.kernel_fit)
    assert seen == [float(expected.energy)]
    assert seen[0] != pytest.approx(2 * 8 * kernel.shape.scale)
