"""The moments reproduce the output error of attention itself, for any factor."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fitting.synthetic import HEADS, KV_HEADS, SCALE, activations
from linearize.fitting import Activations, Moments, moments
from linearize.fitting.data import sample_positions
from linearize.fitting.solve import evaluate
from ops import definition

RELATIVE = 2e-5  # the moments are summed in fp32, the definition in fp64


def direct_loss(
    data: Activations,
    kernel_k: Tensor,
    groups: Tensor,
    factor: Tensor,
    head: int,
    *,
    eps: float,
    at: list[Tensor],
    **exact: Any,
) -> float:
    """Mean of ``‖ŷ - y‖² / dv`` over the given positions of every block, from attention itself.

    ``kernel_k`` must be ``data.k`` beside exact keys, whose logits the definition reads off it.
    """
    kv = head // (HEADS // KV_HEADS)
    q, v = data.q[:, head : head + 1], data.v[:, kv : kv + 1]
    k, seen = data.k[:, kv : kv + 1], kernel_k[:, kv : kv + 1]
    weight = definition.grouped_weight(groups[head : head + 1], factor[None], eps=eps, scale=SCALE)
    student = definition.attention(weight, q, seen, v, scale=SCALE, **exact)
    target = definition.attention(None, q, k, v, scale=SCALE)
    errors = (student - target).square().mean(-1)[:, 0]
    return float(torch.stack([errors[b, at[b]].mean() for b in range(len(data))]).mean())


def collect(
    data: Activations, groups: Tensor, heads: list[int], *, positions: int = 99, **changes: object
) -> Moments:
    arguments = {
        "scale": SCALE,
        "sinks": 0,
        "window": 0,
        "saturation": None,
        "positions": positions,
        "generator": torch.Generator().manual_seed(4),
    }
    kernel_k = changes.pop("kernel_k", data.k)
    return Moments.collect(data, kernel_k, groups, heads, **arguments | changes)


def grouping(count: int, *, seed: int = 0) -> Tensor:
    """Every head has exactly ``count`` groups."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(HEADS):
        members = torch.arange(6) % count
        rows.append(members[torch.randperm(6, generator=g)])
    return torch.stack(rows)


