"""What does not fit together is refused with what was asked, what was found and what to do."""

import pytest
import torch

from linearize.errors import BackendError, LinearizeError
from linearize.ops import (
    BACKENDS,
    dimension_quadratic_attention,
    grouped_quadratic_attention,
    resolve_backend,
)
from ops.cases import make

CASE = make(batch=2, kv_heads=2, ratio=2, tokens=6, dim=4, value_dim=3, groups=2)
GOOD = {
    "q": CASE.q,
    "k": CASE.k,
    "v": CASE.v,
    "groups": CASE.groups,
    "factor": CASE.factor,
    "key_mask": torch.ones(2, 6, dtype=torch.bool),
}


def test_the_good_case_runs() -> None:
    assert grouped_quadratic_attention(**GOOD).shape == (2, 4, 6, 3)


@pytest.mark.parametrize(
    ("name", "value", "mentions"),
    [
        ("q", CASE.q[:, :3], "(2, 3, 6, 4)"),  # 3 query heads over 2 KV heads
        ("q", CASE.q[:1], "(1, 4, 6, 4)"),
        ("q", CASE.q[:, :, :5], "(2, 4, 5, 4)"),
        ("q", CASE.q[0], "(4, 6, 4)"),
        ("q", CASE.q[0, 0, 0], "(4,)"),
        ("k", CASE.k[..., :3], "(2, 2, 6, 3)"),
        ("k", CASE.k[:, :, :5], "(2, 2, 5, 4)"),
        ("k", CASE.k[0], "(2, 6, 4)"),
        ("v", CASE.v[:, :1], "(2, 1, 6, 3)"),
        ("v", CASE.v[:, :, 1:], "(2, 2, 5, 3)"),
        ("v", CASE.v[0], "(2, 6, 3)"),
        ("groups", CASE.groups[:3], "(3, 4)"),
        ("groups", CASE.groups[:, :3], "(4, 3)"),
        ("groups", CASE.groups - 1, "-1"),
        ("groups", CASE.groups + 1, "2"),
        ("factor", CASE.factor[:3], "(3, 3, 3)"),
        ("factor", CASE.factor[:, :2], "(4, 2, 3)"),
        ("key_mask", torch.ones(2, 5, dtype=torch.bool), "(2, 5)"),
        ("key_mask", torch.ones(2, 1, 1, 6, dtype=torch.bool), "(2, 1, 1, 6)"),
    ],
)
@pytest.mark.parametrize("backend", ["pairwise", "auto"])
def test_inputs_that_do_not_fit_are_named(
    name: str, value: torch.Tensor, mentions: str, backend: str
) -> None:
    arguments = GOOD | {name: value}
    if name == "q" and value.ndim == 4 and value.shape[1] != 4:
        arguments |= {"groups": CASE.groups[:3], "factor": CASE.factor[:3]}
    with pytest.raises(LinearizeError) as raised:
        grouped_quadratic_attention(**arguments, backend=backend)
    assert mentions in str(raised.value)
    assert raised.value.remedy


def test_no_tokens_are_refused() -> None:
    empty = {name: GOOD[name][:, :, :0] for name in "qkv"}
    with pytest.raises(LinearizeError, match=r"q \(2, 4, 0, 4\)"):
        grouped_quadratic_attention(**GOOD | empty | {"key_mask": None})


@pytest.mark.parametrize("backend", ["pairwise", "chunked", "recurrent"])
def test_a_mask_of_zeros_and_ones_is_a_mask(backend: str) -> None:
    """Tokenizers give integers: they mean the same, or are refused; nothing in between."""
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, :2] = False
    wanted = grouped_quadratic_attention(**GOOD | {"key_mask": mask}, backend=backend)
    try:
        output = grouped_quadratic_attention(**GOOD | {"key_mask": mask.long()}, backend=backend)
    except LinearizeError as error:
        assert "int64" in str(error)
    else:
        assert torch.equal(output, wanted)


@pytest.mark.parametrize(
    ("number", "shape"), [(0, (3,)), (1, (4, 3)), (1, (4,)), (2, (4, 4)), (2, (4, 3, 4))]
)
def test_coefficients_that_do_not_fit_are_named(number: int, shape: tuple[int, ...]) -> None:
    coefficients = [torch.ones(4), torch.ones(4, 4), torch.ones(4, 4, 4)]
    coefficients[number] = torch.ones(shape)
    with pytest.raises(LinearizeError) as raised:
        dimension_quadratic_attention(CASE.q, CASE.k, CASE.v, *coefficients)
    assert str(shape) in str(raised.value)


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(BackendError) as raised:
        grouped_quadratic_attention(**GOOD, backend="cuda")
    for name in ("'cuda'", *BACKENDS):
        assert name in str(raised.value)


def test_the_definition_keeps_no_state() -> None:
    with pytest.raises(BackendError, match="pairwise"):
        grouped_quadratic_attention(**GOOD, backend="pairwise", return_state=True)
    _, state = grouped_quadratic_attention(**GOOD, return_state=True)
    with pytest.raises(BackendError, match="pairwise"):
        grouped_quadratic_attention(**GOOD, backend="pairwise", state=state)


def test_auto_says_what_it_takes() -> None:
    assert resolve_backend("auto", 1) == "recurrent"
    assert resolve_backend("auto", 2) == "chunked"
    for name in ("pairwise", "chunked", "recurrent"):
        assert resolve_backend(name, 1) == resolve_backend(name, 500) == name
