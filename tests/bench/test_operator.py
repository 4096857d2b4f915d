"""The operator benchmark: tiny sizes, no assertion on times."""

import math
from typing import Any

import pytest
import torch

from linearize import kernels
from linearize.bench import OperatorBench, OperatorRow, operator_benchmark
from linearize.bench.oracle import deviation, expected, in_double
from linearize.bench.paths import AttentionPath, layer_of, paths_of
from linearize.errors import PlanError
from linearize.kernels import HeadShape, base
from linearize.kernels.oal import OAL
from linearize.ops import Features, pairwise
from linearize.plan import Plan

SHAPE = HeadShape(6, 2, 8, 8, 8**-0.5)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.bench.measure.CEILING_SIZE", 32)
    monkeypatch.setattr("linearize.bench.paths.CHECKED", 40)


def bench(**changes: Any) -> OperatorBench:
    settings: dict[str, Any] = {"lengths": [30, 70], "repeats": 2, "kernels": ["oal", "global"]}
    return operator_benchmark(SHAPE, **settings | changes)


def rows_of(result: OperatorBench, path: str) -> list[OperatorRow]:
    return [row for row in result.rows if row.path == path]


class Wrong(OAL):
    """Its query features are not those of its weights."""

    name = "wrong"
    title = "Wrong"
    source = "nowhere"

    def map(self) -> Any:
        right = super().map()

        class Map:
            dtype = right.dtype
            shared_state = right.shared_state
            key_features = staticmethod(right.key_features)
            weights = staticmethod(right.weights)

            @staticmethod
            def query_features(q: torch.Tensor) -> Features:
                features = right.query_features(q).values.clone()
                features[..., 0] *= 1.1
                return Features(features)

        return Map()


def test_every_kernel_and_both_softmax_paths_are_timed_and_compared() -> None:
    told: list[tuple[int, int]] = []
    result = bench(
        kernels=None,
        lengths=[50],
        dtypes=["fp32", "bf16"],
        repeats=1,
        progress=lambda done, total, message: told.append((done, total)),
    )
    names = [name for name in kernels.available() if name != "softmax"]
    assert {row.path for row in result.rows} == {"sdpa-flash", "sdpa-math", *names}
    for row in result.rows:
        assert row.status == "ok", row
        assert row.forward is not None and row.forward.median > 0
        assert row.error is not None and row.error < (1e-5 if row.dtype == "fp32" else 1e-2)
        assert row.peak_bytes is not None and row.total_bytes is not None
        inputs_and_output = 50 * 8 * (6 + 2 + 2 + 6) * (4 if row.dtype == "fp32" else 2)
        assert row.total_bytes == row.peak_bytes + inputs_and_output
        assert row.gflops and row.ceiling_share
        assert row.ceiling_share == pytest.approx(row.gflops / result.ceilings[row.dtype])
    total = 2 * (2 + len(names))
    assert told == [(done, total) for done in range(1, total + 1)]


def test_lengths_follow_each_other_and_speed_is_against_the_fastest_softmax() -> None:
    result = bench(lengths=[70, 30, 70])
    assert [(row.tokens, row.path) for row in result.rows] == [
        (n, path) for n in (30, 70) for path in ("sdpa-flash", "sdpa-math", "oal", "global")
    ]
    for tokens in (30, 70):
        rows = [row for row in result.rows if row.tokens == tokens]
        fastest = min(row.forward.median for row in rows if row.reference and row.forward)
        for row in rows:
            assert row.forward and row.speedup == pytest.approx(fastest / row.forward.median)
    assert {crossing.path for crossing in result.crossovers} == {"oal", "global"}


def test_gradients_are_timed_and_compared() -> None:
    result = bench(backward=True, lengths=[40], plan=Plan(window=4, sinks=2))
    for row in result.rows:
        assert row.gradient_error is not None and row.gradient_error < 1e-4
        assert row.backward is not None and row.forward_with_gradients is not None
        assert len(row.backward.samples) == 2
        assert row.backward_peak_bytes is not None and row.backward_peak_bytes > 0


