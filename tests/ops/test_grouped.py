"""The grouped quadratic operator in its three modes against the definition written out with loops."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.ops import State, grouped_quadratic_attention
from linearize.ops.quadratic import GroupedQuadratic
from ops import definition
from ops.cases import Case, attend, make, random_cases
from tolerances import assert_close, bound

ENGINES = ("pairwise", "chunked", "recurrent")
LENGTHS = (1, 2, 8, 15, 17, 63, 64, 65, 67, 130)


def expected(case: Case) -> Tensor:
    weight = definition.grouped_weight(case.groups, case.factor, eps=case.eps, scale=case.scale)
    return definition.attention(weight, case.q, case.k, case.v, key_mask=case.key_mask)


@pytest.fixture(scope="module")
def published(shared_data: Path) -> dict:
    return json.loads((shared_data / "oal_operator_two_groups.json").read_text())


def published_inputs(record: dict) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.tensor(record[name], dtype=torch.float64) for name in "qkv")
    size = record["max_groups"] + 1
    factor = torch.zeros(len(record["groups"]), size, size, dtype=torch.float64)
    groups = torch.empty(len(record["groups"]), record["head_dimension"], dtype=torch.long)
    for head, members in enumerate(record["groups"]):
        for number, group in enumerate(members):
            groups[head, group] = number
        rows, columns = torch.tril_indices(size, size)
        packed = record["packed_lower_triangular"][head]
        factor[head, rows, columns] = torch.tensor(packed, dtype=torch.float64)
    return q, k, v, groups, factor


@pytest.mark.parametrize("backend", ENGINES)
def test_output_equals_the_authors_fixture(published: dict, backend: str) -> None:
    q, k, v, groups, factor = published_inputs(published)
    output = grouped_quadratic_attention(
        q,
        k,
        v,
        groups,
        factor,
        eps=published["kernel_eps"],
        scale=published["scale"],
        backend=backend,
    )
    wanted = torch.tensor(published["output"], dtype=torch.float64)
    assert_close(output, wanted, torch.float64, "output")


@pytest.mark.parametrize("backend", ENGINES)
def test_numerator_and_denominator_equal_the_authors_fixture(published: dict, backend: str) -> None:
    q, k, v, groups, factor = published_inputs(published)
    kernel = GroupedQuadratic(
        groups,
        factor,
        eps=published["kernel_eps"],
        scale=published["scale"],
        dtype=torch.float64,
    )
    if backend == "pairwise":
        weights = kernel.weights(q, k).values.tril()
        numerator, denominator = weights @ v, weights.sum(-1, keepdim=True)
    else:  # what the query reads from the state after each token
        read = []
        for stop in range(1, q.shape[2] + 1):
            _, state = grouped_quadratic_attention(
                q[:, :, :stop],
                k[:, :, :stop],
                v[:, :, :stop],
                groups,
                factor,
                return_state=True,
                backend=backend,
            )
            read.append(kernel.query_features(q[:, :, stop - 1 : stop]).values @ state.sums)
        sums = torch.cat(read, 2)
        numerator, denominator = sums[..., :-1], sums[..., -1:]
    for name, found in (("numerator", numerator), ("denominator", denominator)):
        wanted = torch.tensor(published[name], dtype=torch.float64)
        assert_close(found, wanted, torch.float64, "output", name)


@pytest.mark.parametrize("backend", ENGINES)
@settings(max_examples=60)
@given(case=random_cases(hybrid=False))
def test_equals_the_definition(backend: str, case: Case) -> None:
    assert_close(attend(case, backend), expected(case), torch.float64, "output")


@pytest.mark.parametrize("tokens", LENGTHS)
def test_equals_the_definition_at_awkward_lengths(tokens: int) -> None:
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, : tokens // 3] = False
    case = make(batch=2, kv_heads=1, ratio=3, tokens=tokens, key_mask=mask, seed=tokens)
    wanted = expected(case)
    for backend in ENGINES:
        assert_close(attend(case, backend), wanted, torch.float64, "output", backend)


@pytest.mark.parametrize("tokens", [1024, 1334])
def test_long_inputs_equal_the_quadratic_time_definition(tokens: int) -> None:
    case = make(kv_heads=1, ratio=3, tokens=tokens, dim=5)
    assert_close(attend(case, "chunked"), attend(case, "pairwise"), torch.float64, "output")


@pytest.mark.parametrize(("heads", "tokens"), [(4, 7), (4, 4)])
def test_the_normaliser_sums_over_time_not_over_heads(heads: int, tokens: int) -> None:
    case = make(kv_heads=heads, tokens=tokens)
    for backend in ENGINES:
        assert_close(attend(case, backend), expected(case), torch.float64, "output", backend)


@pytest.mark.parametrize("ratio", [1, 3, 7])
def test_query_heads_share_their_kv_head(ratio: int) -> None:
    shared = make(batch=2, kv_heads=2, ratio=ratio, tokens=9, dtype=torch.float32)
    k, v = (x.repeat_interleave(ratio, dim=1) for x in (shared.k, shared.v))
    apart = Case(shared.q, k, v, shared.groups, shared.factor)
    for backend in ENGINES:
        assert_close(
            attend(shared, backend), attend(apart, backend), torch.float32, "output", backend
        )
        assert_close(attend(shared, backend), expected(shared), torch.float32, "output", backend)


@settings(max_examples=60)
@given(case=random_cases(hybrid=False), data=st.data())
def test_resuming_at_any_splits_equals_one_call(case: Case, data: st.DataObject) -> None:
    cuts = [*data.draw(st.lists(st.integers(1, case.tokens), max_size=3)), case.tokens]
    state, outputs, start = None, [], 0
    for stop in sorted(set(cuts)):
        part = slice(start, stop)
        output, state = grouped_quadratic_attention(
            case.q[:, :, part],
            case.k[:, :, part],
            case.v[:, :, part],
            case.groups,
            case.factor,
            eps=case.eps,
            scale=case.scale,
            key_mask=None if case.key_mask is None else case.key_mask[:, part],
            state=state,
            return_state=True,
            backend=data.draw(st.sampled_from(["auto", "chunked", "recurrent"])),
        )
        outputs.append(output)
        start = stop
    assert_close(torch.cat(outputs, 2), expected(case), torch.float64, "output")


@given(case=random_cases(hybrid=False))
@settings(max_examples=30)
def test_chunked_and_recurrent_leave_the_same_state(case: Case) -> None:
    states = [attend(case, backend, return_state=True)[1] for backend in ("chunked", "recurrent")]
    assert_close(states[0].sums, states[1].sums, torch.float64, "output")
    assert torch.equal(states[0].real, states[1].real)
    real = case.tokens if case.key_mask is None else case.key_mask.sum(1)
    assert bool((states[0].real == real).all())


@given(case=random_cases(hybrid=False))
@settings(max_examples=30)
def test_outputs_average_the_values_seen(case: Case) -> None:
    """Positive weights: every output lies between the least and the largest value seen."""
    ratio = case.q.shape[1] // case.k.shape[1]
    v = case.v.repeat_interleave(ratio, dim=1)
    real = (
        torch.ones(v.shape[0], case.tokens, dtype=torch.bool)
        if case.key_mask is None
        else case.key_mask
    )[:, None, :, None]
    low = v.masked_fill(~real, torch.inf).cummin(2).values
    high = v.masked_fill(~real, -torch.inf).cummax(2).values
    none = ~real.cummax(2).values
    low, high = low.masked_fill(none, 0), high.masked_fill(none, 0)
    slack = bound(torch.float64, "output") * 10
    for backend in ENGINES:
        output = attend(case, backend)
        assert bool(((output >= low - slack) & (output <= high + slack)).all()), backend


def test_the_future_does_not_leak_into_the_past() -> None:
    case = make(batch=1, kv_heads=2, ratio=2, tokens=12)
    for backend in ENGINES:
        before = attend(case, backend)
        changed = make(batch=1, kv_heads=2, ratio=2, tokens=12)
        changed.k[:, :, 7:] += 3
        changed.v[:, :, 7:] -= 2
        after = attend(changed, backend)
        assert_close(after[:, :, :7], before[:, :, :7], torch.float64, "output", backend)
        assert float((after[:, :, 7:] - before[:, :, 7:]).abs().max()) > 0.1


def test_the_default_scale_is_one_over_root_d() -> None:
    case = make(tokens=6, dim=4)
    output = grouped_quadratic_attention(
        case.q, case.k, case.v, case.groups, case.factor, eps=case.eps
    )
    assert_close(output, expected(case), torch.float64, "output")  # 1/sqrt(4) = case.scale


def test_the_default_floor_is_the_authors() -> None:
    """With L = 0 only eps weighs: a plain average. With a tiny L the floor's size shows."""
    case = make(tokens=5)
    tiny = Case(case.q, case.k, case.v, case.groups, case.factor * 1e-3, eps=1e-6)
    output = grouped_quadratic_attention(
        tiny.q, tiny.k, tiny.v, tiny.groups, tiny.factor, scale=tiny.scale
    )
    assert_close(output, expected(tiny), torch.float64, "output")
    other = expected(Case(case.q, case.k, case.v, case.groups, case.factor * 1e-3, eps=1e-5))
    assert float((output - other).abs().max()) > 1e-3


