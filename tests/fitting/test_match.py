"""The paper's recipe: it descends, keeps what validates best, and does no better than the moments."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fitting.synthetic import HEADS, KV_HEADS, SCALE, calibration
from linearize.attention import LinearAttention, _View
from linearize.errors import ModelError
from linearize.fitting import Activations, Calibration, match, match_outputs
from linearize.kernels import HeadShape, oal
from linearize.kernels.oal import OAL
from linearize.plan import Plan
from ops import definition

SHAPE = HeadShape(HEADS, KV_HEADS, 6, 3, SCALE)


def kernel(seed: int = 0, size: float = 0.5) -> OAL:
    """Groups and factors at random, far from fitted."""
    g = torch.Generator().manual_seed(seed)
    made = OAL(SHAPE, groups=2)
    made.assign(
        torch.randint(2, (HEADS, 6), generator=g),
        (size * torch.randn(HEADS, 3, 3, generator=g)).tril(),
    )
    return made


def validation_error(of: OAL, data: Calibration, window: int = 0) -> Tensor:
    """Mean output error per head over the validation blocks, from the definition."""
    weight = definition.grouped_weight(of.groups, of.factor, eps=of.eps, scale=SCALE)
    inputs = (data.validation.q, data.validation.k, data.validation.v)
    output = definition.attention(weight, *inputs, scale=SCALE, window=window)
    target = definition.attention(None, *inputs, scale=SCALE)
    return (output - target).square().mean((0, 2, 3))


def test_the_loss_falls_and_the_result_is_what_was_measured() -> None:
    data, made = calibration(Plan(positions=99)), kernel()
    before = validation_error(made, data)
    result, best = match_outputs(made, data, steps=150, validate_every=25, start="random")
    after = validation_error(made, data)
    torch.testing.assert_close(best.double(), after, rtol=1e-4, atol=1e-8)
    assert bool((after < 0.95 * before).all())
    assert result.curve[0] > 0
    assert sum(result.curve[-20:]) < 0.9 * sum(result.curve[:20])
    assert len(result.curve) == 150
    assert result.start == ["random"] * HEADS
    assert result.fit_mse == pytest.approx(after.tolist(), rel=1.5)  # the same distribution


def test_a_bad_run_leaves_the_start_in_place() -> None:
    """Steps that only make it worse: the best checkpoint is the first one, for every head."""
    data, made = calibration(Plan(positions=99)), kernel()
    match_outputs(made, data, steps=200)
    fitted = made.factor.detach().clone()
    before = validation_error(made, data)
    _, best = match_outputs(made, data, steps=4, learning_rate=50.0, validate_every=1)
    assert torch.equal(made.factor.detach(), fitted)
    torch.testing.assert_close(best.double(), before, rtol=1e-4, atol=1e-8)


def test_each_head_keeps_its_own_best_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head 0 starts fitted and is pushed away; the others start bad and improve."""
    data, made = calibration(Plan(positions=99)), kernel()
    match_outputs(made, data, steps=300)
    good = made.factor.detach().clone()
    mixed = kernel(seed=1)
    mixed.assign(made.groups, torch.cat([good[:1], mixed.factor.detach()[1:]]))
    start = mixed.factor.detach().clone()
    before = validation_error(mixed, data)
    match_outputs(mixed, data, steps=30, learning_rate=0.3, validate_every=10)
    after = validation_error(mixed, data)
    assert bool((after <= before * (1 + 1e-6)).all())
    assert bool((after[1:] < before[1:]).all())
    assert not torch.equal(mixed.factor.detach()[1:], start[1:])


def test_patience_ends_the_run() -> None:
    data, made = calibration(Plan(positions=99)), kernel()
    result, _ = match_outputs(
        made, data, steps=1000, learning_rate=0.0, validate_every=10, patience=40
    )
    assert len(result.curve) == 40


def test_the_seed_of_the_plan_decides() -> None:
    factors = []
    for seed in (1, 1, 2):
        made = kernel()
        torch.manual_seed(seed * len(factors))
        match_outputs(made, calibration(Plan(positions=99, seed=seed)), steps=20)
        factors.append(made.factor.detach())
    assert torch.equal(factors[0], factors[1])
    assert not torch.equal(factors[0], factors[2])


