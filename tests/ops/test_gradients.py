"""Gradients to q, k, v and L: against finite differences, and against the pairwise definition."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.ops import State, chunked, dimension_quadratic_attention, kernel_attention
from linearize.ops import grouped_quadratic_attention as grouped
from linearize.ops.pairwise import attend as pairwise_attend
from linearize.ops.quadratic import GroupedQuadratic
from linearize.ops.recurrent import attend as recurrent_attend
from ops.cases import Case, make, random_cases
from tolerances import assert_close

ENGINES = ("pairwise", "chunked", "recurrent")
NAMES = ("q", "k", "v", "factor")


def leaves(case: Case) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in case.tensors()]


def gradients(function: Callable[..., Tensor], case: Case) -> list[Tensor]:
    """Gradients of a fixed random functional of the output."""
    inputs = leaves(case)
    output = function(*inputs)
    weight = torch.randn(output.shape, dtype=output.dtype, generator=torch.manual_seed(5))
    return list(torch.autograd.grad((output * weight).sum(), inputs))


def engine(case: Case, name: str, chunk: int = chunked.CHUNK) -> Callable[..., Tensor]:
    """The case as a function of q, k, v and L."""

    def function(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        kernel = GroupedQuadratic(
            case.groups, factor, eps=case.eps, scale=case.scale, dtype=q.dtype
        )
        settings_ = case.settings
        if name == "pairwise":
            return pairwise_attend(kernel, q, k, v, **settings_)
        if name == "recurrent":
            return recurrent_attend(kernel, q, k, v, **settings_)[0]
        return chunked.attend(kernel, q, k, v, **settings_, chunk=chunk)[0]

    return function


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(("kv_heads", "ratio"), [(2, 1), (1, 3)])
def test_grouped_gradcheck(backend: str, kv_heads: int, ratio: int) -> None:
    case = make(batch=2, kv_heads=kv_heads, ratio=ratio, tokens=5, dim=3, value_dim=2)
    mask = torch.tensor([[True] * 5, [False, True, True, False, True]])
    assert torch.autograd.gradcheck(
        lambda q, k, v, factor: grouped(
            q, k, v, case.groups, factor, eps=case.eps, key_mask=mask, backend=backend
        ),
        leaves(case),
    )


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_gradcheck_through_a_carried_state(backend: str) -> None:
    case = make(kv_heads=1, ratio=2, tokens=6, dim=2, value_dim=2)

    def function(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        state: State | None = None
        for part in (slice(0, 2), slice(2, 6)):
            output, state = grouped(
                *(x[:, :, part] for x in (q, k, v)),
                case.groups,
                factor,
                state=state,
                return_state=True,
                backend=backend,
            )
        return torch.cat([output.flatten(), state.sums.flatten()])

    assert torch.autograd.gradcheck(function, leaves(case))


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_gradcheck_of_general_coefficients(backend: str) -> None:
    case = make(kv_heads=1, ratio=2, tokens=4, dim=3, value_dim=2)
    a = torch.tensor([9.0, 11.0], dtype=torch.float64, requires_grad=True)
    b = (0.3 * torch.randn(2, 3, dtype=torch.float64)).requires_grad_()
    half = (0.3 * torch.randn(2, 3, 3, dtype=torch.float64)).requires_grad_()

    def function(*inputs: Tensor) -> Tensor:
        q, k, v, a, b, half = inputs
        c = half + half.transpose(1, 2)
        return dimension_quadratic_attention(q, k, v, a, b, c, backend=backend)

    assert torch.autograd.gradcheck(function, (*leaves(case)[:3], a, b, half))


@pytest.mark.parametrize("backend", ENGINES)
def test_gradcheck_beside_sinks_and_window(backend: str) -> None:
    case = make(kv_heads=1, ratio=2, tokens=7, dim=2, value_dim=2, sinks=1, window=2, saturation=2)
    assert torch.autograd.gradcheck(engine(case, backend, chunk=2), leaves(case))


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 5)])
def test_gradients_cross_recomputed_segments(sinks: int, window: int) -> None:
    """More tokens than one saved segment holds, at the sizes in use."""
    tokens = chunked.CHUNK * chunked.SEGMENT + 77
    case = make(tokens=tokens, ratio=2, dim=2, value_dim=2, sinks=sinks, window=window)
    wanted = gradients(engine(case, "pairwise"), case)
    found = gradients(engine(case, "chunked"), case)
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        assert_close(a, b, torch.float64, "gradient", name)


@settings(max_examples=60)
@given(case=random_cases(), chunk=st.integers(1, 3), segment=st.integers(1, 3))
def test_gradients_equal_the_definitions(case: Case, chunk: int, segment: int) -> None:
    wanted = gradients(engine(case, "pairwise"), case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "SEGMENT", segment)
        found = gradients(engine(case, "chunked", chunk), case)
    stepped = gradients(engine(case, "recurrent"), case)
    for name, a, b, c in zip(NAMES, found, stepped, wanted, strict=True):
        assert_close(a, c, torch.float64, "gradient", f"chunked {name}")
        assert_close(b, c, torch.float64, "gradient", f"recurrent {name}")


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("ratio", [1, 3, 7])
def test_fp32_gradients_equal_the_fp64_definitions(tokens: int, ratio: int) -> None:
    case = make(tokens=tokens, ratio=ratio, dim=4, dtype=torch.float32, eps=0.1)
    exact = Case(
        case.q.double(),
        case.k.double(),
        case.v.double(),
        case.groups,
        case.factor.double(),
        eps=0.1,
    )
    weight = torch.randn(case.q.shape[0], ratio, tokens, 3, generator=torch.manual_seed(5))

    def weighted(name: str, of: Case) -> list[Tensor]:
        inputs = leaves(of)
        output = engine(of, name)(*inputs)
        return list(torch.autograd.grad((output * weight.to(output.dtype)).sum(), inputs))

    wanted = weighted("pairwise", exact)
    for name in ("chunked", "recurrent"):
        for which, a, b in zip(NAMES, weighted(name, case), wanted, strict=True):
            assert_close(a, b, torch.float32, "gradient", f"{name} {which}")


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 3)])
def test_padding_has_no_gradient_at_all(backend: str, sinks: int, window: int) -> None:
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, :5] = False
    case = make(tokens=12, ratio=2, sinks=sinks, window=window, key_mask=mask)
    inputs = leaves(case)
    output, _ = kernel_attention(
        GroupedQuadratic(case.groups, inputs[3], eps=case.eps, scale=0.5, dtype=torch.float64),
        *inputs[:3],
        scale=0.5,
        sinks=sinks,
        window=window,
        key_mask=mask,
        backend=backend,
    )
    output[:, :, 5:].square().sum().backward()
    for name, x in zip(NAMES[:3], inputs, strict=False):
        assert x.grad is not None
        assert float(x.grad[:, :, :5].abs().max()) == 0, name
        assert float(x.grad[:, :, 5:].abs().max()) > 0, name
