"""DiJiang against its formula, written out by hand."""

import math

import pytest
import torch

from kernel_cases import inputs, make, map_in, shape_of
from linearize.kernels.dijiang import DiJiang


def cosine(frequency: int, position: int, dim: int) -> float:
    """Entry of the orthonormal DCT-II matrix."""
    value = math.cos(math.pi * frequency * (2 * position + 1) / (2 * dim)) * math.sqrt(2 / dim)
    return value / math.sqrt(2) if frequency == 0 else value


@torch.no_grad()
def test_weights_follow_the_formula() -> None:
    dim = 5
    kernel = make("dijiang", shape_of(2, 1, dim=dim), seed=3)
    assert isinstance(kernel, DiJiang)
    uniform = torch.rand(dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    samples = [math.sqrt(2) * float(torch.erfinv(2 * u - 1)) for u in uniform]

    def softmax(x: list[float]) -> list[float]:
        x = [value * dim**-0.25 for value in x]
        logits = [
            w * sum(x[r] * cosine(r, f, dim) for r in range(dim)) for f, w in enumerate(samples)
        ]
        powers = [math.exp(value) for value in logits]
        return [power / sum(powers) for power in powers]

    q, k, _ = inputs(kernel.shape, 3, batch=1)
    weights = map_in(kernel, torch.float64).weights(q, k).values
    for head in range(2):
        factor = [math.exp(theta) for theta in kernel.theta[head].tolist()]
        for i in range(3):
            query = [d * p for d, p in zip(factor, softmax(q[0, head, i].tolist()), strict=True)]
            for j in range(3):
                key = [d * p for d, p in zip(factor, softmax(k[0, 0, j].tolist()), strict=True)]
                expected = sum(x * y for x, y in zip(query, key, strict=True))
                assert float(weights[0, head, i, j]) == pytest.approx(expected, rel=1e-5)


def test_projection_is_an_orthonormal_transform_times_normal_samples() -> None:
    dim = 64
    projection = DiJiang(shape_of(1, 1, dim=dim)).projection.double()
    samples = projection.norm(dim=0)
    gram = projection.T @ projection
    assert torch.allclose(gram, samples.square().diag(), atol=1e-5)
    drawn = torch.stack(
        [DiJiang(shape_of(1, 1), seed=s).projection.norm(dim=0) for s in range(300)]
    )
    assert float(drawn.square().mean()) == pytest.approx(1, abs=0.1)


def test_size_of_the_paper() -> None:
    kernel = DiJiang(shape_of(14, 2, dim=64))
    assert kernel.feature_count == 64
    assert kernel.trainable_numbers == 14 * 64
    assert bool((kernel.theta == 0).all())
    assert kernel.state_heads == 2  # the projection is the layer's, D stands with the query