def test_gradients_are_clipped_at_the_recipes_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = nn.utils.clip_grad_norm_

    def clip(parameters: list[nn.Parameter], norm: float) -> Tensor:
        seen.append(norm)
        return real(parameters, norm)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip)
    match_outputs(kernel(), calibration(Plan()), steps=2)
    assert seen == [10.0, 10.0]
    assert (match.STEPS, match.LEARNING_RATE, match.POSITIONS) == (1000, 0.02, 32)
    assert (match.VALIDATE_EVERY, match.PATIENCE) == (100, 400)


def test_a_loss_that_is_not_finite_stops_with_the_layer() -> None:
    data = calibration(Plan())
    data.fit.v[0, 0, 0] = torch.inf
    with pytest.raises(ModelError, match="layer 0"):
        match_outputs(kernel(), data, steps=5)


def _linear(plan: Plan) -> LinearAttention:
    return LinearAttention.from_plan(plan, SHAPE, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 4},
        {"sinks": 2, "window": 3, "center": True},
        {"window": 4, "saturation": 5},
        {"groups": 3},
    ],
)
@pytest.mark.parametrize("solver", ["moments", "adam"])
def test_a_layers_fit_improves_on_its_start(
    settings: dict, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oal, "match_outputs", _shortened)
    plan = Plan(positions=99, bootstrap=50, solver=solver, **settings)
    data = calibration(plan)
    linear = _linear(plan)
    before = sum(linear.error(data.validation).mse)
    result = linear.fit(data)
    after = linear.error(data.validation)
    # A window disagrees with an unfitted kernel about the size of weights: more to gain.
    assert sum(after.mse) < (0.8 if plan.window else 0.98) * before
    assert result.curve[-1] < result.curve[0]
    assert min(result.fit_mse) > 0
    assert len(result.fit_mse) == len(result.start) == HEADS
    if solver == "moments" and "window" not in settings:
        assert result.fit_mse == pytest.approx(after.mse, rel=1.5)


def test_the_gain_beside_exact_keys_starts_where_the_weights_fit() -> None:
    """Weights of another size start with another gain, exactly as far away."""
    gains = []
    for size in (1.0, torch.e**-3):  # of the factor: weights differ by a factor of e^6
        plan = Plan(window=4)
        made, data = kernel(), calibration(plan)
        made.factor.data *= size
        made.eps *= size**2
        linear = LinearAttention(made, window=4)
        linear.gain.data += 1.0  # where it stood does not count
        data = replace(
            data,
            view=lambda kernel, linear=linear: _View(kernel, None, linear.gain),
            parameters=(linear.gain,),
        )
        match_outputs(made, data, steps=1, learning_rate=0.0)
        gains.append(linear.gain.detach())
    assert torch.equal(gains[1] - gains[0], torch.full((HEADS,), 6.0))
    assert set(gains[0].tolist()) <= set(match.GAINS)


def _shortened(*args: object, **changes: object) -> object:
    return match_outputs(*args, steps=120, validate_every=20, **changes)