def test_a_compact_hybrid_is_measured_where_kernels_have_one() -> None:
    result = bench(kernels=None, plan=Plan(window=8, sinks=2, state_rank=3), lengths=[50])
    able = {name for name in kernels.available() if kernels.get(name).projects}
    assert {row.path for row in result.rows if not row.reference} == able
    assert all(row.status == "ok" for row in result.rows)


def test_a_wrong_path_gets_its_error_instead_of_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base._discover(), "wrong", Wrong)
    monkeypatch.setattr("linearize.bench.paths.CHECKED", 200)  # beyond a first chunk
    result = bench(kernels=["oal", "wrong"])
    for row in rows_of(result, "wrong"):
        assert row.status == "differs"
        assert row.error is not None and 1e-3 < row.error < 1
        assert f"{row.error:.2g}" in (row.reason or "")
        assert row.forward is row.backward is row.peak_bytes is row.gflops is row.speedup is None
    assert all(row.status == "ok" for row in rows_of(result, "oal"))
    assert "wrong" not in {crossing.path for crossing in result.crossovers}


def test_a_path_wrong_only_at_full_length_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_from_100(*arguments: Any) -> list[AttentionPath]:
        paths = paths_of(*arguments)
        (oal,) = (path for path in paths if path.name == "oal")
        right = oal.run

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            output = right(q, k, v).clone()
            output[:, :, 100:] *= 1.1
            return output

        oal.run = run
        return paths

    monkeypatch.setattr("linearize.bench.operator.paths_of", wrong_from_100)
    result = bench(lengths=[30, 300])
    assert [row.status for row in rows_of(result, "oal")] == ["ok", "differs"]
    assert [row.status for row in rows_of(result, "global")] == ["ok", "ok"]


def test_nan_is_a_difference() -> None:
    wanted = torch.ones(1, 2, 3)
    actual = wanted.clone()
    actual[0, 1, 1] = math.nan
    assert deviation(actual, wanted) == math.inf
    actual[0, 1, 1] = 1.5
    assert deviation(actual, wanted) == pytest.approx(0.5 / 3**0.5)  # of the head that has it


def test_too_long_and_too_large_paths_are_skipped_with_a_reason() -> None:
    result = bench(lengths=[300], memory=2_000_000)
    (row,) = rows_of(result, "sdpa-math")
    assert row.status == "skipped" and row.forward is None
    assert "memory" in (row.reason or "") and "0.0 GB" in (row.reason or "")
    result = bench(lengths=[30, 3000], budget=1e-6)
    for path in ("sdpa-flash", "oal"):
        first, second = rows_of(result, path)
        assert first.forward is not None and len(first.forward.samples) == 1
        assert second.status == "skipped" and "budget" in (second.reason or "")


def test_a_backend_that_cannot_run_is_said() -> None:
    result = bench(backend="nosuch", lengths=[30])
    for row in rows_of(result, "oal"):
        assert row.status == "skipped" and "'nosuch'" in (row.reason or "")


@pytest.mark.parametrize(
    "wrong", [{"kernels": ["nosuch"]}, {"dtypes": ["fp12"]}, {"lengths": []}, {"repeats": 0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        bench(**wrong)


@pytest.mark.parametrize("name", ["oal", "performer", "hedgehog", "softmax"])
@pytest.mark.parametrize("exact", [(0, 0, None), (3, 5, None), (3, 5, 6)])
def test_the_oracle_is_the_definition_whatever_its_blocks(
    name: str, exact: tuple[int, int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linearize.bench.oracle.KEYS", 7)
    kept = dict(zip(("sinks", "window", "saturation"), exact, strict=True))
    plan = Plan(**kept)
    layer = in_double(layer_of(name, SHAPE, plan, 3, CPU))
    q, k, v = (torch.randn(1, heads, 30, 8, dtype=torch.float64) for heads in (6, 2, 2))
    kept["window"] = layer.window
    wanted = pairwise.attend(layer.map(), q, k, v, scale=SHAPE.scale, **kept)
    at = torch.tensor([0, 4, 5, 17, 29])
    actual = expected(layer, q[:, :, at], k, v, at)
    torch.testing.assert_close(actual, wanted[:, :, at], rtol=1e-9, atol=1e-9)
