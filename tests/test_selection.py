"""Layers and KV heads that keep their softmax are those whose conversion costs most."""

from statistics import mean

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import linearize
import tiny
from linearize.converted import converted_layers, original_attention
from linearize.divergence import STRIDE
from linearize.errors import PlanError


def divergence(model: PreTrainedModel, ids: Tensor, first: int = 0) -> float:
    """``KL(original ‖ converted)`` as the definition says, at the positions that are compared."""
    found = tiny.logits(model, ids[None])[0, first::STRIDE].log_softmax(-1)
    with original_attention(model):
        wanted = tiny.logits(model, ids[None])[0, first::STRIDE].log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def on_text(model: PreTrainedModel) -> float:
    return mean(divergence(model, block) for block in measured_on())


def on_repeated(model: PreTrainedModel) -> float:
    """Of the second reading of each block's second half."""
    return mean(divergence(model, block[32:].repeat(2), 32) for block in measured_on())


def outputs_of_layer_1(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Attention output before the output projection, ``[B, N, Hq, d]``."""
    seen = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].clone())
    )
    tiny.logits(model, ids)
    hook.remove()
    return seen[0].unflatten(-1, (tiny.HEADS, tiny.HEAD_DIM))


def measured_on() -> list[Tensor]:
    """The validation blocks of `tiny.plan`."""
    return list(tiny.text().split(64)[5:7])


@pytest.mark.parametrize("unit", ["layers", "heads"])
def test_the_first_kept_one_helps_more_than_any_other(unit: str) -> None:
    """Against conversions that leave out each layer by name, or the account of single heads."""
    result = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(keep=1, **{unit: "auto"}))
    selection = result.report.selection
    assert selection is not None
    kept = [one for one in selection.candidates if one.kept]
    assert len(kept) == 1
    assert kept[0].gain == max(one.gain for one in selection.candidates)
    _, text, recall = selection.curve[0]
    for one in selection.candidates:
        gain = ((text - one.divergence) / text + (recall - one.recall) / recall) / 2
        assert one.gain == pytest.approx(gain, abs=1e-6)
    found = on_text(result.loaded.model), on_repeated(result.loaded.model)
    assert found == pytest.approx((kept[0].divergence, kept[0].recall), rel=1e-4)
    assert selection.curve[-1] == (1, *(pytest.approx(value, rel=1e-4) for value in found))
    assert (selection.tokens, selection.repeated) == (2 * 64, 2 * 32)
    if unit == "layers":
        for layer in range(tiny.LAYERS):
            rest = [index for index in range(tiny.LAYERS) if index != layer]
            other = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(layers=rest))
            listed = next(one for one in selection.candidates if one.layer == layer)
            assert on_text(other.loaded.model) == pytest.approx(listed.divergence, rel=1e-4)
            assert on_repeated(other.loaded.model) == pytest.approx(listed.recall, rel=1e-4)


def test_later_choices_are_measured_beside_earlier_ones() -> None:
    result = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(heads="auto", keep=3))
    selection = result.report.selection
    assert selection is not None
    assert [count for count, *_ in selection.curve] == [0, 1, 2, 3]
    steps = [one for one in selection.candidates if one.kept]
    _, *start = selection.curve[0]
    for (_, *before), (_, *after), one in zip(
        selection.curve, selection.curve[1:], steps, strict=False
    ):
        assert (one.divergence, one.recall) == pytest.approx(after, rel=1e-6)
        shares = [(a - b) / c for a, b, c in zip(before, after, start, strict=True)]
        assert one.gain == pytest.approx(mean(shares), abs=1e-6)


def test_a_kept_head_gives_the_softmax_output_and_the_others_what_they_gave() -> None:
    plan = tiny.plan(layers="1", heads="auto", keep=1)
    partly = linearize.convert(tiny.loaded(), tiny.text(), plan)
    whole = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(layers="1"))
    (kept,) = partly.report.layers[0].kept
    ids = tiny.prompt(2, 30)
    outputs = [outputs_of_layer_1(one.loaded.model, ids) for one in (partly, whole)]
    with original_attention(whole.loaded.model):
        softmax = outputs_of_layer_1(whole.loaded.model, ids)
    ratio = tiny.HEADS // tiny.KV_HEADS
    for head in range(tiny.HEADS):
        wanted = softmax if head // ratio == kept else outputs[1]
        torch.testing.assert_close(outputs[0][:, :, head], wanted[:, :, head], rtol=1e-4, atol=1e-5)
        if head // ratio == kept:
            assert (outputs[1] - softmax)[:, :, head].abs().max() > 0.01


def test_a_divergence_is_met_with_little_kept() -> None:
    nothing = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan())
    start = on_text(nothing.loaded.model)
    plan = tiny.plan(heads="auto", max_kl=0.7 * start)
    result = linearize.convert(tiny.loaded(), tiny.text(), plan)
    assert on_text(result.loaded.model) <= 0.7 * start
    selection = result.report.selection
    assert selection is not None
    assert selection.curve[-2][1] > 0.7 * start
    with pytest.raises(PlanError, match="max_kl="):
        linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(layers="auto", max_kl=1e-9))


def test_a_divergence_that_is_met_at_once_keeps_nothing() -> None:
    result = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(heads="auto", max_kl=1e9))
    selection = result.report.selection
    assert selection is not None
    assert len(selection.candidates) == tiny.LAYERS * tiny.KV_HEADS
    assert not any(one.kept for one in selection.candidates)
    assert len(converted_layers(result.loaded.model)) == tiny.LAYERS


def test_a_memory_budget_is_kept() -> None:
    context = 3000
    full = 4 * 2 * tiny.KV_HEADS * tiny.HEAD_DIM * context  # of one softmax layer
    whole = linearize.convert(tiny.loaded(), tiny.text(), tiny.plan())
    states = sum(layer.state_bytes for layer in whole.report.layers)
    for budget in (states, states + full // 2, states + 3 * full // 2):
        plan = tiny.plan(heads="auto", memory_budget=budget, context=context)
        result = linearize.convert(tiny.loaded(), tiny.text(), plan)
        selection = result.report.selection
        assert selection is not None
        assert selection.decode_bytes <= budget < selection.decode_bytes + full // 2
        model = result.loaded.model
        assert sum(x.state_bytes for x in converted_layers(model).values()) <= states
    with pytest.raises(PlanError, match=f"at least {states:,}"):
        plan = tiny.plan(heads="auto", memory_budget=states - 1, context=context)
        linearize.convert(tiny.loaded(), tiny.text(), plan)
    with pytest.raises(PlanError, match="without any conversion"):
        plan = tiny.plan(layers="auto", memory_budget=10 * full, context=context)
        linearize.convert(tiny.loaded(), tiny.text(), plan)


def test_keeping_everything_is_refused() -> None:
    with pytest.raises(PlanError, match="Keep at most 2"):
        linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(layers="auto", keep=3))
    with pytest.raises(PlanError, match="Keep at most 5"):
        linearize.convert(tiny.loaded(), tiny.text(), tiny.plan(heads="auto", keep=6))


def test_the_model_is_as_before_when_nothing_comes_of_it() -> None:
    base = tiny.loaded()
    ids = tiny.prompt(1, 20)
    before = tiny.logits(base.model, ids)
    with pytest.raises(PlanError):
        linearize.convert(base, tiny.text(), tiny.plan(layers="auto", max_kl=1e-9))
    assert not converted_layers(base.model)
    assert torch.equal(tiny.logits(base.model, ids), before)
