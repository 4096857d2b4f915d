"""The general dimension-aware quadratic ``a + Σ b_r x_r + Σ C_rt x_r x_t``."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from linearize.ops import dimension_quadratic_attention
from linearize.ops.quadratic import quadratic_features
from ops import definition
from ops.cases import Case, attend, make, random_cases
from tolerances import assert_close

ENGINES = ("pairwise", "chunked", "recurrent")


class Coefficients(NamedTuple):
    a: Tensor
    b: Tensor
    c: Tensor


def general(case: Case) -> Coefficients:
    """Unstructured coefficients, large enough a constant that no denominator comes near zero."""
    g = torch.Generator().manual_seed(7)
    heads, dim = case.groups.shape
    c = torch.randn(heads, dim, dim, generator=g, dtype=case.q.dtype)
    b = torch.randn(heads, dim, generator=g, dtype=case.q.dtype)
    x = case.q.abs().max() * case.k.abs().max() * case.scale
    a = 1 + 2 * (x * b.abs().sum(1) + x**2 * c.abs().sum((1, 2)))
    return Coefficients(a, b, (c + c.transpose(1, 2)) / 2)


def run(case: Case, coefficients: Coefficients, backend: str) -> Tensor:
    return dimension_quadratic_attention(
        case.q,
        case.k,
        case.v,
        *coefficients,
        scale=case.scale,
        key_mask=case.key_mask,
        backend=backend,
    )


@pytest.mark.parametrize("backend", ENGINES)
@settings(max_examples=40)
@given(case=random_cases(hybrid=False))
def test_equals_the_definition(backend: str, case: Case) -> None:
    coefficients = general(case)
    weight = definition.dimension_weight(*coefficients, scale=case.scale)
    wanted = definition.attention(weight, case.q, case.k, case.v, key_mask=case.key_mask)
    assert_close(run(case, coefficients, backend), wanted, torch.float64, "output")


def test_every_coefficient_reaches_the_output() -> None:
    case = make(kv_heads=2, ratio=2, tokens=7, dim=3)
    coefficients = general(case)
    base = run(case, coefficients, "chunked")
    for number in range(3):
        for at in torch.ones_like(coefficients[number][1]).nonzero().tolist() or [[]]:
            changed = [x.clone() for x in coefficients]
            changed[number][(1, *at)] *= 1.5
            if number == 2:
                changed[2] = (changed[2] + changed[2].transpose(1, 2)) / 2
            output = run(case, Coefficients(*changed), "chunked")
            assert torch.equal(output[:, [0, 2, 3]], base[:, [0, 2, 3]])
            assert float((output[:, 1] - base[:, 1]).abs().max()) > 1e-6, (number, at)


@settings(max_examples=40)
@given(case=random_cases(hybrid=False))
def test_oal_is_the_case_of_group_constant_coefficients(case: Case) -> None:
    """``a = eps + M_00``, ``b_r = 2 M_0g(r)``, ``C_rt = M_g(r)g(t)`` (SPEC section 2)."""
    heads, dim = case.groups.shape
    m = case.factor @ case.factor.transpose(1, 2)
    a, b = case.eps + m[:, 0, 0], torch.empty(heads, dim, dtype=m.dtype)
    c = torch.empty(heads, dim, dim, dtype=m.dtype)
    for head in range(heads):
        for r in range(dim):
            b[head, r] = 2 * m[head, 0, 1 + case.groups[head, r]]
            for t in range(dim):
                c[head, r, t] = m[head, 1 + case.groups[head, r], 1 + case.groups[head, t]]
    for backend in ENGINES:
        grouped = attend(case, backend)
        ungrouped = run(case, Coefficients(a, b, c), backend)
        assert_close(ungrouped, grouped, torch.float64, "output", backend)


def test_the_state_does_not_depend_on_the_coefficients() -> None:
    case = make(kv_heads=2, ratio=2, tokens=9)
    states = []
    for factor in (1.0, -3.0):
        coefficients = Coefficients(*(factor * x for x in general(case)))
        _, state = dimension_quadratic_attention(
            case.q, case.k, case.v, *coefficients, return_state=True
        )
        states.append(state.sums)
    assert torch.equal(*states)
    # and it is the sums H_0, H_1, H_2 of SPEC section 2, written out
    key, value = case.k[0, 1], case.v[0, 1]
    u = torch.cat([value, torch.ones(9, 1, dtype=value.dtype)], 1)
    rows = [u.sum(0)]
    rows += [(key[:, r, None] * u).sum(0) for r in range(4)]
    rows += [(key[:, r, None] * key[:, t, None] * u).sum(0) for r in range(4) for t in range(r, 4)]
    assert_close(states[0][0, 1], torch.stack(rows), torch.float64, "output")


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_packed_features_and_their_gradients(dim: int) -> None:
    x = torch.randn(2, 3, dim, dtype=torch.float64, requires_grad=True)
    count = 1 + dim + dim * (dim + 1) // 2
    weights = torch.randn(3, count, dtype=torch.float64, requires_grad=True)
    written_out = torch.stack(
        [torch.ones_like(x[..., 0])]
        + [x[..., r] for r in range(dim)]
        + [x[..., r] * x[..., t] for r in range(dim) for t in range(r, dim)],
        dim=-1,
    )
    assert torch.equal(quadratic_features(x), written_out)
    assert torch.equal(quadratic_features(x, weights), written_out * weights)
    assert torch.autograd.gradcheck(quadratic_features, (x, weights))
