"""The ways a chunk can be computed, at sizes that make each of them take its turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.ops import (
    Features,
    State,
    Weights,
    chunked,
    grouped,
    kernel_attention,
    recurrent,
    sums,
)
from linearize.ops.features import grouped_form
from linearize.ops.pairwise import attend as pairwise_attend
from linearize.ops.quadratic import GroupedQuadratic, packed_coefficients, quadratic_features
from linearize.ops.scores import GroupLayout
from ops.cases import Case, make, random_cases
from tolerances import assert_close


class FeaturesOnly:
    """A grouped quadratic that shows its features and weights alone, optionally with log-scales."""

    def __init__(self, kernel: GroupedQuadratic, shared: bool, logarithmic: float = 0.0) -> None:
        self._kernel, self._shift = kernel, logarithmic
        self.dtype, self.shared_state = kernel.dtype, shared
        self._ratio = 1

    def for_ratio(self, ratio: int) -> FeaturesOnly:
        self._ratio = 1 if self.shared_state else ratio
        return self

    def query_features(self, q: Tensor) -> Features:
        return self._apart(self._kernel.query_features(q).values, q)

    def key_features(self, k: Tensor) -> Features:
        k = k.repeat_interleave(self._ratio, dim=1)
        return self._apart(self._kernel.key_features(k).values, k)

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        values, _, _ = self._kernel.weights(q, k)
        if not self._shift:
            return Weights(values)
        query = self._shift * q[..., :1]
        key = self._shift * k[..., :1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        values = values * torch.exp(-query - key.transpose(-1, -2))
        return Weights(values, query, key.transpose(-1, -2))

    def _apart(self, values: Tensor, x: Tensor) -> Features:
        """The same features, with a part of their size written as a logarithm."""
        if not self._shift:
            return Features(values)
        log = self._shift * x[..., :1]
        return Features(values * torch.exp(-log), log)


def gradients(output: Tensor, state: State | None, leaves: list[Tensor]) -> list[Tensor]:
    """Of a fixed random functional of the output and of the state's sums."""
    source = torch.Generator().manual_seed(3)
    total = (output * torch.randn(output.shape, generator=source, dtype=output.dtype)).sum()
    if state is not None:
        scale = 1 if state.log_scale is None else state.log_scale.exp()
        true = state.sums * scale
        total = total + (true * torch.randn(true.shape, generator=source, dtype=true.dtype)).sum()
    return list(torch.autograd.grad(total, leaves, retain_graph=True))


