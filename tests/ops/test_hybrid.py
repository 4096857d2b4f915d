"""Exact sinks and windows beside the kernel, under one denominator, in all modes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.ops import Features, State, Weights, chunked, kernel_attention, recurrent
from ops import definition
from ops.cases import Case, make, random_cases
from tolerances import assert_close

ENGINES = ("pairwise", "chunked", "recurrent")
LENGTHS = (1, 2, 8, 15, 17, 63, 64, 65, 130)


def run(case: Case, backend: str) -> Tensor:
    output, _ = kernel_attention(
        case.kernel,
        case.q,
        case.k,
        case.v,
        backend=backend,
        **case.settings,
    )
    return output


def expected(case: Case, *, softmax: bool = False) -> Tensor:
    weight = definition.grouped_weight(case.groups, case.factor, eps=case.eps, scale=case.scale)
    return definition.attention(
        None if softmax else weight,
        case.q,
        case.k,
        case.v,
        **case.settings,
    )


@pytest.mark.parametrize("backend", ENGINES)
@settings(max_examples=80)
@given(case=random_cases())
def test_equals_the_definition(backend: str, case: Case) -> None:
    assert_close(run(case, backend), expected(case), torch.float64, "output")


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("sinks", "window"), [(0, 5), (3, 0), (2, 7), (4, 128)])
@pytest.mark.parametrize("saturation", [None, 9])
def test_equals_the_definition_at_awkward_lengths(
    tokens: int, sinks: int, window: int, saturation: int | None
) -> None:
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, : tokens // 3] = False
    exact = {"sinks": sinks, "window": window, "saturation": saturation}
    case = make(batch=2, tokens=tokens, key_mask=mask, dim=3, **exact)
    wanted = expected(case)
    for backend in ENGINES:
        assert_close(run(case, backend), wanted, torch.float64, "output", backend)


@settings(max_examples=120)
@given(case=random_cases(), data=st.data())
def test_small_chunks_and_any_splits_equal_one_call(case: Case, data: st.DataObject) -> None:
    """Chunk borders, window borders and call borders fall everywhere against each other."""
    cuts = [*data.draw(st.lists(st.integers(1, case.tokens), max_size=3)), case.tokens]
    state, outputs, start = None, [], 0
    for stop in sorted(set(cuts)):
        part = slice(start, stop)
        inputs = (case.q[:, :, part], case.k[:, :, part], case.v[:, :, part])
        mask = None if case.key_mask is None else case.key_mask[:, part]
        settings_ = case.settings | {"key_mask": mask, "state": state}
        if data.draw(st.booleans()):
            output, state = recurrent.attend(case.kernel, *inputs, **settings_)
        else:
            chunk = data.draw(st.integers(1, 6))
            output, state = chunked.attend(case.kernel, *inputs, **settings_, chunk=chunk)
        outputs.append(output)
        start = stop
    assert_close(torch.cat(outputs, 2), expected(case), torch.float64, "output")


@settings(max_examples=40)
@given(case=random_cases(), chunk=st.integers(1, 6))
def test_both_engines_leave_the_same_state(case: Case, chunk: int) -> None:
    settings_ = case.settings
    inputs = (case.kernel, case.q, case.k, case.v)
    states: list[State] = [
        chunked.attend(*inputs, **settings_, chunk=chunk)[1],
        recurrent.attend(*inputs, **settings_)[1],
    ]
    kept = min(case.window, case.tokens)
    assert torch.equal(states[0].recent_keys, case.k[:, :, case.tokens - kept :])
    for name in ("recent_keys", "recent_values", "recent_mask", "real"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name
    for name in ("sums", "sink_keys", "sink_values"):
        assert_close(
            getattr(states[0], name), getattr(states[1], name), torch.float64, "output", name
        )


@settings(max_examples=40)
@given(case=random_cases(hybrid=False), sinks=st.integers(0, 3))
def test_a_window_over_everything_is_softmax(case: Case, sinks: int) -> None:
    whole = Case(
        *case.tensors()[:3],
        case.groups,
        case.factor,
        window=case.tokens,
        sinks=sinks,
        key_mask=case.key_mask,
    )
    for backend in ENGINES:
        assert_close(
            run(whole, backend), expected(case, softmax=True), torch.float64, "output", backend
        )


def test_saturation_without_exact_keys_changes_nothing() -> None:
    plain, limited = (make(tokens=20, saturation=limit) for limit in (None, 2))
    for backend in ENGINES:
        assert torch.equal(run(plain, backend), run(limited, backend)), backend


def test_sinks_over_everything_are_softmax() -> None:
    case = make(kv_heads=2, ratio=2, tokens=9, sinks=9)
    torch_softmax = torch.nn.functional.scaled_dot_product_attention(
        case.q, case.k, case.v, is_causal=True, scale=case.scale, enable_gqa=True
    )
    for backend in ENGINES:
        assert_close(run(case, backend), torch_softmax, torch.float64, "output", backend)


def test_sinks_are_the_first_real_tokens_not_the_padding() -> None:
    """A left-padded row gives what its unpadded row gives."""
    case = make(tokens=12, sinks=2, window=3)
    short = Case(
        *(x[:, :, 5:] for x in (case.q, case.k, case.v)),
        case.groups,
        case.factor,
        sinks=2,
        window=3,
    )
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, :5] = False
    padded = Case(
        case.q, case.k, case.v, case.groups, case.factor, sinks=2, window=3, key_mask=mask
    )
    for backend in ENGINES:
        assert_close(
            run(padded, backend)[:, :, 5:], run(short, backend), torch.float64, "output", backend
        )


@pytest.mark.parametrize("largest", [-80.0, 80.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_weights_survive_large_logits(largest: float, dtype: torch.dtype) -> None:
    """Logits up to ±80: ``e^80`` alone is 5e34 and its square no longer fp32."""
    case = make(kv_heads=1, ratio=2, tokens=30, dtype=dtype, sinks=2, window=9)
    scores = (case.q[:, :, :, None] * case.k[:, :1, None]).sum(-1) * case.scale
    factor = largest / float(scores.abs().max())
    if largest < 0:  # every logit near -80: constant direction
        q = torch.zeros_like(case.q)
        k = case.k.clone()
        q[..., 0], k[..., 0] = 4.0, -40.0 + 0.1 * k[..., 0]
    else:
        q, k = case.q * factor, case.k
    big = Case(q, k, case.v, case.groups, case.factor, sinks=2, window=9)
    logits = (q[:, :, :, None] * k[:, :1, None]).sum(-1) * case.scale
    assert 79 < float(logits.abs().max()) < 82
    wanted = expected(big)
    for backend in ENGINES:
        output = run(big, backend)
        assert bool(output.isfinite().all()), backend
        assert_close(output, wanted, dtype, "output", backend)


class Exponential:
    """``exp(3 q_0 + 2 k_0)``: a kernel whose features are all scale, kept as a logarithm."""

    dtype = torch.float64
    shared_state = True

    def query_features(self, q: Tensor) -> Features:
        return Features(torch.ones_like(q), 3.0 * q)

    def key_features(self, k: Tensor) -> Features:
        return Features(torch.ones_like(k), 2.0 * k)

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        values = q.new_ones(*q.shape[:3], k.shape[2])
        key_log = (2.0 * k).transpose(-1, -2).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return Weights(values, 3.0 * q, key_log)


@settings(max_examples=80)
@given(case=random_cases(), chunk=st.integers(1, 6), size=st.sampled_from([1.0, 300.0]))
def test_features_with_a_log_scale_follow_the_definition(
    case: Case, chunk: int, size: float
) -> None:
    """Weights up to ``e^±1000`` beside exact ones: only a common scale keeps them finite."""
    inputs = (Exponential(), case.q[..., :1], case.k[..., :1] * size, case.v)
    settings_ = case.settings
    wanted = definition.attention(
        lambda _, query, keys: 3.0 * query[0] + 2.0 * keys[:, 0],
        *inputs[1:],
        **settings_,
        logarithmic=True,
    )
    for engine in ENGINES:
        if engine == "chunked":
            output, _ = chunked.attend(*inputs, **settings_, chunk=chunk)
        else:
            output, _ = kernel_attention(*inputs, **settings_, backend=engine)
        assert bool(output.isfinite().all()), engine
        assert_close(output, wanted, torch.float64, "output", engine)
