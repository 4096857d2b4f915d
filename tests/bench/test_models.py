"""Decoding and whole-model benchmarks on tiny models: what is measured, not how fast."""

from typing import Any

import pytest
import torch

import tiny
from linearize.attention import LinearAttention
from linearize.bench import decode_benchmark, model_benchmark, prepare
from linearize.bench.model import STAGES
from linearize.bench.tables import decode_tables
from linearize.bench.target import check_model
from linearize.errors import PlanError

PLANS: dict[str, dict[str, Any]] = {
    "oal": {},
    "compact": {"window": 4, "sinks": 2, "state_rank": 3},
    "performer": {"kernel": "performer", "options": {"features": 10}},
    "hedgehog": {"kernel": "hedgehog", "window": 3},
    "softmax": {"kernel": "softmax"},
}


@pytest.mark.parametrize("name", PLANS)
def test_decoding_is_timed_beside_softmax(name: str) -> None:
    target = prepare(tiny.loaded(), tiny.plan(layers="1-2", **PLANS[name]))
    assert not target.fitted and sorted(target.layers) == [1, 2]
    result = decode_benchmark(target, contexts=[50, 5], tokens=2, repeats=2)
    per_token = 2 * (8 + 8) * 4  # bytes of keys and values of one layer
    for point in result.points:
        assert point.status == "ok", point
        assert point.error is not None and point.error < 1e-5
        assert point.converted is not None and point.softmax is not None
        assert point.softmax_in_place is not None
        assert len(point.converted.samples) == len(point.softmax.samples) == 4
        assert point.softmax_bytes == 3 * per_token * point.context
        assert point.speedup == point.softmax.median / point.converted.median
    short, long = result.points
    assert (short.context, long.context) == (5, 50)
    assert short.converted_bytes is not None and long.converted_bytes is not None
    grown = long.converted_bytes - short.converted_bytes
    if name == "softmax":
        assert grown == 45 * (3 * per_token + 2)  # and a mask of a byte a key in two layers
    else:
        assert grown == 45 * per_token  # only the layer that kept its softmax grows
    assert result.model_error < 1e-4
    retained = per_token * long.context
    assert long.state_bytes == long.converted_bytes - retained
    assert long.state_tokens == long.state_bytes / (2 * per_token)


@pytest.mark.parametrize("name", ["compact", "softmax"])
def test_several_sequences_are_decoded_side_by_side(name: str) -> None:
    target = prepare(tiny.loaded(), tiny.plan(layers="1-2", **PLANS[name]))
    shapes: list[int] = []
    target.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    (one,) = decode_benchmark(target, contexts=[9], tokens=1, repeats=1).points
    before = len(shapes)
    result = decode_benchmark(target, contexts=[9], batch=3, tokens=1, repeats=1)
    (three,) = result.points
    assert shapes[before:].count(3) == 3 * (2 + 1)  # warm-up and turn of each
    assert one.converted_bytes is not None and one.softmax_bytes is not None
    assert three.converted_bytes == 3 * one.converted_bytes
    assert three.softmax_bytes == 3 * one.softmax_bytes
    assert three.state_bytes == one.state_bytes
    assert three.converted is not None
    (table,), notes = decode_tables(result)
    assert table.rows[0][1] == f"{3 / three.converted.median:,.2f}"
    assert "3 sequences side by side" in notes


def test_the_caches_continue_where_the_context_ends() -> None:
    """Each model sees its context: positions go on from it, in every layer."""
    target = prepare(tiny.loaded(), tiny.plan(layers="0"))
    seen: list[int] = []
    target.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(_length(kwargs.get("cache"))),
        with_kwargs=True,
    )
    decode_benchmark(target, contexts=[7], tokens=2, repeats=1)
    decoded = [length for length in seen if length >= 7][-12:]
    assert decoded == [*[7, 8] * 3, *[9, 10] * 3]  # warm-up and turn of each


