"""One budget of state memory over several layers."""

import itertools

import pytest
import torch

import linearize
import tiny
from linearize.allocation import share
from linearize.errors import PlanError
from linearize.ops.quadratic import feature_count


def size(rank: int, kv_heads: int = 2, value_dim: int = 8) -> int:
    return kv_heads * feature_count(rank) * (value_dim + 1) * 4


def test_it_is_the_best_division_there_is() -> None:
    """Against all divisions, at budgets where the greedy steps end exactly on the budget."""
    energies = {
        0: torch.tensor([9.0, 4.0, 1.0, 0.5]),
        1: torch.tensor([90.0, 60.0, 3.0, 0.1]),
        2: torch.tensor([1.0, 0.1, 0.01, 0.0]),
    }
    shapes = {layer: (2, 8) for layer in energies}
    everything = list(itertools.product(range(1, 5), repeat=3))
    for budget in sorted({sum(map(size, ranks)) for ranks in everything}):
        found = share(energies, shapes, budget=budget)
        spent = sum(size(rank) for rank in found.values())
        assert spent <= budget
        if spent < budget:
            continue
        lost = sum(float(energies[i][r:].sum()) for i, r in found.items())
        for ranks in everything:
            if sum(map(size, ranks)) <= budget:
                assert lost <= sum(float(energies[i][r:].sum()) for i, r in enumerate(ranks)) + 1e-9


def test_a_budget_is_kept_and_used() -> None:
    budget = 9000
    result = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(state_budget=budget))
    states = [layer.state_bytes for layer in result.report.layers]
    assert sum(states) <= budget
    ranks = [layer.rank for layer in result.report.layers]
    assert all(rank is not None for rank in ranks)
    larger = [
        size(rank + 1, tiny.KV_HEADS, tiny.HEAD_DIM) - size(rank, tiny.KV_HEADS, tiny.HEAD_DIM)
        for rank in ranks
        if rank and rank < tiny.HEAD_DIM
    ]
    assert budget - sum(states) < min(larger)


def test_too_small_a_budget_names_the_smallest() -> None:
    least = tiny.LAYERS * size(1, tiny.KV_HEADS, tiny.HEAD_DIM)
    with pytest.raises(PlanError, match=f"at least {least:,}"):
        linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(state_budget=least - 1))
    exact = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(state_budget=least))
    assert [layer.rank for layer in exact.report.layers] == [1] * tiny.LAYERS