def test_zero_padded_factors_of_smaller_heads_change_nothing() -> None:
    case = make(kv_heads=2, tokens=9, groups=2)
    padded = torch.zeros(2, 6, 6, dtype=torch.float64)
    padded[:, :3, :3] = case.factor
    larger = Case(case.q, case.k, case.v, case.groups, padded)
    for backend in ENGINES:
        assert_close(attend(larger, backend), expected(case), torch.float64, "output", backend)


def test_the_part_above_the_diagonal_is_ignored() -> None:
    case = make(tokens=9)
    full = case.factor + torch.randn_like(case.factor).triu(1)
    dirty = Case(case.q, case.k, case.v, case.groups, full)
    for backend in ENGINES:
        assert torch.equal(attend(dirty, backend), attend(case, backend)), backend


@settings(max_examples=30)
@given(case=random_cases(hybrid=False), data=st.data())
def test_the_learned_global_embeds_into_any_grouping(case: Case, data: st.DataObject) -> None:
    """``M_00 = m_00, M_0g = m_01, M_gh = m_11``: one kernel, whatever the groups."""
    root = torch.tensor([[0.8, 0.0], [-0.6, 0.7]], dtype=torch.float64)
    heads, count = len(case.groups), case.factor.shape[1] - 1
    embedded = torch.zeros_like(case.factor)
    embedded[:, 0, 0], embedded[:, 1:, 0], embedded[:, 1:, 1] = 0.8, -0.6, 0.7
    m = embedded @ embedded.transpose(1, 2)
    assert torch.allclose(m[:, 0, 1:], torch.full((heads, count), -0.48, dtype=torch.float64))
    grouped = Case(case.q, case.k, case.v, case.groups, embedded, key_mask=case.key_mask)
    pooled = Case(
        case.q,
        case.k,
        case.v,
        torch.zeros_like(case.groups),
        root.expand(heads, -1, -1),
        key_mask=case.key_mask,
    )
    backend = data.draw(st.sampled_from(ENGINES))
    assert_close(attend(grouped, backend), expected(pooled), torch.float64, "output")


