"""Conversion: what it promises of the converted model, fresh and after saving and loading."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import linearize
import tiny
from linearize import Loaded
from linearize.attention import LinearAttention
from linearize.converted import attach, converted_layers, original_attention
from linearize.errors import LinearizeError, ModelError, PlanError, TextError
from linearize.fitting import Activations
from linearize.interface import use_interface
from tolerances import assert_close

each_variant = pytest.mark.parametrize("variant", tiny.variants())
each_variant_and_mixed = pytest.mark.parametrize("variant", [*tiny.variants(), *tiny.MIXED])
each_form = pytest.mark.parametrize("form", tiny.FORMS)

PADDED = [tiny.text(5, seed=4), tiny.text(12, seed=5)]


@each_variant_and_mixed
@each_form
def test_two_evaluations_are_bitwise_equal(variant: str, form: str) -> None:
    model = tiny.shared(variant, form).model
    ids = tiny.prompt(2, 17)
    first = tiny.logits(model, ids)
    torch.manual_seed(12345)
    assert torch.equal(tiny.logits(model, ids), first)


@each_variant_and_mixed
@each_form
def test_left_padding_changes_nothing(variant: str, form: str) -> None:
    """Prompts of 5 and 12 tokens in one batch give the logits of each alone."""
    model = tiny.shared(variant, form).model
    padded = tiny.logits(model, **_inputs(PADDED))
    for row, ids in enumerate(PADDED):
        alone = tiny.logits(model, ids[None])
        assert_close(padded[row : row + 1, 12 - len(ids) :], alone, torch.float32, "output")


@each_variant_and_mixed
def test_right_padding_changes_nothing(variant: str) -> None:
    model = tiny.shared(variant).model
    ids = torch.zeros(2, 12, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(PADDED):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    padded = tiny.logits(model, ids, attention_mask=mask)
    for row, tokens in enumerate(PADDED):
        alone = tiny.logits(model, tokens[None])
        assert_close(padded[row : row + 1, : len(tokens)], alone, torch.float32, "output")


@each_variant_and_mixed
@each_form
def test_padding_takes_no_part_in_values_or_gradients(variant: str, form: str) -> None:
    model = tiny.shared(variant, form).model
    inputs = _inputs(PADDED)
    embeds = model.get_input_embeddings()(inputs.pop("ids")).detach()
    embeds[0, :7] = 37.0  # whatever stands there
    embeds.requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False, **inputs).logits
    alone = tiny.logits(model, PADDED[0][None])
    assert_close(logits[:1, 7:].detach(), alone, torch.float32, "output")
    weight = torch.randn(12, tiny.VOCAB)
    (logits[0, 7:] * weight[7:]).sum().backward(inputs=[embeds])
    assert embeds.grad is not None
    assert float(embeds.grad[0, :7].abs().max()) == 0
    assert float(embeds.grad[0, 7:].abs().amin(-1).max()) > 0


def _inputs(rows: list[Tensor]) -> dict[str, Tensor]:
    inputs = tiny.left_padded(rows)
    return {"ids": inputs.pop("input_ids"), **inputs}


@each_variant
@pytest.mark.parametrize("tokens", [1, 2, 8, 15, 17, 67])
def test_every_length_equals_the_quadratic_time_definition(
    variant: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _against_definition(variant, tokens, monkeypatch)


@pytest.mark.parametrize("variant", ["oal", "oal+hybrid"])
@pytest.mark.parametrize("tokens", [128, 129, 1334])
def test_lengths_around_the_chunk_equal_the_definition(
    variant: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _against_definition(variant, tokens, monkeypatch)


def _against_definition(variant: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.shared(variant).model
    ids = tiny.prompt(1, tokens)
    found = tiny.logits(model, ids)
    for linear in converted_layers(model).values():
        monkeypatch.setattr(linear, "forward", partial(linear.forward, backend="pairwise"))
    assert_close(found, tiny.logits(model, ids), torch.float32, "output", f"{tokens} tokens")


@each_variant
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_heads_equal_repeated_ones(variant: str, kv_heads: int) -> None:
    """6 query heads over 6, 2 or 1 KV heads: the same model with the KV heads repeated."""
    settings = tiny.variant_plan(variant)
    grouped = tiny.filled(tiny.loaded(num_key_value_heads=kv_heads), settings).model
    repeated = tiny.model(num_key_value_heads=6)
    weights = {k: v for k, v in grouped.state_dict().items() if "linear_attention" not in k}
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (kv_heads, 8))
            weights[name] = heads.repeat_interleave(6 // kv_heads, dim=0).flatten(0, 1)
    repeated.load_state_dict(weights)
    repeated = tiny.filled(Loaded(repeated, None), settings).model
    for index, linear in converted_layers(repeated).items():
        own = converted_layers(grouped)[index].state_dict()
        if "center" in own:
            own["center"] = own["center"].repeat_interleave(6 // kv_heads, dim=0)
        linear.load_state_dict(_repeated(own, linear.state_dict()))
    ids = tiny.prompt(2, 15)
    assert_close(
        tiny.logits(grouped, ids), tiny.logits(repeated, ids), torch.float32, "output", variant
    )


def _repeated(own: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Numbers kept for each KV head, for as many KV heads as there are query heads."""
    return {
        name: value
        if value.shape == wanted[name].shape
        else value.repeat_interleave(wanted[name].shape[0] // value.shape[0], dim=0)
        for name, value in own.items()
    }


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_kernels_and_state_in_full(variant: str, dtype: torch.dtype) -> None:
    loaded = tiny.converted(variant)
    stored = tiny.kernel_tensors(loaded.model)
    model = loaded.model.to(dtype)
    assert model.lm_head.weight.dtype == dtype
    for name, tensor in tiny.kernel_tensors(model).items():
        assert torch.equal(tensor, stored[name]), name
    output = model(input_ids=tiny.prompt(1, 300), use_cache=True)
    assert output.logits.dtype == dtype
    assert bool(output.logits.isfinite().all())
    for layer in output.cache.layers:
        if layer.state is None or variant == "softmax":
            continue
        assert layer.state.sums.dtype in (torch.float32, torch.float64)
        assert bool(layer.state.sums.isfinite().all())
    more, _ = tiny.decode(model, tiny.prompt(1, 3, seed=8), [1, 2], output.cache)
    assert bool(more.isfinite().all())


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("oal", torch.bfloat16), *((v, torch.float16) for v in tiny.variants() if v != "softmax")],
)
def test_8192_tokens_in_half_precision_are_finite(variant: str, dtype: torch.dtype) -> None:
    model = tiny.converted(variant).model.to(dtype)
    with torch.no_grad():
        output = model(input_ids=tiny.prompt(1, 8192), use_cache=True, logits_to_keep=64)
    assert output.logits.dtype == dtype
    assert bool(output.logits.isfinite().all())
    for layer in output.cache.layers:
        assert layer.state.sums.dtype in (torch.float32, torch.float64)
        assert bool(layer.state.sums.isfinite().all())