@settings(max_examples=60)
@given(
    case=random_cases(),
    chunk=st.integers(1, 6),
    shared=st.booleans(),
    shift=st.sampled_from([0.0, 0.7]),
    wide=st.booleans(),
    segment=st.integers(1, 3),
)
def test_explicit_features_equal_the_definition(
    case: Case, chunk: int, shared: bool, shift: float, wide: bool, segment: int
) -> None:
    """All chunks at once, or one by one with the kernel's own weights: output and gradients."""
    leaves = [x.clone().requires_grad_() for x in case.tensors()]
    q, k, v, factor = leaves
    plain = GroupedQuadratic(case.groups, factor, eps=case.eps, scale=case.scale, dtype=q.dtype)
    kernel = FeaturesOnly(plain, shared, shift).for_ratio(q.shape[1] // k.shape[1])
    wanted = pairwise_attend(plain, q, k, v, **case.settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "SEGMENT", segment)
        if wide:
            patch.setattr(sums, "WIDE", 0)
        output, _ = chunked.attend(kernel, q, k, v, **case.settings, chunk=chunk)
        assert_close(output, wanted, torch.float64, "output")
        found = gradients(output, None, leaves)
    for name, a, b in zip("qkvL", found, gradients(wanted, None, leaves), strict=True):
        assert_close(a, b, torch.float64, "gradient", name)


@settings(max_examples=60)
@given(
    case=random_cases(),
    chunk=st.integers(1, 9),
    block=st.integers(1, 4),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    cut=st.integers(0, 14),
)
def test_blocks_and_tiles_of_any_size_change_nothing(
    case: Case, chunk: int, block: int, rows: int, columns: int, cut: int
) -> None:
    """Output, state and gradients, in two calls, against one chunk for everything."""
    leaves = [x.clone().requires_grad_() for x in case.tensors()]

    def run(chunk: int, cuts: list[int]) -> tuple[Tensor, State]:
        q, k, v, factor = leaves
        kernel = GroupedQuadratic(
            case.groups, factor, eps=case.eps, scale=case.scale, dtype=q.dtype
        )
        state, outputs = None, []
        for start, stop in zip([0, *cuts], [*cuts, case.tokens], strict=True):
            part = slice(start, stop)
            call = case.settings | {"state": state, "chunk": chunk}
            if case.key_mask is not None:
                call["key_mask"] = case.key_mask[:, part]
            inputs = (x[:, :, part] for x in (q, k, v))
            output, state = chunked.attend(kernel, *inputs, **call)
            outputs.append(output)
        assert state is not None
        return torch.cat(outputs, 2), state

    wanted, after = run(99, [])
    wanted_gradients = gradients(wanted, after, leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "BLOCK", block)
        patch.setattr(grouped, "TILE", (rows, columns))
        output, state = run(chunk, [cut] if 0 < cut < case.tokens else [])
        assert_close(output, wanted, torch.float64, "output")
        assert_close(state.sums, after.sums, torch.float64, "output")
        found = gradients(output, state, leaves)
    for name, a, b in zip("qkvL", found, wanted_gradients, strict=True):
        assert_close(a, b, torch.float64, "gradient", name)


@settings(max_examples=30)
@given(case=random_cases(), chunk=st.integers(1, 6), features=st.booleans())
def test_without_the_state_the_output_is_the_same(case: Case, chunk: int, features: bool) -> None:
    kernel = FeaturesOnly(case.kernel, True) if features else case.kernel
    call = case.settings | {"chunk": chunk}
    output, state = chunked.attend(kernel, case.q, case.k, case.v, **call)
    alone, none = chunked.attend(kernel, case.q, case.k, case.v, **call, return_state=False)
    assert state is not None
    assert none is None
    assert torch.equal(output, alone)


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_the_state_is_returned_only_if_it_is_wanted(backend: str) -> None:
    case = make(tokens=5)
    call = {"scale": 0.5, "backend": backend, "return_state": False}
    assert kernel_attention(case.kernel, case.q, case.k, case.v, **call)[1] is None


@pytest.mark.parametrize("narrow", [0, 2])
@pytest.mark.parametrize("features", [False, True])
def test_a_later_call_may_have_a_smaller_window(narrow: int, features: bool) -> None:
    """Keys that the first call kept exact then join the state."""
    case = make(tokens=20, kv_heads=2, ratio=2, sinks=1, key_mask=torch.ones(1, 20).bool())
    kernel = FeaturesOnly(case.kernel, True) if features else case.kernel
    wide, settings_ = 7, {"scale": case.scale, "sinks": 1}
    first, second = slice(0, 11), slice(11, 20)
    head, tail = ([x[:, :, part] for x in (case.q, case.k, case.v)] for part in (first, second))
    _, state = chunked.attend(kernel, *head, window=wide, **settings_)
    output, _ = chunked.attend(kernel, *tail, window=narrow, state=state, **settings_)
    wanted = pairwise_attend(case.kernel, case.q, case.k, case.v, window=narrow, **settings_)
    assert_close(output, wanted[:, :, second], torch.float64, "output")


@settings(max_examples=30)
@given(case=random_cases(hybrid=False, masked=False))
def test_packed_coefficients_read_the_packed_products(case: Case) -> None:
    form = grouped_form(case.kernel, case.q, case.k)
    assert form is not None
    coefficients = packed_coefficients(form.groups, form.factor, form.eps, form.scale)
    products = quadratic_features(case.q) * coefficients[:, None]
    assert_close(products, case.kernel.query_features(case.q).values, torch.float64, "output")


@settings(max_examples=30)
@given(case=random_cases(hybrid=False, masked=False))
def test_a_layout_holds_every_coordinate_once(case: Case) -> None:
    count = case.factor.shape[-1] - 1
    layout = GroupLayout(case.groups, count)
    spread = layout.spread(case.q[0])
    assert torch.equal(layout.gather(spread), case.q[0])
    for group in range(count):  # and the sum over a group's place is the sum over the group
        part = spread[..., layout.bounds[group] : layout.bounds[group + 1]].sum(-1)
        wanted = (case.q[0] * (case.groups == group)[:, None]).sum(-1)
        assert_close(part, wanted, torch.float64, "output")


def engines(case: Case) -> dict[str, Callable[[], Tensor]]:
    features = FeaturesOnly(case.kernel, False).for_ratio(case.q.shape[1] // case.k.shape[1])
    call = case.settings
    return {
        "grouped": lambda: chunked.attend(case.kernel, case.q, case.k, case.v, **call)[0],
        "features": lambda: chunked.attend(features, case.q, case.k, case.v, **call)[0],
    }


@pytest.mark.parametrize("window", [0, 100, 1100])
def test_long_windows_and_sequences_equal_the_definition(window: int) -> None:
    """Several segments, several chunks, blocks of the window apart or together."""
    case = make(tokens=1500, ratio=2, dim=3, value_dim=2, window=window, sinks=3)
    wanted = pairwise_attend(case.kernel, case.q, case.k, case.v, **case.settings)
    for name, engine in engines(case).items():
        assert_close(engine(), wanted, torch.float64, "output", name)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_a_state_is_overwritten_only_if_it_is_given_up(overwrite: bool, window: int) -> None:
    """Also where the first tokens of a call leave its sums as they are."""
    case = make(tokens=14, kv_heads=2, ratio=2, window=window, sinks=1)
    call = case.settings
    head, tail = (
        [x[:, :, part] for x in (case.q, case.k, case.v)] for part in (slice(2), slice(2, 14))
    )
    _, state = recurrent.attend(case.kernel, *head, **call)
    before = state.sums.clone()
    output, after = recurrent.attend(case.kernel, *tail, **call, state=state, overwrite=overwrite)
    wanted = pairwise_attend(case.kernel, case.q, case.k, case.v, **call)
    assert_close(output, wanted[:, :, 2:], torch.float64, "output")
    assert torch.equal(state.sums, before) is not overwrite
    assert (after.sums.data_ptr() == state.sums.data_ptr()) is overwrite


def test_a_state_with_gradients_is_never_overwritten() -> None:
    case = make(tokens=6)
    v = case.v.clone().requires_grad_()
    _, state = recurrent.attend(
        case.kernel, case.q[:, :, :3], case.k[:, :, :3], v[:, :, :3], scale=0.5
    )
    tail = (x[:, :, 3:] for x in (case.q, case.k, v))
    output, _ = recurrent.attend(case.kernel, *tail, scale=0.5, state=state, overwrite=True)
    wanted = pairwise_attend(case.kernel, case.q, case.k, v, scale=case.scale)[:, :, 3:]
    for a, b in zip(gradients(output, None, [v]), gradients(wanted, None, [v]), strict=True):
        assert_close(a, b, torch.float64, "gradient")


def test_a_state_made_in_inference_mode_is_kept_out_of_it() -> None:
    """Such tensors cannot be changed outside; decoding goes on with a new one."""
    case = make(tokens=6)
    with torch.inference_mode():
        _, state = recurrent.attend(
            case.kernel, *(x[:, :, :3] for x in (case.q, case.k, case.v)), scale=0.5
        )
    with torch.no_grad():
        tail = (x[:, :, 3:] for x in (case.q, case.k, case.v))
        output, _ = recurrent.attend(case.kernel, *tail, scale=0.5, state=state, overwrite=True)
    wanted = pairwise_attend(case.kernel, case.q, case.k, case.v, scale=0.5)[:, :, 3:]
    assert_close(output, wanted, torch.float64, "output")


@pytest.mark.parametrize("engine", [chunked, recurrent])
@pytest.mark.parametrize("window", [0, 4])
def test_a_state_stored_in_half_is_rounded_and_nothing_else(engine: Any, window: int) -> None:
    """It keeps its precision through calls, and the sums are those of fp32 up to its rounding."""
    case = make(tokens=24, dim=3, window=window, dtype=torch.float32)
    call = case.settings
    _, state = chunked.attend(
        case.kernel, *(x[:, :, :20] for x in (case.q, case.k, case.v)), **call
    )
    tail = [x[:, :, 20:] for x in (case.q, case.k, case.v)]
    assert state is not None
    output, after = engine.attend(case.kernel, *tail, **call, state=state.stored_in(torch.bfloat16))
    exact, other = engine.attend(case.kernel, *tail, **call, state=state)
    assert after.sums.dtype == torch.bfloat16
    assert output.dtype == torch.float32
    size = other.sums.abs().amax()
    assert float((after.sums - other.sums).abs().max()) <= 5 * 2**-8 * float(size)
    assert not torch.equal(output, exact)