def test_positive_weights_need_not_be_a_mercer_kernel() -> None:
    """``M = [[1, -1], [-1, 1]]``, d = 1: ``κ = (1 - qk)²`` has Gram [[0, 4], [4, 0]] on {1, -1}."""
    x = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 1, 2, 1)
    factor = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    groups = torch.zeros(1, 1, dtype=torch.long)
    kernel = GroupedQuadratic(groups, factor, eps=0.0, scale=1.0, dtype=torch.float64)
    gram = kernel.weights(x, x).values[0, 0]
    assert gram.tolist() == [[0.0, 4.0], [4.0, 0.0]]
    assert torch.linalg.eigvalsh(gram).tolist() == pytest.approx([-4.0, 4.0])
    # The operator does not care: the second token sees only the first, up to eps.
    v = torch.tensor([3.0, 5.0], dtype=torch.float64).view(1, 1, 2, 1)
    for backend in ENGINES:
        output = grouped_quadratic_attention(
            x, x, v, groups, factor, eps=1e-12, scale=1.0, backend=backend
        )
        assert output.flatten().tolist() == pytest.approx([3.0, 3.0], abs=1e-9), backend


def test_the_state_holds_139425_numbers_for_each_kv_head_at_64_64() -> None:
    case = make(kv_heads=2, ratio=7, tokens=3, dim=64, value_dim=64, dtype=torch.float32)
    for backend in ("chunked", "recurrent"):
        _, state = attend(case, backend, return_state=True)
        assert state.sums.shape[:2] == (1, 2)
        assert state.sums[0, 0].numel() == 139_425
        other = sum(
            t.numel() * t.element_size()
            for t in (state.recent_keys, state.recent_values, state.recent_mask, state.sink_keys)
        )
        assert other == 0
        assert state.nbytes == 2 * 139_425 * 4 + state.real.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ENGINES)
def test_half_inputs_are_summed_in_fp32_and_returned_in_half(
    dtype: torch.dtype, backend: str
) -> None:
    half = make(kv_heads=1, ratio=2, tokens=40, dtype=dtype)
    exact = Case(
        half.q.double(), half.k.double(), half.v.double(), half.groups, half.factor.double()
    )
    output = attend(half, backend)
    assert output.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert float((output.double() - expected(exact)).abs().max()) <= rounding * 4
    if backend != "pairwise":
        state: State = attend(half, backend, return_state=True)[1]
        assert state.sums.dtype == torch.float32


def test_fp32_inputs_stay_within_the_table() -> None:
    case = make(batch=2, kv_heads=2, ratio=2, tokens=130, dim=8, dtype=torch.float32)
    wanted = expected(case)
    for backend in ENGINES:
        assert_close(attend(case, backend), wanted, torch.float32, "output", backend)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_token_that_sees_only_itself_returns_its_value(backend: str) -> None:
    """Whatever its weight: with ``κ = (1 - s)² + 1e-6`` and s near 1 all that is left is the floor.

    Numerator and denominator must then be rounded alike, or the quotient is off by percents.
    """
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(500, 1, 1, 8, generator=g) for _ in range(2))
    q = q / (q * k).sum(-1, keepdim=True)  # s = 1 up to rounding
    v = torch.randn(500, 1, 1, 3, generator=g)
    groups = torch.zeros(1, 8, dtype=torch.long)
    factor = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    output = grouped_quadratic_attention(q, k, v, groups, factor, scale=1.0, backend=backend)
    assert_close(output, v, torch.float32, "output")


def test_auto_equals_the_backend_it_names() -> None:
    for tokens, backend in ((1, "recurrent"), (9, "chunked")):
        case = make(tokens=tokens)
        assert torch.equal(attend(case, "auto"), attend(case, backend))