@pytest.mark.parametrize("window", [0, 4])
def test_the_moments_validate_no_worse_than_the_recipe(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oal, "match_outputs", _shortened)
    _moments_against_adam(window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_the_moments_validate_no_worse_than_the_whole_recipe(window: int, seed: int) -> None:
    _moments_against_adam(window, seed=seed)


def _moments_against_adam(window: int, *, seed: int = 0) -> None:
    error = {}
    for solver in ("moments", "adam"):
        plan = Plan(positions=99, bootstrap=50, solver=solver, window=window)
        linear = _linear(plan)
        data = calibration(plan, blocks=12, tokens=48, seed=seed)
        linear.fit(data)
        error[solver] = sum(linear.error(data.validation).mse)
    assert error["moments"] <= error["adam"] * (1 + 1e-4), error


def test_error_is_measured_on_whole_sequences() -> None:
    plan = Plan(window=3)
    data = calibration(plan)
    linear = _linear(plan)
    found = linear.error(data.validation)
    weight = definition.grouped_weight(
        linear.kernel.groups, linear.kernel.factor, eps=1e-6, scale=SCALE
    )
    inputs = (data.validation.q, data.validation.k, data.validation.v)
    output = definition.attention(weight, *inputs, scale=SCALE, window=3)
    target = definition.attention(None, *inputs, scale=SCALE)
    squared = (output - target).square().sum((0, 2, 3))
    count = target[:, 0].numel()
    assert found.mse == pytest.approx((squared / count).tolist(), rel=1e-3)
    energy = target.square().sum((0, 2, 3))
    assert found.relative == pytest.approx((squared / energy).tolist(), rel=1e-3)


def test_centring_subtracts_the_mean_key_and_leaves_softmax_alone() -> None:
    plan = Plan(center=True, positions=99, bootstrap=10)
    data = calibration(plan)
    linear = _linear(plan)
    linear.fit(data)
    mean = data.fit.k.double().mean((0, 2))
    torch.testing.assert_close(linear.keys.center.double(), mean, rtol=1e-5, atol=1e-6)
    shifted = replace(data.validation, k=data.validation.k - linear.keys.center[:, None])
    bare = LinearAttention(linear.kernel)
    inputs = (shifted.q, shifted.k, shifted.v)
    through, _ = linear(data.validation.q, data.validation.k, data.validation.v)
    torch.testing.assert_close(through, bare(*inputs)[0], rtol=1e-4, atol=1e-5)
    weight = definition.grouped_weight(
        linear.kernel.groups, linear.kernel.factor, eps=1e-6, scale=SCALE
    )
    wanted = definition.attention(weight, *inputs, scale=SCALE)
    torch.testing.assert_close(through.double(), wanted, rtol=1e-3, atol=1e-3)


def joint(steps: int, rank: int | None, window: int) -> tuple[LinearAttention, Tensor]:
    """A layer fitted with so many joint steps, and its validation error per KV head.

    The keys vary most in two dimensions that the values do not depend on, so the directions with
    most logit variance are the wrong ones.
    """
    g = torch.Generator().manual_seed(3)
    spread = torch.tensor([1.6, 1.6, 1.2, 1.2, 0.2, 0.2])
    q = 1.5 * torch.randn(8, HEADS, 48, 6, generator=g)
    k = spread * torch.randn(8, KV_HEADS, 48, 6, generator=g) + 0.5
    v = k[..., 2:5]
    fit, held = (Activations(q[at], k[at], v[at]) for at in (slice(0, 6), slice(6, 8)))
    plan = Plan(positions=99, sinks=1, window=window, center=True, joint_steps=steps)
    data = Calibration.plain(fit, fit, held, scale=SCALE, layer=0, plan=plan)
    made = LinearAttention(OAL(SHAPE, groups=2), sinks=1, window=window, center=True, rank=rank)
    made.fit(data)
    return made, torch.tensor(made.error(held).mse).view(KV_HEADS, -1).mean(1)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("rank", [None, 2])
def test_centre_and_directions_are_learned_with_the_kernel(rank: int | None, window: int) -> None:
    """From the start that the moments give; no KV head is left worse than there."""
    start, before = joint(0, rank, window)
    learned, after = joint(200, rank, window)
    assert bool((after <= before * (1 + 1e-5)).all())
    if rank is None:
        return  # the mean is where it should be
    assert bool((after < 0.7 * before).all())
    moved = {
        name
        for name, value in learned.named_parameters()
        if not torch.equal(value, start.get_parameter(name))
    }
    assert moved == {name for name, _ in start.named_parameters()}


def test_without_a_transform_there_is_nothing_to_join() -> None:
    plain = LinearAttention(OAL(SHAPE, groups=2))
    data = calibration(Plan(positions=99))
    result = plain.fit(data)
    alone = OAL(SHAPE, groups=2)
    expected = alone.fit(data)
    assert torch.equal(plain.kernel.factor, alone.factor)
    assert result is not None and result.curve == expected.curve


def test_rates_rise_and_fall_to_zero() -> None:
    shares = [match._share(done, 100) for done in range(100)]
    assert shares[0] == pytest.approx(0.2) and max(shares) == pytest.approx(1, abs=0.01)
    assert shares.index(max(shares)) == 4 and 0 < shares[-1] < 1e-3
    assert shares[4:] == sorted(shares[4:], reverse=True)