def test_half_precision_stays_near_full() -> None:
    full = tiny.converted("oal").model
    ids = tiny.prompt(2, 40)
    wanted = tiny.logits(full, ids)
    half = tiny.logits(full.to(torch.bfloat16), ids).float()
    assert float((half - wanted).abs().mean()) < 0.05 * float(wanted.abs().mean())


def mask_of(tokens: int, change: Callable[[Tensor], None]) -> Tensor:
    """A causal 4-D mask, changed."""
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    change(mask)
    return mask


def _hole(mask: Tensor) -> None:
    mask[0, 0, 7, 3] = False


def _look_ahead(mask: Tensor) -> None:
    mask[0, 0, 2, 4] = True


def _band(mask: Tensor) -> None:
    mask &= ~torch.ones_like(mask).tril(-4)


def _two_documents(mask: Tensor) -> None:
    mask[:, :, 5:, :5] = False


@pytest.mark.parametrize("form", tiny.FORMS)
@pytest.mark.parametrize("change", [_hole, _look_ahead, _band, _two_documents])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_a_linear_layer_cannot_honour_raise(
    form: str, change: Callable[[Tensor], None], additive: bool
) -> None:
    model = tiny.shared("oal", form).model
    mask = mask_of(9, change)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with pytest.raises(ModelError, match=r"mask of shape \(1, 1, 9, 9\)"):
        tiny.logits(model, tiny.prompt(1, 9), attention_mask=mask)


