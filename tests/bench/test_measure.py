"""What the benchmarks' figures are made of: samples, memory, crossovers."""

import math
import statistics

import pytest
import torch
from torch import Tensor

from linearize.bench.measure import Timing, crossover, interleave, matmul_ceiling, peak_memory
from linearize.bench.paths import arithmetic, layer_of
from linearize.kernels import HeadShape
from linearize.plan import Plan

CPU = torch.device("cpu")


def test_a_timing_is_the_median_and_the_quartiles_of_its_samples() -> None:
    samples = [5.0, 1.0, 2.0, 9.0, 3.0]
    assert Timing.of(samples) == Timing(3.0, 2.0, 5.0, samples)
    assert Timing.of([2.0, 1.0]) == Timing(1.5, 1.0, 2.0, [2.0, 1.0])


def test_peak_memory_counts_what_lives_at_once_and_the_result() -> None:
    before = torch.ones(1000)

    def call() -> Tensor:
        first = before * 2  # 4 kB
        second = torch.cat([first, first])  # 8 kB: with the first, 12 kB
        del first
        return second[:1] + 1

    result, peak = peak_memory(call, CPU)
    assert result.item() == 3
    assert 12_000 <= peak < 13_000


def test_candidates_alternate_and_their_order_rotates() -> None:
    order: list[str] = []

    def candidate(name: str, seconds: float):
        def run() -> dict[str, list[float]]:
            order.append(name)
            return {"call": [seconds * len(order)]}

        return run

    timed = interleave(
        {"a": candidate("a", 1), "b": candidate("b", 10)}, repeats=3, budget=math.inf
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert timed["a"]["call"].samples == [1, 4, 5]
    assert timed["b"]["call"].median == statistics.median([20, 30, 60])


def test_a_candidate_over_its_budget_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("linearize.bench.measure.time.perf_counter", lambda: now[0])

    def candidate(seconds: float):
        def run() -> dict[str, list[float]]:
            now[0] += seconds
            return {"call": [seconds]}

        return run

    timed = interleave({"slow": candidate(7), "fast": candidate(1)}, repeats=4, budget=10)
    assert len(timed["slow"]["call"].samples) == 1
    assert len(timed["fast"]["call"].samples) == 4


@pytest.mark.parametrize(
    ("times", "reference", "expected"),
    [
        ([1, 1, 1], [2, 4, 8], 0),  # faster already at the shortest
        ([5, 9, 17], [2, 4, 8], math.inf),
        ([4, 4, 4], [2, 4, 8], 200),  # equal at 200
        ([2 * 2**0.5] * 3, [2, 4, 8], 100 * 2**0.5),  # half-way, in logarithms
        ([1, 8, 8], [2, 4, 16], 200 * 2**0.5),  # the last crossing counts, not the first
    ],
)
def test_the_crossover_is_where_the_ratio_passes_one(
    times: list[float], reference: list[float], expected: float
) -> None:
    assert crossover([100, 200, 400], times, reference) == pytest.approx(expected)


def test_the_ceiling_is_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.bench.measure.CEILING_SIZE", 64)
    assert 0 < matmul_ceiling(torch.float32, CPU) < 1e6


def test_the_arithmetic_is_that_of_the_method() -> None:
    """At the shape of the bundled model: the 3.4 MFLOP a token that 2,145 features cost."""
    shape = HeadShape(9, 3, 64, 64, 0.125)
    oal = layer_of("oal", shape, Plan(), 5, CPU)
    assert arithmetic(oal, shape, 10) == 10 * 2 * (9 + 3) * 2145 * 65
    compact = layer_of("oal", shape, Plan(window=64, sinks=4, state_rank=8), 5, CPU)
    exact = 68 * 2 * 9 * (64 + 64)
    assert arithmetic(compact, shape, 1000) == 1000 * (2 * (9 + 3) * 45 * 65 + exact)
    assert arithmetic(None, shape, 1000) == 9 * 2 * (64 + 64) * 1000 * 1001 / 2