def _length(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def test_heads_that_keep_their_softmax_are_filled_and_counted() -> None:
    target = prepare(tiny.loaded(), tiny.plan(layers="1-2"))
    one = target.layers[1].select([1])
    target.model.base_model.layers[1].self_attn.linear_attention = one
    target = prepare(target.loaded, None)
    assert target.layers[1].heads == (1,)
    assert check_model(target)[1] is None
    result = decode_benchmark(target, contexts=[5, 50], tokens=1, repeats=1)
    short, long = result.points
    assert long.status == "ok"
    assert long.converted_bytes is not None and short.converted_bytes is not None
    per_head = (8 + 8) * 4
    assert long.state_bytes is not None
    assert long.state_tokens == long.state_bytes / (per_head * (1 + 2))
    assert long.converted_bytes - short.converted_bytes == 45 * per_head * (2 + 1)


def test_every_stage_of_the_model_is_timed_beside_softmax() -> None:
    target = prepare(tiny.loaded(), tiny.plan(layers="1-2"))
    told: list[int] = []
    result = model_benchmark(
        target,
        lengths=[20, 5],
        new_tokens=2,
        repeats=2,
        progress=lambda done, total, message: told.append(done),
    )
    assert [(p.tokens, p.stage) for p in result.points] == [(n, s) for n in (5, 20) for s in STAGES]
    for point in result.points:
        assert point.status == "ok"
        assert point.converted is not None and point.softmax is not None
        assert len(point.converted.samples) == 2
        assert point.ratio == point.converted.median / point.softmax.median
        assert point.new_tokens == (2 if point.stage == "generation" else 0)
    assert told == [1, 2, 3, 4, 5, 6]
    assert all(p.grad is None for p in target.model.parameters())


def test_what_does_not_fit_is_skipped_with_a_reason() -> None:
    target = prepare(tiny.loaded(), tiny.plan(layers="1"))
    (point,) = decode_benchmark(target, contexts=[1000], memory=1000).points
    assert point.status == "skipped" and "the limit is" in (point.reason or "")
    result = model_benchmark(target, lengths=[5, 50], repeats=1, budget=1e-9, memory=1000)
    reasons = {(p.stage, p.tokens): p.reason or "" for p in result.points}
    assert "memory" in reasons["training", 5]
    assert "budget" in reasons["prefill", 50]
    assert [p.status for p in result.points if p.tokens == 5] == ["ok", "skipped", "ok"]


def test_a_model_that_decodes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = prepare(tiny.loaded(), tiny.plan(layers="1"))
    right = LinearAttention.forward

    def wrong(self: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, state = right(self, q, *args, **kwargs)
        return output * (1.1 if q.shape[2] == 1 else 1), state

    monkeypatch.setattr(LinearAttention, "forward", wrong)
    for point in decode_benchmark(target, contexts=[5]).points:
        assert point.status == "differs" and "logits off by" in (point.reason or "")
        assert point.converted is point.softmax is point.speedup is None
    points = model_benchmark(target, lengths=[5]).points
    assert all(p.status == "differs" and p.converted is None for p in points)


def test_a_state_that_decodes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.bench.decode.check_model", lambda target: (0.0, None))
    target = prepare(tiny.loaded(), tiny.plan(layers="1"))
    right = LinearAttention.forward

    def wrong(self: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, state = right(self, q, *args, **kwargs)
        return output * (1.1 if q.shape[2] == 1 else 1), state

    monkeypatch.setattr(LinearAttention, "forward", wrong)
    (point,) = decode_benchmark(target, contexts=[50]).points
    assert point.status == "differs" and point.error == pytest.approx(0.1, rel=1e-3)


def test_a_converted_model_keeps_its_plan() -> None:
    loaded = tiny.converted("oal+window")
    with pytest.raises(PlanError, match="converted already"):
        prepare(loaded, tiny.plan())
    target = prepare(loaded, None)
    assert target.fitted
    assert target.settings()["plan"]["window"] == 4
    assert check_model(target)[1] is None


@pytest.mark.parametrize("contexts", [[], [0]])
def test_impossible_contexts_are_refused(contexts: list[int]) -> None:
    target = prepare(tiny.loaded(), tiny.plan(layers="1"))
    with pytest.raises(PlanError):
        decode_benchmark(target, contexts=contexts)
    with pytest.raises(PlanError):
        model_benchmark(target, lengths=contexts)
    with pytest.raises(PlanError, match="batch 0"):
        decode_benchmark(target, contexts=[5], batch=0)
