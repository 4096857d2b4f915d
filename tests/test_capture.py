"""Captured activations are those of an ordinary forward pass, in bounded memory, without leftovers."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tiny
from linearize.capture import capture
from linearize.errors import ModelError
from linearize.fitting import softmax_outputs
from linearize.interface import recording, use_interface
from linearize.models import attention_layers


def rotated_by_hand(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layer 0's queries, keys and values from its weights: projection, heads, RoPE."""
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(ids[None]))
    q, k, v = (
        getattr(layer.self_attn, name)(hidden).view(1, len(ids), -1, 8).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    angle = torch.arange(len(ids))[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = (torch.cat([f(angle)] * 2, 1) for f in (torch.cos, torch.sin))

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    return rotate(q), rotate(k), v


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
def test_equals_an_ordinary_forward_pass(name: str) -> None:
    model = tiny.model(name)
    blocks = list(tiny.prompt(3, 10))
    wanted = [tiny.recorded(model, block) for block in blocks]
    for layer in capture(model, blocks, [0, 1, 2]):
        found = layer.activations(0, 3)
        for number in range(3):
            for x, y in zip((found.q, found.k, found.v), wanted[number][layer.index], strict=True):
                assert torch.equal(x[number], y[0]), (layer.index, number)


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
def test_the_teacher_is_the_layer_itself(name: str) -> None:
    """Softmax over the captured activations is what the layer hands to its output projection."""
    model, ids = tiny.model(name), tiny.text(11)
    outputs = {"llama": "o_proj", "gpt2": "c_proj", "gpt_neox": "dense", "phi": "dense"}
    layers = attention_layers(model)
    projected: list[Tensor] = []
    for layer in layers:
        output = getattr(layer.module, outputs.get(name, "o_proj"))
        output.register_forward_pre_hook(lambda module, args: projected.append(args[0].clone()))
    tiny.logits(model, ids[None])
    for layer, wanted in zip(layers, list(projected), strict=True):
        stream = capture(model, [ids], [layer.index])
        teacher = softmax_outputs(next(stream).activations(0, 1), layer.shape.scale, 0)
        stream.close()
        torch.testing.assert_close(
            teacher.transpose(0, 1).flatten(1), wanted[0].reshape(11, -1), rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
def test_queries_and_keys_are_taken_after_rotation() -> None:
    model, ids = tiny.model(), tiny.text(9)
    stream = capture(model, [ids], [0])
    found = next(stream).activations(0, 1)
    for x, y in zip((found.q, found.k, found.v), rotated_by_hand(model, ids), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_only_the_chosen_layers_arrive_in_order_and_blocks_may_differ_in_length() -> None:
    model = tiny.model()
    blocks = [tiny.text(n, seed=n) for n in (4, 4, 9, 1)]
    wanted = [tiny.recorded(model, block) for block in blocks]
    indices = []
    for layer in capture(model, blocks, [2, 0]):
        indices.append(layer.index)
        for start, stop in ((0, 2), (2, 3), (3, 4)):
            found = layer.activations(start, stop)
            for number in range(start, stop):
                assert torch.equal(found.q[number - start], wanted[number][layer.index][0][0])
                assert torch.equal(found.v[number - start], wanted[number][layer.index][2][0])
    assert indices == [0, 2]


def test_half_precision_arrives_as_fp32() -> None:
    model = tiny.model().to(torch.bfloat16)
    ids = tiny.text(6)
    wanted = tiny.recorded(model, ids)
    for layer in capture(model, [ids], [1]):
        found = layer.activations(0, 1)
        assert found.q.dtype == torch.float32
        assert torch.equal(found.q, wanted[1][0].float())


def test_replacing_an_output_changes_the_layers_behind_it() -> None:
    """Block 0 goes on with zeros after layer 0, block 1 with what it had."""
    model = tiny.model()
    blocks = list(tiny.prompt(2, 8))
    plain = [tiny.recorded(model, block) for block in blocks]
    zero = torch.zeros(1, 6, 8, 8)

    def no_attention(module: nn.Module, q: Tensor, *rest: Any) -> Tensor | None:
        return zero if module.layer_idx == 0 else None

    seen = {}
    with use_interface(model), recording(no_attention):
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda module, args: seen.setdefault("hidden", args[0].clone())
        )
        tiny.logits(model, blocks[0][None])
        hook.remove()
    with torch.no_grad():
        layer = model.model.layers[1]
        projected = layer.self_attn.v_proj(layer.input_layernorm(seen["hidden"]))
        wanted_v = projected.view(1, 8, 2, 8).transpose(1, 2)

    for arrived in capture(model, blocks, [0, 1, 2]):
        found = arrived.activations(0, 2)
        if arrived.index == 0:
            arrived.replace(lambda q, k, v: torch.zeros_like(q))
        else:
            for block in range(2):
                assert (found.v[block] - plain[block][arrived.index][2][0]).abs().max() > 0.01
        if arrived.index == 1:
            torch.testing.assert_close(found.v[:1], wanted_v, rtol=1e-5, atol=1e-6)


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_leaving_early_leaves_nothing_behind(stop_after: int) -> None:
    model = tiny.model().train()
    before, implementation = threads(), model.config._attn_implementation
    stream = capture(model, list(tiny.prompt(3, 6)), [0, 1, 2])
    for _ in range(stop_after):
        next(stream)
    if stop_after:
        assert len(threads() - before) == 3
    stream.close()
    assert threads() == before
    assert model.config._attn_implementation == implementation
    assert model.training


def test_the_end_leaves_nothing_behind() -> None:
    model = tiny.model()
    before = threads()
    assert len(list(capture(model, list(tiny.prompt(2, 6)), [0, 2]))) == 2
    assert threads() == before


def test_an_error_of_the_consumer_leaves_nothing_behind() -> None:
    model, before = tiny.model(), threads()
    with pytest.raises(ZeroDivisionError):
        for _ in capture(model, list(tiny.prompt(2, 6)), [0, 1]):
            1 / 0  # noqa: B018
    gc.collect()
    assert threads() == before
    assert model.config._attn_implementation != "linearize"


def test_only_one_layers_activations_are_alive() -> None:
    model = tiny.model()
    alive: dict[int, list[weakref.ref[Tensor]]] = {}

    def keep(layer: Any) -> None:
        alive[layer.index] = [weakref.ref(x) for p in layer._passes for x in p.arrived]

    for layer in capture(model, list(tiny.prompt(2, 6)), [0, 1, 2]):
        keep(layer)
        gc.collect()
        for index, references in alive.items():
            held = sum(reference() is not None for reference in references)
            assert held == (6 if index == layer.index else 0), (layer.index, index)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_activations_that_are_not_finite_are_named(value: float, projection: str) -> None:
    model, before = tiny.model(), threads()
    getattr(model.model.layers[1].self_attn, projection).weight.data[0, 0] = value
    layers = []
    with pytest.raises(ModelError) as raised:
        for layer in capture(model, list(tiny.prompt(2, 6)), [0, 1, 2]):
            layers.append(layer.index)
    assert layers == [0]
    assert "layer 1" in str(raised.value)
    assert "block 0" in str(raised.value)
    assert threads() == before
    assert model.config._attn_implementation != "linearize"


def test_an_error_inside_the_model_reaches_the_consumer() -> None:
    model, before = tiny.model(), threads()
    with pytest.raises(ModelError) as raised:  # a token id outside the vocabulary
        list(capture(model, [torch.tensor([1, 2, tiny.VOCAB])], [0]))
    assert isinstance(raised.value.__cause__, IndexError)
    assert threads() == before


def test_other_threads_attention_is_not_captured() -> None:
    """Another thread may use the same model meanwhile: it neither stops nor is recorded."""
    model, ids = tiny.model(), tiny.prompt(1, 7)
    wanted = tiny.logits(model, ids)
    results: list[Tensor] = []
    for _ in capture(model, [tiny.text(6)], [0, 1]):
        other = threading.Thread(target=lambda: results.append(tiny.logits(model, ids)))
        other.start()
        other.join(timeout=60)
        assert not other.is_alive()
    assert len(results) == 2
    for result in results:
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
