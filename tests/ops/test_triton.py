"""The GPU kernels against the definition in fp64: on a GPU, or on the CPU in Triton's interpreter."""

import os
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from linearize.ops.quadratic import GroupedQuadratic
from ops.cases import Case, make
from tolerances import assert_close

pytest.importorskip("triton", reason="needs the triton package (the extra triton)")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with mock.patch.dict(os.environ, {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}):
    from linearize.ops.triton import sums  # read when the kernels are defined


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tiles, so that small sizes have many."""
    monkeypatch.setattr(sums, "BLOCKS", (16,))


class Inputs(NamedTuple):
    """One call: q, k, u = [v; 1], the factor L and the state before, if any."""

    q: Tensor
    k: Tensor
    u: Tensor
    factor: Tensor
    state: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(None if x is None else leaf(x, dtype) for x in self))


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).requires_grad_()


def inputs(case: Case, *, state: bool = True, mask: bool = False) -> Inputs:
    (q, k, v), count = (x[0].to(DEVICE) for x in (case.q, case.k, case.v)), case.tokens
    u = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if mask:
        u = u * (torch.arange(count, device=DEVICE) % 3 != 1)[:, None]
    dim = q.shape[-1]
    before = torch.randn(len(k), 1 + dim + dim * (dim + 1) // 2, u.shape[-1], device=DEVICE)
    factor = case.factor.to(DEVICE)
    return Inputs(q, k, u, factor, before if state else None).to(torch.float32)


def by_kernels(case: Case, call: Inputs, chunk: int) -> tuple[Tensor, Tensor]:
    y, after = sums.grouped_sums(
        call.q, call.k, call.u, numbers(case, call), state=call.state, chunk=chunk
    )
    assert after is not None
    return y, after


def numbers(case: Case, call: Inputs) -> sums.Numbers:
    groups = case.groups.to(DEVICE)
    kernel = quadratic(case, call)
    coefficients = kernel.query_features(
        torch.ones_like(call.q[None, :, :1], dtype=torch.float32)
    ).values[0, :, 0]
    return sums.Numbers.of(
        groups, call.factor.tril(), coefficients, case.eps, case.scale, len(call.k)
    )


def quadratic(case: Case, call: Inputs) -> GroupedQuadratic:
    return GroupedQuadratic(
        case.groups.to(DEVICE),
        call.factor,
        eps=case.eps,
        scale=case.scale,
        dtype=call.factor.dtype,
    )


def by_definition(case: Case, call: Inputs) -> tuple[Tensor, Tensor]:
    """Every pair by its weight, the state by its features."""
    kernel = quadratic(case, call)
    ratio = len(call.q) // len(call.k)
    weights = kernel.weights(call.q[None], call.k[None]).values[0].tril()
    y = weights @ call.u.repeat_interleave(ratio, 0)
    after = kernel.key_features(call.k[None]).values[0].transpose(1, 2) @ call.u
    if call.state is not None:
        read = kernel.query_features(call.q[None]).values[0]
        y = y + read @ call.state.repeat_interleave(ratio, 0)
        after = after + call.state
    return y, after


def heterogeneous(**sizes: int) -> Case:
    """Heads with one, two, … groups, so that KV heads differ in how many components they use."""
    case = make(dtype=torch.float32, **sizes)
    for head, groups in enumerate(case.groups):
        count = 1 + head % (case.factor.shape[-1] - 1)
        groups.remainder_(count)
        case.factor[head, count + 1 :] = 0
        case.factor[head, :, count + 1 :] = 0
    return case


CASES = {
    "grouped queries, several chunks": (
        dict(tokens=40, kv_heads=2, ratio=3, dim=5, value_dim=6, groups=3),
        16,
    ),
    "one head, one group": (dict(tokens=17, dim=4, value_dim=3, groups=1), 16),
    "one token, seven queries a key": (dict(tokens=1, ratio=7, dim=17, value_dim=16), 16),
    "channels with a tail": (dict(tokens=35, ratio=2, dim=3, value_dim=32, groups=4), 20),
    "one chunk": (dict(tokens=20, kv_heads=3, dim=2, value_dim=2), 256),
}


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_state_are_the_definitions(name: str, state: bool, mask: bool) -> None:
    sizes, chunk = CASES[name]
    case = heterogeneous(**sizes)
    call = inputs(case, state=state, mask=mask)
    with torch.no_grad():
        found = by_kernels(case, call, chunk)
        wanted = by_definition(case, call.to(torch.float64))
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, torch.float32, "output")


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_definitions(name: str, state: bool) -> None:
    sizes, chunk = CASES[name]
    case = heterogeneous(**sizes)
    call = inputs(case, state=state)
    exact = call.to(torch.float64)
    found = by_kernels(case, call, chunk)
    directions = [torch.randn_like(x) for x in found]
    actual = torch.autograd.grad(found, call.leaves, directions)
    wanted = torch.autograd.grad(
        by_definition(case, exact), exact.leaves, [x.double() for x in directions]
    )
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, torch.float32, "gradient")


def test_gradients_without_the_state_or_without_the_output() -> None:
    case = heterogeneous(tokens=20, ratio=2, dim=3, groups=2)
    call = inputs(case)
    exact = call.to(torch.float64)
    for at in (0, 1):
        found, wanted = by_kernels(case, call, 8)[at], by_definition(case, exact)[at]
        direction = torch.randn_like(found)
        actual = torch.autograd.grad(found, call.leaves, direction, allow_unused=True)
        expected = torch.autograd.grad(wanted, exact.leaves, direction.double(), allow_unused=True)
        for one, other in zip(actual, expected, strict=True):
            other = torch.zeros_like(one) if other is None else other  # no way to it: zero here
            assert_close(one, other, torch.float32, "gradient")


@pytest.mark.parametrize("cut", [1, 15, 16, 33])
def test_a_sequence_in_two_parts_is_the_sequence(cut: int) -> None:
    case = heterogeneous(tokens=40, kv_heads=2, ratio=2, dim=4, value_dim=3, groups=3)
    call = inputs(case, state=False)
    with torch.no_grad():
        whole, after = by_kernels(case, call, 16)
        y, state = [], None
        for part in (slice(0, cut), slice(cut, None)):
            q, k, u = (x[:, part] for x in (call.q, call.k, call.u))
            part_y, state = by_kernels(case, Inputs(q, k, u, call.factor, state), 16)
            y.append(part_y)
    assert_close(torch.cat(y, dim=1), whole, torch.float32, "output")
    assert state is not None
    assert_close(state, after, torch.float32, "output")


@pytest.mark.parametrize("name", CASES)
def test_a_decoded_token_is_the_definitions(name: str) -> None:
    sizes, _ = CASES[name]
    case = heterogeneous(**sizes | {"tokens": 1})
    call = inputs(case)
    assert call.state is not None
    before = call.state.clone()
    with torch.no_grad():
        q, k, u = (x[:, 0] for x in (call.q, call.k, call.u))
        y, after = sums.decode_sums(q, k, u, numbers(case, call), call.state)
        wanted = by_definition(case, call.to(torch.float64))
    assert_close(y[:, None], wanted[0], torch.float32, "output")
    assert_close(after, wanted[1], torch.float32, "output")
    assert torch.equal(call.state, before)  # others may continue from it


def test_half_precision_inputs_are_summed_in_fp32() -> None:
    case = heterogeneous(tokens=33, ratio=2, dim=4, value_dim=5)
    call = inputs(case, state=False)
    rounded = Inputs(*(x.bfloat16().float() for x in call[:3]), call.factor, None)
    halves = Inputs(*(x.bfloat16() for x in call[:3]), call.factor, None)
    with torch.no_grad():
        y, after = by_kernels(case, halves, 16)
        wanted = by_kernels(case, rounded, 16)
    assert y.dtype == after.dtype == torch.float32
    for actual, expected in zip((y, after), wanted, strict=True):
        assert_close(actual, expected, torch.float32, "output")


@pytest.mark.parametrize(
    ("channels", "split"),
    [(3, (16, False)), (16, (16, False)), (17, (16, True)), (65, (64, True)), (90, (128, False))],
)
def test_channels_are_cut_into_tiles(channels: int, split: tuple[int, bool]) -> None:
    assert sums._split(channels) == split
