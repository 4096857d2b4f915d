"""Hedgehog against its formula, and its training on attention weights."""

import math
from dataclasses import replace

import pytest
import torch

from kernel_cases import calibration, inputs, make, map_in, shape_of
from linearize.errors import PlanError
from linearize.fitting import match_outputs
from linearize.kernels.hedgehog import Hedgehog, weight_matching


def features(weight: list[list[float]], x: list[float]) -> list[float]:
    mapped = [sum(w * value for w, value in zip(row, x, strict=True)) for row in weight]
    powers = [math.exp(value) for value in mapped + [-value for value in mapped]]
    return [power / sum(powers) for power in powers]


@torch.no_grad()
def test_weights_follow_the_formula() -> None:
    kernel = make("hedgehog", shape_of(4, 2, dim=3))
    assert isinstance(kernel, Hedgehog)
    q, k, _ = inputs(kernel.shape, 3, batch=1)
    weights = map_in(kernel, torch.float64).weights(q, k).values
    for head in range(4):
        query_map, key_map = kernel.query_map[head].tolist(), kernel.key_map[head].tolist()
        for i in range(3):
            for j in range(3):
                query = features(query_map, q[0, head, i].tolist())
                key = features(key_map, k[0, head // 2, j].tolist())
                expected = sum(a * b for a, b in zip(query, key, strict=True))
                assert float(weights[0, head, i, j]) == pytest.approx(expected)


def test_starts_as_the_identity() -> None:
    kernel = Hedgehog(shape_of(2, 1, dim=64))
    assert kernel.feature_count == 128
    assert kernel.trainable_numbers == 2 * 2 * 64 * 64
    for weight in (*kernel.query_map, *kernel.key_map):
        assert torch.equal(weight, torch.eye(64))


@pytest.mark.parametrize(("sinks", "window", "saturation"), [(0, 0, None), (2, 3, None), (2, 3, 2)])
def test_weight_matching_is_the_cross_entropy_of_attention_weights(
    sinks: int, window: int, saturation: int | None
) -> None:
    kernel = make("hedgehog", shape_of(2, 1, dim=3))
    data = calibration(kernel.shape, tokens=9, sinks=sinks, window=window, saturation=saturation)
    at = torch.tensor([0, 4, 8])
    with torch.no_grad():
        loss = weight_matching(data)(kernel, 0, at)
    q, k = data.fit.q[0], data.fit.k[0, 0]
    for head in range(2):
        total = 0.0
        for i in at.tolist():
            query = features(kernel.query_map[head].tolist(), q[head, i].tolist())
            soft, own = [], []
            for j in range(i + 1):
                soft.append(math.exp(float(q[head, i] @ k[j]) * 3**-0.5))
                key = features(kernel.key_map[head].tolist(), k[j].tolist())
                kept = j < sinks or i - j < window
                held = min(1.0, (saturation or 9) / max(1, i + 1 - sinks - window))
                own.append(
                    soft[-1] if kept else held * sum(a * b for a, b in zip(query, key, strict=True))
                )
            for a, b in zip(soft, own, strict=True):
                total -= a / sum(soft) * math.log(b / sum(own)) / len(at)
        assert float(loss[head]) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("exact", [{}, {"sinks": 2, "window": 4}])
def test_training_on_weights_lowers_both_errors(exact: dict[str, int]) -> None:
    kernel = Hedgehog(shape_of(2, 1))
    data = calibration(kernel.shape, positions=40, **exact)
    data = replace(data, validation=data.fit, kernel_validation=data.kernel_fit)
    _, start = match_outputs(kernel, data, steps=1, learning_rate=0.0)
    objective = weight_matching(data)
    result, best = match_outputs(
        kernel, data, steps=80, positions=40, validate_every=20, objective=objective
    )
    assert 0 < result.curve[-1] < 0.97 * result.curve[0]
    assert bool((best < start).all())
    assert result.fit_mse == pytest.approx(best.tolist())  # of the outputs, not the cross-entropy


def test_fit_takes_the_objective_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(*args, objective=None, **settings):  # type: ignore[no-untyped-def]
        seen.append(objective is not None)
        return match_outputs(*args, objective=objective, steps=2, **settings)

    monkeypatch.setattr("linearize.kernels.hedgehog.match_outputs", spy)
    data = calibration(shape_of(2, 1))
    for match in ("weights", "outputs"):
        Hedgehog(shape_of(2, 1), match=match).fit(data)
    assert seen == [True, False]


def test_unknown_objective() -> None:
    with pytest.raises(PlanError, match="weights, outputs"):
        Hedgehog.build(shape_of(1, 1), {"match": "logits"})