def test_a_mask_with_weights_raises() -> None:
    """An additive bias on visible pairs (ALiBi, position biases) is no padding."""
    bias = torch.zeros(1, 1, 9, 9).masked_fill(
        ~torch.ones(9, 9, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
    )
    bias[0, 0, 5, 2] = -0.5
    with pytest.raises(ModelError, match="mask"):
        tiny.logits(tiny.shared().model, tiny.prompt(1, 9), attention_mask=bias)


@pytest.mark.parametrize("additive", [False, True])
def test_a_plain_causal_4d_mask_is_honoured(additive: bool) -> None:
    model, ids = tiny.shared().model, tiny.prompt(1, 9)
    mask = mask_of(9, lambda mask: None)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert_close(
        tiny.logits(model, ids, attention_mask=mask),
        tiny.logits(model, ids),
        torch.float32,
        "output",
    )


def test_holes_in_a_padding_mask_are_honoured() -> None:
    """Tokens masked in the middle, as a 2-D mask may have it: nobody sees them."""
    ids, mask = tiny.prompt(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 4:6] = mask[1, 7] = 0
    exact = tiny.filled(tiny.loaded(), tiny.plan(window=64)).model
    wanted = tiny.logits(tiny.model(), ids, attention_mask=mask)
    real = mask.bool()
    found = tiny.logits(exact, ids, attention_mask=mask)
    assert_close(found[real], wanted[real], torch.float32, "output")
    other = ids.clone()
    other[~real] = 5
    linear = tiny.shared().model
    first, second = (tiny.logits(linear, x, attention_mask=mask)[real] for x in (ids, other))
    assert_close(first, second, torch.float32, "output")


@pytest.mark.parametrize("form", tiny.FORMS)
def test_packed_sequences_raise(form: str) -> None:
    """Position ids that start again mean several documents in one row."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with pytest.raises(ModelError, match="unpack"):
        tiny.logits(tiny.shared("oal", form).model, tiny.prompt(1, 7), position_ids=positions)


def test_only_the_chosen_layers_are_converted() -> None:
    model = tiny.converted("oal", layers="1").model
    original = tiny.model()
    assert list(converted_layers(model)) == [1]
    assert converted_layers(original) == {}
    for name, parameter in original.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name  # the backbone is as it was
    ids = tiny.prompt(1, 20)
    seen: dict[str, list[Tensor]] = {"original": [], "converted": []}
    for which, one in (("original", original), ("converted", model)):
        hooks = [
            layer.register_forward_hook(
                lambda module, args, output, which=which: seen[which].append(output)
            )
            for layer in one.model.layers
        ]
        tiny.logits(one, ids)
        for hook in hooks:
            hook.remove()
    differences = [
        float((a - b).abs().max()) for a, b in zip(seen["original"], seen["converted"], strict=True)
    ]
    assert differences[0] == 0
    assert differences[1] > 0.01


def test_softmax_beside_it_is_the_original() -> None:
    model, original, ids = tiny.converted("oal").model, tiny.model(), tiny.prompt(2, 20)
    converted = tiny.logits(model, ids)
    with original_attention(model):
        assert_close(tiny.logits(model, ids), tiny.logits(original, ids), torch.float32, "output")
        settings = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(ids, **settings), original.generate(ids, **settings))
    assert torch.equal(tiny.logits(model, ids), converted)
    with pytest.raises(ZeroDivisionError), original_attention(model):
        1 / 0  # noqa: B018
    assert torch.equal(tiny.logits(model, ids), converted)


@pytest.mark.skipif("softmax" not in linearize.kernels.available(), reason="no such kernel here")
@each_form
def test_the_softmax_kernel_reproduces_the_logits(form: str) -> None:
    model, original = tiny.shared("softmax", form).model, tiny.model()
    for ids in (tiny.prompt(2, 20), tiny.prompt(1, 1)):
        assert_close(tiny.logits(model, ids), tiny.logits(original, ids), torch.float32, "output")


def test_models_converted_and_not_live_side_by_side() -> None:
    ids = tiny.prompt(1, 11)
    untouched, other = tiny.model(), tiny.model("qwen3")
    wanted = tiny.logits(untouched, ids), tiny.logits(other, ids)
    implementations = [m.config._attn_implementation for m in (untouched, other)]
    converted = tiny.converted("oal").model
    windowed = tiny.filled(tiny.loaded("qwen3"), tiny.plan(window=64)).model
    results = [tiny.logits(m, ids) for m in (untouched, converted, other, windowed)]
    assert torch.equal(results[0], wanted[0])
    assert torch.equal(results[2], wanted[1])
    assert_close(results[3], wanted[1], torch.float32, "output")
    assert torch.equal(results[1], tiny.logits(converted, ids))
    assert float((results[1] - wanted[0]).abs().max()) > 0.01
    assert [m.config._attn_implementation for m in (untouched, other)] == implementations


def test_a_copy_is_independent() -> None:
    first = tiny.converted("oal+hybrid").model
    ids = tiny.prompt(1, 11)
    wanted = tiny.logits(first, ids)
    second = copy.deepcopy(first)
    assert torch.equal(tiny.logits(second, ids), wanted)
    for linear in converted_layers(second).values():
        linear.kernel.assign(1 - linear.kernel.groups.clamp(max=1), linear.kernel.factor + 0.3)
    second.config.linearize["base"] = "changed"
    assert float((tiny.logits(second, ids) - wanted).abs().max()) > 0.01
    assert torch.equal(tiny.logits(first, ids), wanted)
    assert first.config.linearize["base"] is None
    tokens = first.generate(ids, max_new_tokens=4, do_sample=False)
    second.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(first.generate(ids, max_new_tokens=4, do_sample=False), tokens)


def _by_assigning(linear: LinearAttention, other: LinearAttention) -> None:
    linear.kernel.assign(other.kernel.groups, other.kernel.factor.detach())


def _by_loading(linear: LinearAttention, other: LinearAttention) -> None:
    linear.load_state_dict(other.state_dict())


def _in_place(linear: LinearAttention, other: LinearAttention) -> None:
    with torch.no_grad():
        linear.kernel.factor.copy_(other.kernel.factor)
        linear.kernel.groups.copy_(other.kernel.groups)


def _through_data(linear: LinearAttention, other: LinearAttention) -> None:
    linear.kernel.factor.data.copy_(other.kernel.factor.data)
    linear.kernel.groups.data.copy_(other.kernel.groups)


@pytest.mark.parametrize("change", [_by_assigning, _by_loading, _in_place, _through_data])
@pytest.mark.parametrize("what", ["groups", "factor", "both"])
def test_new_numbers_count_from_the_next_call_on(
    change: Callable[[LinearAttention, LinearAttention], None], what: str
) -> None:
    """However they come in, and although the old ones were in use: nothing is kept of them."""
    model = tiny.converted("oal", groups=3).model
    other = tiny.filled(tiny.loaded(), tiny.plan(options={"groups": 3}), seed=8).model
    ids = tiny.prompt(1, 11)
    before = tiny.logits(model, ids)
    tiny.decode(model, ids, [10, 1])
    fresh = tiny.loaded()
    linear = {i: copy.deepcopy(one) for i, one in converted_layers(other).items()}
    for index, one in linear.items():
        own = converted_layers(model)[index].kernel
        kept = one.kernel
        if what == "groups":
            kept.assign(kept.groups, own.factor.detach().clone())
        if what == "factor":
            kept.assign(own.groups.clone(), kept.factor.detach())
        change(converted_layers(model)[index], copy.deepcopy(one))
    attach(
        fresh.model,
        linear,
        {i: f"model.layers.{i}.self_attn" for i in linear},
        tiny.plan(),
        None,
    )
    wanted = tiny.logits(fresh.model, ids)
    assert float((wanted - before).abs().max()) > 0.01
    assert torch.equal(tiny.logits(model, ids), wanted)


def test_the_seed_decides_the_conversion() -> None:
    def tensors(seed: int, noise: int) -> dict[str, Tensor]:
        torch.manual_seed(noise)
        plan = tiny.plan(layers="1", seed=seed, alpha=1.0, tau=1.1, gamma=0.5)
        return tiny.kernel_tensors(linearize.convert(tiny.loaded(), tiny.text(), plan).loaded.model)

    first, second, other = tensors(1, 5), tensors(1, 6), tensors(2, 5)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(
        first[name].shape != other[name].shape or not torch.equal(first[name], other[name])
        for name in first
    )


def test_the_report_is_what_happened() -> None:
    loaded, text = tiny.loaded(), tiny.text()
    calls: list[tuple[int, int, str]] = []
    plan = tiny.plan(layers="0,2", window=3, sinks=1)
    conversion = linearize.convert(loaded, text, plan, progress=lambda *call: calls.append(call))
    report = conversion.report
    assert conversion.loaded.model is loaded.model  # in place
    assert conversion.loaded.plan == plan
    assert [call[:2] for call in calls] == [(1, 2), (2, 2)]
    assert [layer.layer for layer in report.layers] == [0, 2]
    assert (report.tokens, report.model_layers) == (800, 3)
    # 12 blocks of 64 fit in 800 tokens: one skipped, four fitted, two validated
    assert (report.fit_blocks, report.validation_blocks) == ([1, 2, 3, 4], [5, 6])
    assert report.plan == plan.model_dump(mode="json")
    assert report.cache_bytes_per_token == 2 * 2 * 8 * 4  # k and v of two KV heads of 8, fp32
    assert report.versions["torch"] == torch.__version__
    for layer in report.layers:
        linear = converted_layers(loaded.model)[layer.layer]
        for head, groups in enumerate(layer.groups):
            assert sorted(r for group in groups for r in group) == list(range(8))
            for number, group in enumerate(groups):
                assert linear.kernel.groups[head, group].tolist() == [number] * len(group)
            means = [sum(layer.profile[head][r] for r in g) / len(g) for g in groups]
            assert means == sorted(means)  # bulk first
        assert layer.trainable == sum((len(g) + 1) * (len(g) + 2) // 2 for g in layer.groups)
        # 2 states of 1 + 8 + 36 features times 9, and 4 exact keys and values of 2 heads of 8
        assert layer.state_bytes == 4 * (2 * 45 * 9 + 4 * 2 * 16)
        assert layer.fit_mse
        assert min(layer.fit_mse) > 0


def test_the_reported_validation_error_is_that_of_the_layer() -> None:
    loaded, text = tiny.loaded(), tiny.text()
    report = linearize.convert(loaded, text, tiny.plan(layers="1")).report
    original = tiny.model()
    blocks = [text[64 * at : 64 * at + 64] for at in report.validation_blocks]
    inputs = [tiny.recorded(original, block)[1] for block in blocks]
    linear = converted_layers(loaded.model)[1]
    mse, energy = torch.zeros(6), torch.zeros(6)
    for q, k, v in inputs:
        output, _ = linear(q, k, v, backend="pairwise")
        target = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        mse += (output - target).square().sum((0, 2, 3))
        energy += target.square().sum((0, 2, 3))
    layer = report.layers[0]
    assert layer.validation_relative == pytest.approx((mse / energy).tolist(), rel=1e-3)
    assert layer.validation_mse == pytest.approx((mse / (2 * 64 * 8)).tolist(), rel=1e-3)


def test_fitting_beats_the_taylor_expansion_it_starts_from() -> None:
    text = tiny.text()
    fitted = linearize.convert(tiny.loaded(), text, tiny.plan(layers="0")).report.layers[0]
    original, shape = tiny.model(), converted_layers(tiny.converted("oal").model)[0].kernel.shape
    taylor = LinearAttention.from_plan(tiny.plan(), shape, 0)
    q, k, v = tiny.recorded(original, text[5 * 64 : 6 * 64])[0]
    assert sum(fitted.validation_mse) < 0.9 * sum(taylor.error(Activations(q, k, v)).mse)


@pytest.mark.parametrize(
    ("plan", "error", "mentions"),
    [
        ({"layers": "1-3"}, PlanError, "0-2"),
        ({"kernel": "nope"}, PlanError, "oal"),
        ({"options": {"nope": 1}}, PlanError, "'nope'"),
        ({"block": 500}, TextError, "200 too few"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_left_alone(
    plan: dict[str, Any], error: type[LinearizeError], mentions: str
) -> None:
    _fails_and_leaves_alone(tiny.loaded(), tiny.text(), tiny.plan(**plan), error, mentions)


def test_texts_without_tokenizer_are_refused() -> None:
    _fails_and_leaves_alone(tiny.loaded(), "some text", tiny.plan(), TextError, "tokenizer")


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    text = tiny.text()
    text[400] = tiny.VOCAB + 3
    _fails_and_leaves_alone(tiny.loaded(), text, tiny.plan(), LinearizeError, "token")


@pytest.mark.parametrize("layer", [0, 2])
def test_nan_in_the_model_is_refused_and_the_model_left_alone(layer: int) -> None:
    loaded = tiny.loaded()
    loaded.model.model.layers[layer].self_attn.v_proj.weight.data[0, 0] = torch.nan
    _fails_and_leaves_alone(loaded, tiny.text(), tiny.plan(), ModelError, f"layer {layer}")


def _fails_and_leaves_alone(
    loaded: Loaded,
    text: Any,
    plan: linearize.Plan,
    error: type[LinearizeError],
    mentions: str,
) -> None:
    before = copy.deepcopy(loaded.model)
    with pytest.raises(error, match=re.escape(mentions)):
        linearize.convert(loaded, text, plan)
    assert converted_layers(loaded.model) == {}
    assert loaded.model.config.to_dict() == before.config.to_dict()
    assert loaded.model.config._attn_implementation == before.config._attn_implementation
    ids = tiny.prompt(1, 6)
    assert torch.equal(
        tiny.logits(loaded.model, ids).nan_to_num(), tiny.logits(before, ids).nan_to_num()
    )


def test_a_second_conversion_is_refused() -> None:
    loaded = tiny.converted("oal", layers="1")
    before = tiny.kernel_tensors(loaded.model)
    with pytest.raises(PlanError, match=r"layers \[1\] are converted already"):
        linearize.convert(loaded, tiny.text(), tiny.plan(layers="0"))
    after = tiny.kernel_tensors(loaded.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_strings_are_tokenized_without_special_tokens() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    results = []
    for tokenizer in (tiny.tokenizer(), tiny.tokenizer(bos=True)):
        loaded = Loaded(tiny.model(), tokenizer)
        report = linearize.convert(loaded, text, tiny.plan(layers="1")).report
        results.append((report.tokens, report.layers[0].validation_mse))
    assert results[0] == results[1]
    assert results[0][0] == len(text)


@each_variant
def test_training_reaches_every_kernel_parameter(variant: str) -> None:
    model = tiny.converted(variant).model.train()
    loss = model(input_ids=tiny.prompt(2, 20), labels=tiny.prompt(2, 20), use_cache=False).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
            if "linear_attention" in name:
                assert float(parameter.grad.abs().max()) > 0, name


@pytest.mark.parametrize("variant", ["oal", "oal+hybrid"])
def test_gradient_checkpointing_gives_the_same_gradients(variant: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny.converted(variant).model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = tiny.prompt(2, 150)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("linear_attention" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, torch.float32, "gradient", name)


def test_the_interface_is_taken_back_after_use() -> None:
    model = tiny.model()
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), use_interface(model):
        assert model.config._attn_implementation == "linearize"
        1 / 0  # noqa: B018
    assert model.config._attn_implementation == before
