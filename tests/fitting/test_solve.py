"""The solver: exact derivatives, selection by validation, and recovery of a kernel it should find."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fitting.synthetic import HEADS, SCALE, activations, teacher
from linearize.fitting import Activations, Moments, fit_factor, moments
from linearize.fitting.solve import _derivatives, embed_global, evaluate, taylor_factor
from linearize.ops import grouped_quadratic_attention
from linearize.ops.quadratic import GroupedQuadratic
from tolerances import assert_close

EPS = 1e-6
GROUPS = torch.tensor(
    [[0, 0, 0, 0, 1, 2], [0, 0, 0, 1, 1, 2], [0, 1, 0, 0, 2, 2], [0, 0, 1, 1, 2, 0]]
)


def random_moments(heads: int, count: int, groups: int, *, seed: int = 0) -> Moments:
    """Moments of random positive features with random targets: no activations behind them."""
    g = torch.Generator().manual_seed(seed)
    pairs = (groups + 1) * (groups + 2) // 2
    scores = torch.randn(heads, count, 9, groups + 1, generator=g, dtype=torch.float64)
    scores[..., 0] = 1
    rows, columns = torch.tril_indices(groups + 1, groups + 1)
    u = torch.randn(heads, count, 9, 4, generator=g, dtype=torch.float64)
    u[..., -1] = 1
    t = (scores[..., rows] * scores[..., columns]).transpose(-1, -2) @ u
    exact = torch.rand(heads, count, 1, 4, generator=g, dtype=torch.float64)
    t = torch.cat([t, exact], 2)
    target = torch.randn(heads, count, 1, 3, generator=g, dtype=torch.float64)
    residual = t[..., :-1] - target * t[..., -1:]
    assert t.shape[2] == pairs + 1
    return Moments(residual @ residual.transpose(-1, -2) / 3, t[..., -1], groups)


def lower(entries: Tensor, size: int) -> Tensor:
    rows, columns = torch.tril_indices(size, size)
    full = entries.new_zeros(size, size)
    return full.index_put((rows, columns), entries)


@settings(max_examples=20)
@given(groups=st.integers(1, 3), count=st.integers(1, 4), seed=st.integers(0, 99))
def test_gradient_and_hessian_equal_autograd(groups: int, count: int, seed: int) -> None:
    data = random_moments(2, count, groups, seed=seed)
    size = groups + 1
    rows, columns = torch.tril_indices(size, size)
    factor = torch.randn(2, 2, size, size, dtype=torch.float64).tril()
    loss, gradient, hessian = _derivatives(data, factor, 0.01)
    for head in range(2):
        one = Moments(data.gram[head : head + 1], data.mass[head : head + 1], groups)
        for start in range(2):

            def function(entries: Tensor, one: Moments = one) -> Tensor:
                return evaluate(one, lower(entries, size)[None, None], 0.01)[0, 0]

            entries = factor[head, start][rows, columns]
            assert float(loss[head, start]) == pytest.approx(float(function(entries)), rel=1e-12)
            for found, wanted in (
                (gradient[head, start], torch.autograd.functional.jacobian(function, entries)),
                (hessian[head, start], torch.autograd.functional.hessian(function, entries)),
            ):
                assert_close(found, wanted, torch.float64, "gradient")


def test_the_taylor_factor_is_one_plus_s_plus_half_s_squared() -> None:
    q = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    k = torch.randn(1, 2, 7, 6, dtype=torch.float64)
    s = q @ k.transpose(-1, -2) * SCALE
    for count in (1, 2, 3):
        groups = torch.randint(count, (2, 6))
        kernel = GroupedQuadratic(
            groups,
            taylor_factor(count).expand(2, -1, -1),
            eps=0.0,
            scale=SCALE,
            dtype=torch.float64,
        )
        assert_close(kernel.weights(q, k).values, 1 + s + s**2 / 2, torch.float64, "output")


@settings(max_examples=20)
@given(groups=st.integers(1, 5), seed=st.integers(0, 99))
def test_embedding_the_global_factor_repeats_its_coefficients(groups: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    factor = torch.randn(3, 2, 2, generator=g, dtype=torch.float64).tril()
    m = factor @ factor.transpose(1, 2)
    embedded = embed_global(factor, groups)
    assert torch.equal(embedded, embedded.tril())
    large = embedded @ embedded.transpose(1, 2)
    for g1 in range(groups + 1):
        for g2 in range(groups + 1):
            wanted = m[:, min(g1, 1), min(g2, 1)]
            assert_close(large[:, g1, g2], wanted, torch.float64, "output")


def collect(data: Activations, groups: Tensor, *, sinks: int = 0, window: int = 0) -> Moments:
    return Moments.collect(
        data,
        data.k,
        groups,
        list(range(HEADS)),
        scale=SCALE,
        sinks=sinks,
        window=window,
        saturation=None,
        positions=99,
        generator=torch.Generator().manual_seed(0),
    )


def known_kernel() -> tuple[Tensor, Tensor]:
    """A positive grouped kernel per head that is far from any global one, and its M."""
    g = torch.Generator().manual_seed(3)
    factor = torch.randn(HEADS, 4, 4, generator=g, dtype=torch.float64).tril() * 0.5
    factor[:, 0, 0] = 1.0
    return factor, factor @ factor.transpose(1, 2)


@pytest.mark.parametrize("count", [1, 3])
def test_recovers_the_kernel_that_made_the_targets(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets come from a grouped quadratic, not from softmax: its M is found up to scale."""
    groups = GROUPS if count == 3 else torch.zeros_like(GROUPS)
    factor, _ = known_kernel()
    factor = factor[:, : count + 1, : count + 1]
    monkeypatch.setattr(
        moments,
        "softmax_outputs",
        teacher(
            lambda q, k, v: grouped_quadratic_attention(
                q.double(), k.double(), v.double(), groups, factor, eps=EPS, scale=SCALE
            )
        ),
    )
    fit, validation = (collect(activations(3, 24, seed=s), groups) for s in (1, 2))
    taylor = taylor_factor(count).expand(HEADS, -1, -1)
    before = evaluate(validation, taylor[:, None], EPS)[:, 0]
    found, error, _, curve = fit_factor(fit, validation, [taylor], EPS, iterations=200)
    after = evaluate(validation, found[:, None], EPS)[:, 0]
    assert bool((before > 1e-4).all())  # the start is wrong
    assert bool((after < 1e-6 * before).all()), (before, after)
    assert bool((error < 1e-6 * before).all())
    assert curve[-1] < 1e-6 * curve[0]
    m, wanted = (x @ x.transpose(1, 2) for x in (found, factor))
    m, wanted = (x / x[:, :1, :1] for x in (m, wanted))
    assert float((m - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


def test_the_reported_error_is_that_of_the_returned_factor() -> None:
    fit, validation = (collect(activations(2, 16, seed=s), GROUPS) for s in (1, 2))
    starts = [taylor_factor(3).expand(HEADS, -1, -1), known_kernel()[0]]
    found, error, chosen, curve = fit_factor(fit, validation, starts, EPS)
    torch.testing.assert_close(evaluate(fit, found[:, None], EPS)[:, 0], error)
    assert set(chosen.tolist()) <= {0, 1}
    assert all(later <= earlier for earlier, later in pairwise(curve))
    for start in starts:
        assert bool(
            (
                evaluate(validation, found[:, None], EPS)
                <= evaluate(validation, start[:, None].double(), EPS) * (1 + 1e-4)
            ).all()
        )


def test_each_head_keeps_the_iterate_that_validates_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitting data of one teacher, validation data of another: the other's kernel must stay."""
    factor, _ = known_kernel()

    def student(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_quadratic_attention(
            q.double(), k.double(), v.double(), GROUPS, factor, eps=EPS, scale=SCALE
        )

    fit = collect(activations(2, 16, seed=1), GROUPS)
    with monkeypatch.context() as patch:
        patch.setattr(moments, "softmax_outputs", teacher(student))
        validation = collect(activations(2, 16, seed=2), GROUPS)
    taylor = taylor_factor(3).expand(HEADS, -1, -1)
    found, _, chosen, _ = fit_factor(fit, validation, [taylor, factor], EPS)
    assert chosen.tolist() == [1] * HEADS
    assert bool((evaluate(validation, found[:, None], EPS) < 1e-4).all())
    followed, _, _, _ = fit_factor(fit, fit, [taylor, factor], EPS)
    assert bool((evaluate(validation, followed[:, None], EPS) > 1e-3).all())


def test_heads_and_starts_do_not_influence_each_other() -> None:
    fit, validation = (collect(activations(2, 16, seed=s), GROUPS) for s in (1, 2))
    starts = [taylor_factor(3).expand(HEADS, -1, -1), known_kernel()[0]]
    together, *_ = fit_factor(fit, validation, starts, EPS)
    losses = evaluate(validation, together[:, None], EPS)[:, 0]
    for head in range(HEADS):
        one = [
            Moments(m.gram[head : head + 1], m.mass[head : head + 1], 3) for m in (fit, validation)
        ]
        alone, *_ = fit_factor(*one, [s[head : head + 1] for s in starts], EPS)
        loss = float(evaluate(one[1], alone[:, None], EPS))
        assert loss == pytest.approx(float(losses[head]), rel=1e-2)
