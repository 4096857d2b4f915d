"""Concentration, stability, activations and group budgets on tiny models."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import rankdata
from torch import Tensor

import tiny
from linearize import Plan, convert
from linearize.diagnose import (
    activation_profile,
    concentration,
    group_budget,
    stability,
    state_curve,
)
from linearize.diagnose.data import gaussian_like, generator, top_share
from linearize.diagnose.stability import prefix_lengths, spearman
from linearize.errors import PlanError, TextError
from linearize.fitting import Activations
from linearize.grouping import contributions, fixed_groups
from linearize.text import divide, split_blocks


def plan(**changes: object) -> Plan:
    return tiny.plan(**{"layers": "all", "skip_blocks": 3, "fit_blocks": 2} | changes)


def activations(sequences: list[Tensor]) -> Activations:
    """Of layer 1 of the tiny model."""
    seen = [tiny.recorded(tiny.model(), each)[1] for each in sequences]
    return Activations(*(torch.cat([one[i] for one in seen]) for i in range(3)))


def test_isotropic_gaussian_vectors_share_evenly() -> None:
    """χ of the i-th of d equal dimensions is 1/d up to sampling; the top 5 exceed 5/d by little."""
    empty = torch.empty(40, 3, 128, 64)
    data = gaussian_like(Activations(empty, empty, empty), generator(0, 0, "gauss"))
    profile = contributions(data.q, data.k, 1 / 8).mean(0)
    share = top_share(profile)
    assert bool((share > 5 / 64).all()) and bool((share < 1.1 * 5 / 64).all())
    # E|q k| = 2/π for independent standard normal numbers
    assert float(profile.mean()) == pytest.approx(2 / torch.pi / 8, rel=0.02)


def test_shares_are_those_of_the_profile() -> None:
    found = concentration(tiny.loaded(), tiny.text(), plan())
    assert (found.top, found.dimensions, found.uniform) == (5, 8, 5 / 8)
    assert [layer.layer for layer in found.layers] == [0, 1, 2]
    data = activations(divide(tiny.text(), plan()).prompts)
    profile = contributions(data.q, data.k, tiny.HEAD_DIM**-0.5).mean(0)
    control = gaussian_like(data, generator(42, 1, "gauss"))
    flat = contributions(control.q, control.k, tiny.HEAD_DIM**-0.5).mean(0)
    layer = found.layers[1]
    for head in range(tiny.HEADS):
        largest = sorted(range(8), key=lambda r: -float(profile[head, r]))[:5]
        pretrained = float(profile[head, largest].sum() / profile[head].sum())
        same = float(flat[head, largest].sum() / flat[head].sum())
        own = float(flat[head].sort().values[-5:].sum() / flat[head].sum())
        assert layer.pretrained[head] == pytest.approx(pretrained, rel=1e-5)
        assert layer.gaussian_same[head] == pytest.approx(same, rel=1e-5)
        assert layer.gaussian[head] == pytest.approx(own, rel=1e-5)
        assert own >= same


def test_rank_correlation() -> None:
    rising = torch.tensor([1.0, 2.0, 5.0, 9.0])
    assert spearman(rising, rising.square()) == pytest.approx(1)
    assert spearman(rising, -rising) == pytest.approx(-1)
    source = torch.Generator().manual_seed(0)
    a, b = torch.rand(30, generator=source), torch.rand(30, generator=source)
    ranks = torch.stack([torch.from_numpy(rankdata(x.numpy())) for x in (a, b)])
    assert spearman(a, b) == pytest.approx(float(torch.corrcoef(ranks)[0, 1]))


def test_stability_compares_prompts_and_prefixes() -> None:
    found = stability(tiny.loaded(), tiny.text(), plan(layers=(1,)), head=2)
    assert len(found.heads) == tiny.HEADS and found.lengths == [2, 8, 16, 32, 64]
    block = activations(split_blocks(tiny.text(), 64)[:1])
    scale = tiny.HEAD_DIM**-0.5
    whole = contributions(block.q, block.k, scale)[0]
    for one in found.heads:
        assert bool(one.calibration) == bool(one.heldout) == (one.head == 2)
        expected = whole[one.head].argsort(descending=True)[:5].tolist()
        assert one.top == expected
        for prefix in one.prefixes:
            n = prefix.length
            profile = contributions(block.q[:, :, :n], block.k[:, :, :n], scale)[0, one.head]
            shares = (profile / profile.sum())[expected]
            assert prefix.shares == pytest.approx(shares.tolist(), rel=1e-6)
        last = one.prefixes[-1]
        assert (last.overlap, last.spearman) == (5, pytest.approx(1))
        assert sum(last.shares) == pytest.approx(float(top_share(whole[one.head])))
    detail = found.heads[2]
    expected_rho = spearman(torch.tensor(detail.calibration), torch.tensor(detail.heldout))
    assert detail.spearman == pytest.approx(expected_rho)
    assert prefix_lengths(4096) == [128, 512, 1024, 2048, 4096]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "phi"])
def test_activations_are_the_residual_stream_behind_every_block(name: str) -> None:
    loaded = tiny.loaded(name)
    found = activation_profile(loaded, tiny.text(), plan())
    assert not any(module._forward_hooks for module in loaded.model.modules())
    prompts = torch.stack(divide(tiny.text(), plan()).prompts)
    with torch.no_grad():
        states = loaded.model.base_model(input_ids=prompts, output_hidden_states=True).hidden_states
    assert [layer.layer for layer in found.layers] == [0, 1, 2] and found.hidden == tiny.HIDDEN
    for layer in found.layers[:-1]:  # the last state in that list has passed the final norm
        largest = states[layer.layer + 1].abs().flatten(0, 1).amax(0)
        ranked = largest.sort(descending=True)
        assert layer.top == pytest.approx(ranked.values[:3].tolist(), rel=1e-5)
        assert layer.dimensions == ranked.indices[:3].tolist()
        assert layer.median == pytest.approx(float(largest.double().quantile(0.5)), rel=1e-5)


def test_the_last_block_is_seen_before_the_final_norm() -> None:
    loaded = tiny.loaded()
    seen = []
    norm = loaded.model.get_submodule("model.norm")
    with torch.no_grad():
        handle = norm.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        found = activation_profile(loaded, tiny.text(), plan())
        handle.remove()
    # the first call of the norm is the inspection of the model with two tokens
    largest = torch.cat([x.abs().flatten(0, 1) for x in seen if x.shape[1] > 2]).amax(0)
    assert found.layers[-1].top == pytest.approx(largest.topk(3).values.tolist(), rel=1e-5)


def test_a_group_budget_is_measured_on_held_out_blocks() -> None:
    head = 5
    settings = plan(layers=(1,), positions=64)
    found = group_budget(tiny.loaded(), tiny.text(), settings, head=head, budgets=3)
    assert [point.groups for point in found.points] == [1, 2, 3]
    assert [point.parameters for point in found.points] == [3, 6, 10]
    assert (found.fit_blocks, found.validation_blocks, found.heldout_blocks) == (2, 2, 3)
    assert found.points[2].validation_mse <= found.points[0].validation_mse * 1.02
    prompts = activations(divide(tiny.text(), settings).prompts)
    profile = contributions(prompts.q, prompts.k, tiny.HEAD_DIM**-0.5).mean(0)
    for point in found.points:
        member = fixed_groups(profile, point.groups)[head]
        expected = [(member == g).nonzero().flatten().tolist() for g in range(point.groups)]
        assert point.members == expected
        assert point.heldout_mse > 0 and point.heldout_relative > 0


def test_held_out_blocks_do_not_reach_the_fit() -> None:
    settings = plan(layers=(0,))
    text, changed = tiny.text(), tiny.text()
    changed[: 3 * 64] = tiny.text(3 * 64, seed=9)
    first, second = (
        group_budget(tiny.loaded(), tokens, settings, budgets=2) for tokens in (text, changed)
    )
    for a, b in zip(first.points, second.points, strict=True):
        assert (a.fit_mse, a.validation_mse) == (b.fit_mse, b.validation_mse)
        assert a.heldout_mse != b.heldout_mse


def test_a_budget_agrees_with_a_conversion_that_has_as_many_groups() -> None:
    settings = plan(layers=(1,), groups=2, min_groups=1)
    measured = convert(tiny.loaded(), tiny.text(), settings).report.layers[0]
    found = group_budget(tiny.loaded(), tiny.text(), settings, head=1, budgets=2)
    assert found.points[1].members == measured.groups[1]
    assert found.points[1].validation_mse == pytest.approx(measured.validation_mse[1], rel=0.05)


def test_a_state_curve_agrees_with_conversions_of_the_same_rank() -> None:
    beside = {"sinks": 2, "window": 4, "center": True}
    settings = plan(layers=(1,), **beside)
    found = state_curve(tiny.loaded(), tiny.text(), settings, ranks=[5, 2])
    assert [point.rank for point in found.points[0]] == [2, 5, None]
    assert [point.features for point in found.points[0]] == [6, 21, 45]
    for point in found.points[0]:
        ranked = settings.model_copy(update={"state_rank": point.rank})
        measured = convert(tiny.loaded(), tiny.text(), ranked).report.layers[0]
        assert point.validation_relative == pytest.approx(measured.validation_relative, rel=1e-5)
        assert point.state_bytes == measured.state_bytes
        assert point.heldout_relative != point.validation_relative
    with pytest.raises(PlanError, match="from 1 to 7"):
        state_curve(tiny.loaded(), tiny.text(), settings, ranks=[8])
    with pytest.raises(PlanError, match="rank"):
        other = settings.model_copy(update={"kernel": "dijiang"})
        state_curve(tiny.loaded(), tiny.text(), other)


def test_short_texts_say_what_is_missing() -> None:
    with pytest.raises(TextError, match="too few"):
        stability(tiny.loaded(), tiny.text(300), plan())
    with pytest.raises(PlanError, match="head 9"):
        group_budget(tiny.loaded(), tiny.text(), plan(), head=9)
