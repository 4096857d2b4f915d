"""Both forms of ReBased, over the ladder of the ablation, against loops."""

import pytest
import torch

from kernel_cases import inputs, make, map_in, shape_of
from linearize import kernels
from linearize.kernels.rebased import Rebased, RebasedOuter

LADDER = [(False, False), (True, False), (False, True), (True, True)]


def prepared(kernel: Rebased, x: list[float], head: int, keys: bool) -> list[float]:
    """``γ norm(x) + β`` of one vector."""
    if kernel.norm:
        mean = sum(x) / len(x)
        variance = sum((value - mean) ** 2 for value in x) / len(x)
        x = [(value - mean) / (variance + 1e-5) ** 0.5 for value in x]
    affine = kernel.key_affine if keys else kernel.query_affine
    if affine is None:
        return x
    gamma, beta = affine.gamma[head].tolist(), affine.beta[head].tolist()
    return [g * value + b for g, value, b in zip(gamma, x, beta, strict=True)]


@pytest.mark.parametrize("name", ["rebased", "rebased-outer"])
@pytest.mark.parametrize(("norm", "affine"), LADDER)
@torch.no_grad()
def test_weights_follow_the_formula(name: str, norm: bool, affine: bool) -> None:
    shape = shape_of(4, 2, dim=3)
    kernel = kernels.get(name).build(shape, {"norm": norm, "affine": affine})
    assert isinstance(kernel, Rebased)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    q, k, _ = inputs(shape, 3, batch=1)
    view = map_in(kernel, torch.float64)
    weights = view.weights(q, k).values
    for head in range(4):
        for i in range(3):
            for j in range(3):
                query = prepared(kernel, q[0, head, i].tolist(), head, keys=False)
                key = prepared(kernel, k[0, head // 2, j].tolist(), head, keys=True)
                products = [a * b for a, b in zip(query, key, strict=True)]
                expected = sum(products) ** 2 if "outer" in name else sum(p * p for p in products)
                assert float(weights[0, head, i, j]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("norm", "affine"), LADDER)
def test_sizes(norm: bool, affine: bool) -> None:
    shape = shape_of(14, 2, dim=64)
    element = Rebased(shape, norm=norm, affine=affine)
    assert element.feature_count == 64
    assert element.state_heads == (14 if affine else 2)
    assert element.trainable_numbers == (4 * 14 * 64 if affine else 0)
    outer = RebasedOuter(shape, norm=norm, affine=affine)
    assert outer.feature_count == (2145 if affine else 2080)
    assert outer.state_heads == 2
    assert outer.settings() == {"seed": 0, "norm": norm, "affine": affine}


def test_starts_as_the_normalised_square() -> None:
    shape = shape_of(4, 2)
    q, k, _ = inputs(shape, 5)
    for cls in (Rebased, RebasedOuter):
        with_affine, without = cls(shape), cls(shape, affine=False)
        assert torch.allclose(with_affine.weights(q, k).values, without.weights(q, k).values)


@torch.no_grad()
def test_training_can_place_the_zero() -> None:
    """Unlike Based, a pair can weigh nothing, and β decides which."""
    kernel = make("rebased", shape_of(1, 1, dim=2))
    assert isinstance(kernel, Rebased) and kernel.key_affine is not None
    k = torch.tensor([[[[1.0, 3.0]]]], dtype=torch.float64)  # normalised: (−1, 1)
    with torch.no_grad():
        kernel.key_affine.gamma.fill_(1)
        kernel.key_affine.beta.copy_(torch.tensor([[1.0, -1.0]]))
    assert float(kernel.key_features(k).values.abs().max()) < 1e-9