@settings(max_examples=25)
@given(data=st.data())
def test_the_loss_from_moments_is_the_output_error(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    sinks, window = data.draw(st.sampled_from([(0, 0), (2, 0), (0, 5), (1, 4), (0, 40)]))
    saturation = data.draw(st.none() | st.integers(1, 20)) if sinks or window else None
    exact = {"sinks": sinks, "window": window, "saturation": saturation}
    eps = data.draw(st.sampled_from([1e-6, 0.3]))
    size = data.draw(st.sampled_from([1.0, 3.0]))
    tokens, blocks = data.draw(st.sampled_from([1, 2, 9, 20])), data.draw(st.integers(1, 2))
    inputs = activations(blocks, tokens, seed=data.draw(st.integers(0, 99)), size=size)
    groups = grouping(count)
    heads = data.draw(st.lists(st.integers(0, HEADS - 1), min_size=1, unique=True))
    found = collect(inputs, groups, heads, **exact)
    assert found.groups == count
    factor = torch.randn(len(heads), 2, count + 1, count + 1, dtype=torch.float64).tril()
    losses = evaluate(found, factor, eps)
    everywhere = [torch.arange(tokens)] * blocks
    for row, head in enumerate(heads):
        for start in range(2):
            wanted = direct_loss(
                inputs,
                inputs.k,
                groups,
                factor[row, start],
                head,
                eps=eps,
                at=everywhere,
                **exact,
            )
            assert float(losses[row, start]) == pytest.approx(wanted, rel=RELATIVE, abs=1e-9)


def test_only_the_sampled_positions_count() -> None:
    inputs, groups = activations(2, 30), grouping(2)
    generator = torch.Generator().manual_seed(4)
    at = [sample_positions(30, 7, generator) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            moments,
            "sample_positions",
            lambda tokens, count, generator: sample_positions(tokens, 7, generator),
        )
        found = collect(inputs, groups, [1])
    factor = torch.randn(1, 1, 3, 3, dtype=torch.float64).tril()
    wanted = direct_loss(inputs, inputs.k, groups, factor[0, 0], 1, eps=1e-6, at=at)
    assert float(evaluate(found, factor, 1e-6)) == pytest.approx(wanted, rel=RELATIVE)


@pytest.mark.parametrize(("positions", "budget", "drawn"), [(40, 2**25, 40), (99, 1, 32)])
def test_positions_are_those_of_the_generator(
    positions: int, budget: int, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as asked for, or 32 where the statistics would not fit their budget."""
    monkeypatch.setattr(moments, "BUDGET", budget)
    inputs, groups = activations(2, 60), grouping(3)
    generator = torch.Generator().manual_seed(4)
    at = [sample_positions(60, drawn, generator) for _ in range(2)]
    found = collect(inputs, groups, [2], positions=positions)
    factor = torch.randn(1, 1, 4, 4, dtype=torch.float64).tril()
    wanted = direct_loss(inputs, inputs.k, groups, factor[0, 0], 2, eps=1e-6, at=at)
    assert float(evaluate(found, factor, 1e-6)) == pytest.approx(wanted, rel=RELATIVE)


def test_the_kernel_sees_its_own_keys_and_the_target_the_models() -> None:
    inputs, groups = activations(2, 14), grouping(2)
    centred = inputs.k - inputs.k.mean((0, 2), keepdim=True)
    found = collect(inputs, groups, [0, 3], kernel_k=centred)
    factor = torch.randn(2, 1, 3, 3, dtype=torch.float64).tril()
    for row, head in enumerate((0, 3)):
        wanted = direct_loss(
            inputs,
            centred,
            groups,
            factor[row, 0],
            head,
            eps=1e-6,
            at=[torch.arange(14)] * 2,
        )
        losses = evaluate(found, factor, 1e-6)
        assert float(losses[row, 0]) == pytest.approx(wanted, rel=RELATIVE)


def test_logits_of_80_beside_the_kernel_stay_finite_and_right() -> None:
    inputs, groups = activations(1, 20, size=3.0), grouping(2)
    logits = inputs.q[:, 0] @ inputs.k[:, 0].transpose(1, 2) * SCALE
    inputs = replace(inputs, q=inputs.q * (80 / float(logits.abs().max())))
    found = collect(inputs, groups, [0], sinks=1, window=4)
    assert bool(found.gram.isfinite().all() and found.mass.isfinite().all())
    factor = torch.randn(1, 1, 3, 3, dtype=torch.float64).tril()
    wanted = direct_loss(
        inputs,
        inputs.k,
        groups,
        factor[0, 0],
        0,
        eps=1e-6,
        sinks=1,
        window=4,
        at=[torch.arange(20)],
    )
    assert float(evaluate(found, factor, 1e-6)) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_pooled_moments_are_those_of_a_single_group(count: int, sinks: int, window: int) -> None:
    """Equal up to the common scale of each position, which cancels in the output."""
    inputs = activations(2, 20)
    heads = [0, 1, 3]
    pooled = collect(inputs, grouping(count), heads, sinks=sinks, window=window).pooled()
    single = collect(
        inputs, torch.zeros(HEADS, 6, dtype=torch.long), heads, sinks=sinks, window=window
    )
    assert pooled.groups == single.groups == 1
    factor = torch.randn(len(heads), 5, 2, 2, dtype=torch.float64).tril()
    for at in range(pooled.mass.shape[1]):
        losses = [
            evaluate(Moments(m.gram[:, [at]], m.mass[:, [at]], 1), factor, 1e-6)
            for m in (pooled, single)
        ]
        torch.testing.assert_close(*losses, rtol=RELATIVE, atol=1e-9)
