"""The hybrid kernel against its definition, one pair at a time, and at its two ends."""

from __future__ import annotations

import math

import pytest
import torch

from diagnose.synthetic import POSITIONS, SEQUENCES, SHAPE, SOME, kernel, sampled, selection
from linearize.diagnose.hybrid import full_errors, hybrid_errors, hybrid_outputs
from linearize.kernels import available, get
from linearize.kernels.base import Kernel

INEXACT = [name for name in available() if not get(name).exact]
# A masked vector of zeros has no weight in kernels without a constant: 0 / 0
NO_CONSTANT = ("rebased", "rebased-outer")
TIGHT = {"rebased": 1e-4, "rebased-outer": 1e-4}


def one_weight(made: Kernel, head: int, q: torch.Tensor, k: torch.Tensor) -> float:
    """``κ(q, k)`` of one head and pair, log-scales applied."""
    queries = q.expand(1, SHAPE.query_heads, 1, -1).to(made.dtype)
    keys = k.expand(1, SHAPE.kv_heads, 1, -1).to(made.dtype)
    values, query_log, key_log = made.map().weights(queries, keys)
    log = sum(float(x[0, head]) for x in (query_log, key_log) if x is not None)
    return float(values[0, head]) * math.exp(log)


@torch.no_grad()
@pytest.mark.parametrize("name", INEXACT)
def test_the_hybrid_is_kernel_times_exponential_pair_by_pair(name: str) -> None:
    made, data, chosen = kernel(name), sampled(tokens=12), selection(*SOME)
    errors = hybrid_errors(made, data, chosen)
    assert errors.shape == (SEQUENCES, SHAPE.query_heads)
    for sequence in range(SEQUENCES):
        for head in range(SHAPE.query_heads):
            inside = chosen[head]
            squared = []
            for row, position in enumerate(data.at[sequence].tolist()):
                q = data.q[sequence, head, row]
                numerator, denominator = torch.zeros(5, dtype=torch.float64), 0.0
                for j in range(position + 1):
                    k = data.k[sequence, head // 2, j]
                    exact = float((q * k)[~inside].double().sum()) * SHAPE.scale
                    weight = one_weight(made, head, q * inside, k * inside) * math.exp(exact)
                    numerator += weight * data.v[sequence, head // 2, j].double()
                    denominator += weight
                output = numerator / denominator
                squared.append((output - data.target[sequence, head, row]).square())
            expected = float(torch.stack(squared).mean())
            assert float(errors[sequence, head]) == pytest.approx(expected, rel=1e-3, abs=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", INEXACT)
def test_on_all_coordinates_it_is_the_kernel_itself(name: str) -> None:
    made, data = kernel(name), sampled()
    everything = torch.ones(SHAPE.query_heads, SHAPE.head_dim, dtype=torch.bool)
    ratio = hybrid_errors(made, data, everything) / full_errors(made, data)
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=TIGHT.get(name, 1e-5))


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in INEXACT if name not in NO_CONSTANT])
def test_on_no_coordinate_it_is_softmax(name: str) -> None:
    made, data = kernel(name), sampled()
    nothing = torch.zeros(SHAPE.query_heads, SHAPE.head_dim, dtype=torch.bool)
    assert float(hybrid_errors(made, data, nothing).max()) < 1e-12
    assert float(full_errors(made, data).min()) > 1e-6


def test_targets_are_softmax_at_the_sampled_positions() -> None:
    data = sampled()
    assert data.at.shape == (SEQUENCES, POSITIONS)
    for sequence in range(SEQUENCES):
        at = data.at[sequence].tolist()
        assert at == sorted(set(at))
        for head in range(SHAPE.query_heads):
            for row, position in enumerate(at):
                keys = data.k[sequence, head // 2, : position + 1].double()
                weights = (keys @ data.q[sequence, head, row].double() * SHAPE.scale).softmax(0)
                expected = weights @ data.v[sequence, head // 2, : position + 1].double()
                assert torch.allclose(data.target[sequence, head, row], expected, atol=1e-12)


@torch.no_grad()
def test_large_logits_stay_finite() -> None:
    made, data = kernel("performer"), sampled(size=40.0)
    outputs = hybrid_outputs(
        made,
        data.q[:1],
        data.k[:1],
        data.v[:1],
        selection(*SOME),
        scale=SHAPE.scale,
        query_at=data.at[0],
    )
    assert bool(outputs.isfinite().all())
    bound = data.v[0].abs().max()
    assert float(outputs.abs().max()) <= float(bound) + 1e-9
