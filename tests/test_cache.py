"""The constant-size cache: any way of feeding tokens through it gives what one pass gives."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import tiny
from linearize.cache import LinearCacheLayer, cache_bytes
from linearize.converted import converted_layers, original_attention
from linearize.errors import ModelError
from tolerances import assert_close

each_variant = pytest.mark.parametrize("variant", tiny.variants())
each_variant_and_mixed = pytest.mark.parametrize("variant", [*tiny.variants(), *tiny.MIXED])
each_form = pytest.mark.parametrize("form", tiny.FORMS)
LINEAR = [name for name in tiny.variants() if name != "softmax"]


@each_variant_and_mixed
@each_form
def test_prefill_and_one_step_equal_the_whole(variant: str, form: str) -> None:
    model, ids = tiny.shared(variant, form).model, tiny.prompt(2, 11)
    logits, _ = tiny.decode(model, ids, [10, 1])
    assert_close(logits, tiny.logits(model, ids), torch.float32, "output")


@each_variant_and_mixed
@settings(max_examples=12)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_split_equals_the_whole(variant: str, sizes: list[int]) -> None:
    """Also several turns of a conversation: the cache of one is where the next begins."""
    model, ids = tiny.shared(variant).model, tiny.prompt(2, sum(sizes))
    logits, cache = tiny.decode(model, ids, sizes)
    assert_close(logits, tiny.logits(model, ids), torch.float32, "output")
    assert [layer.get_seq_length() for layer in cache.layers] == [sum(sizes)] * 3


@each_variant
def test_long_prefill_then_many_steps(variant: str) -> None:
    model, ids = tiny.shared(variant).model, tiny.prompt(1, 150)
    logits, _ = tiny.decode(model, ids, [130, *[1] * 20])
    assert_close(logits, tiny.logits(model, ids), torch.float32, "output")


@each_variant_and_mixed
@each_form
def test_a_left_padded_batch_decodes_like_its_rows(variant: str, form: str) -> None:
    """Prompts of 5 and 12 tokens, then three more each, one at a time."""
    model = tiny.shared(variant, form).model
    rows = [tiny.text(8, seed=4), tiny.text(15, seed=5)]
    alone = [tiny.logits(model, row[None])[0] for row in rows]
    inputs = tiny.left_padded(rows)
    cache, start, parts = None, 0, []
    with torch.no_grad():
        for stop in (12, 13, 14, 15):
            output = model(
                input_ids=inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                position_ids=inputs["position_ids"][:, start:stop],
                cache=cache,
                use_cache=True,
            )
            cache, start = output.cache, stop
            parts.append(output.logits)
    logits = torch.cat(parts, 1)
    for row, wanted in enumerate(alone):
        assert_close(logits[row, 15 - len(wanted) :], wanted, torch.float32, "output")


def test_both_names_of_the_cache_argument_work() -> None:
    model, ids = tiny.shared().model, tiny.prompt(1, 6)
    wanted = tiny.logits(model, ids)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :5], use_cache=True).cache
        old = copy.deepcopy(cache)
        new_name = model(input_ids=ids[:, 5:], cache=cache).logits
        with pytest.warns(FutureWarning, match="past_key_values"):
            old_name = model(input_ids=ids[:, 5:], past_key_values=old).logits
    for logits in (new_name, old_name):
        assert_close(logits, wanted[:, 5:], torch.float32, "output")


@pytest.mark.parametrize("given_cache", [False, True])
def test_an_empty_cache_may_be_handed_in(given_cache: bool) -> None:
    model, ids = tiny.shared().model, tiny.prompt(1, 9)
    cache = DynamicCache(config=model.config) if given_cache else DynamicCache()
    logits, after = tiny.decode(model, ids, [4, 5], cache)
    assert after is cache
    assert all(isinstance(layer, LinearCacheLayer) for layer in cache.layers)
    assert_close(logits, tiny.logits(model, ids), torch.float32, "output")


def positions_seen(model: PreTrainedModel, ids: Tensor, sizes: list[int]) -> list[list[int]]:
    """Sequence length every layer's cache reports after every call, and the mask's width."""
    seen, cache = [], None
    for part in ids.split(sizes, 1):
        _, cache = tiny.decode(model, part, [part.shape[1]], cache)
        seen.append(
            [cache.get_seq_length()]
            + [cache.get_seq_length(i) for i in range(3)]
            + [cache.get_mask_sizes(1, i)[0] - 1 for i in range(3)]
        )
    return seen


@pytest.mark.parametrize("layers", ["0", "1", "0,2", "all"])
def test_positions_agree_whichever_layers_are_linear(layers: str) -> None:
    """Also layer 0, whose length the model takes for its positions."""
    model, ids = tiny.converted("oal", layers=layers).model, tiny.prompt(1, 14)
    sizes = [10, 1, 1, 2]
    assert positions_seen(model, ids, sizes) == [[n] * 7 for n in (10, 11, 12, 14)]
    rotated: list[Tensor] = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: rotated.append(kwargs["position_embeddings"][0]),
        with_kwargs=True,
    )
    logits, _ = tiny.decode(model, ids, sizes)
    split = torch.cat(rotated, 1)
    rotated.clear()
    wanted = tiny.logits(model, ids)
    hook.remove()
    assert torch.equal(split, rotated[0])
    assert_close(logits, wanted, torch.float32, "output")


def numbers(layer: LinearCacheLayer) -> dict[str, int]:
    return {
        name: getattr(layer.state, name).numel()
        for name in ("sums", "recent_keys", "recent_values", "sink_keys", "real")
    }


@pytest.mark.parametrize("variant", LINEAR)
def test_its_size_does_not_depend_on_the_length(variant: str) -> None:
    model = tiny.shared(variant).model
    sizes = []
    for tokens in (10, 200):
        _, cache = tiny.decode(model, tiny.prompt(1, tokens), [tokens])
        sizes.append([numbers(layer) for layer in cache.layers])
        bytes_held = [layer.state.nbytes for layer in cache.layers]
        _, cache = tiny.decode(model, tiny.prompt(1, 5), [1] * 5, cache)
        assert [layer.state.nbytes for layer in cache.layers] == bytes_held
    assert sizes[0] == sizes[1]
    for index, linear in converted_layers(model).items():
        state = cache.layers[index].state
        small = sum(
            x.nbytes for x in (state.real, state.recent_mask, state.log_scale) if x is not None
        )
        assert state.nbytes - small == linear.state_bytes


@pytest.mark.parametrize("variant", LINEAR)
def test_nothing_else_of_the_prompt_stays_alive(variant: str) -> None:
    """The state may not be a view into the keys and values of the prompt (one token is let pass)."""
    model = tiny.shared(variant).model
    _, cache = tiny.decode(model, tiny.prompt(1, 500), [500])
    for _ in range(2):
        for layer in cache.layers:
            held = {
                x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in vars(layer.state).values()
                if isinstance(x, Tensor)
            }
            assert sum(held.values()) <= layer.state.nbytes + 2 * 2 * 8 * 4 + 1
        _, cache = tiny.decode(model, tiny.prompt(1, 1), [1], cache)


def test_the_cache_layers_beside_it_hold_keys_and_values() -> None:
    model = tiny.converted("oal", layers="1").model
    _, cache = tiny.decode(model, tiny.prompt(1, 7), [7])
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["GrowingLayer", "LinearCacheLayer", "GrowingLayer"]
    assert cache.layers[0].keys.shape == (1, 2, 7, 8)


@each_variant_and_mixed
def test_sequences_can_be_reordered_repeated_and_selected(variant: str) -> None:
    """What generation does to a cache, against the same rows decoded on their own."""
    model, ids = tiny.shared(variant).model, tiny.prompt(3, 9)
    changes: list[tuple[str, Any, list[int]]] = [
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([1]), [1]),
    ]
    for method, argument, rows in changes:
        _, cache = tiny.decode(model, ids[:, :7], [7])
        getattr(cache, method)(argument)
        logits, _ = tiny.decode(model, ids[rows, 7:], [1, 1], cache)
        wanted = tiny.logits(model, ids)[rows, 7:]
        assert_close(logits, wanted, torch.float32, "output", method)


@each_variant_and_mixed
def test_a_copy_of_a_cache_is_a_branch(variant: str) -> None:
    """One prompt, two continuations from copies of its cache: neither sees the other."""
    model, ids = tiny.shared(variant).model, tiny.prompt(1, 8)
    _, cache = tiny.decode(model, ids, [8])
    for seed in (10, 11):
        more = tiny.text(3, seed=seed)[None]
        logits, _ = tiny.decode(model, more, [1, 2], copy.deepcopy(cache))
        wanted = tiny.logits(model, torch.cat([ids, more], 1))[:, 8:]
        assert_close(logits, wanted, torch.float32, "output")


@each_variant
def test_reset_forgets_everything(variant: str) -> None:
    model, ids = tiny.shared(variant).model, tiny.prompt(1, 8)
    _, cache = tiny.decode(model, tiny.prompt(1, 5, seed=9), [5])
    for layer in cache.layers:
        if isinstance(layer, LinearCacheLayer):
            layer.reset()
    assert [layer.get_seq_length() for layer in cache.layers] == [0] * 3
    logits, _ = tiny.decode(model, ids, [6, 2], cache)
    assert_close(logits, tiny.logits(model, ids), torch.float32, "output")


def test_tokens_cannot_be_taken_back() -> None:
    model = tiny.shared().model
    _, cache = tiny.decode(model, tiny.prompt(1, 8), [8])
    with pytest.raises(ModelError, match="2 tokens"):
        cache.layers[0].crop(-2)
    logits, _ = tiny.decode(model, tiny.prompt(1, 1, seed=7), [1], cache)
    assert bool(logits.isfinite().all())


def test_a_cache_that_softmax_filled_is_refused() -> None:
    model, ids = tiny.converted("oal").model, tiny.prompt(1, 6)
    for filler in (tiny.model(), model):
        with original_attention(model):
            _, cache = tiny.decode(filler, ids, [6])
        with pytest.raises(ModelError, match="layer 0 from a DynamicLayer of 6 tokens"):
            tiny.decode(model, ids, [6], cache)
    # and the model is none the worse for it
    logits, _ = tiny.decode(model, ids, [5, 1])
    assert_close(logits, tiny.logits(model, ids), torch.float32, "output")


def test_a_cache_that_a_converted_model_filled_is_refused_by_softmax() -> None:
    """Its layers hold no keys: attention over the new tokens alone would be silently wrong."""
    model, ids = tiny.converted("oal").model, tiny.prompt(1, 6)
    _, cache = tiny.decode(model, ids, [6])
    with original_attention(model), pytest.raises(ModelError):
        tiny.decode(model, ids[:, :1], [1], cache)


def test_static_caches_are_refused() -> None:
    model, ids = tiny.shared().model, tiny.prompt(1, 6)
    with pytest.raises(ModelError, match="StaticLayer"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static")


def test_a_failed_call_does_not_leak_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.converted("oal").model, tiny.prompt(1, 8)
    _, cache = tiny.decode(model, ids[:, :4], [4])

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("interrupted")

    attention: nn.Module = model.model.layers[1].self_attn
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="interrupted"):
        patch.setattr(attention.q_proj, "forward", broken)
        tiny.decode(model, ids[:, 4:], [4], cache)
    fresh, _ = tiny.decode(model, ids, [8])
    assert torch.equal(fresh, tiny.decode(model, ids, [8])[0])
    assert_close(fresh, tiny.logits(model, ids), torch.float32, "output")


def test_training_through_a_cache_keeps_the_graph() -> None:
    """Gradients of the last tokens reach what the prompt put into the state."""
    model, ids = tiny.converted("oal+window").model, tiny.prompt(1, 12)
    embeds = model.get_input_embeddings()(ids).detach()

    def gradient(sizes: list[int]) -> Tensor:
        leaf = embeds.clone().requires_grad_()
        cache, last = None, None
        for part in leaf.split(sizes, 1):
            output = model(inputs_embeds=part, cache=cache, use_cache=True)
            cache, last = output.cache, output.logits[:, -1]
        last.square().sum().backward(inputs=[leaf])
        return leaf.grad

    assert_close(gradient([7, 4, 1]), gradient([12]), torch.float32, "gradient")


def test_bytes_count_states_and_the_keys_of_everything_exact() -> None:
    """In a layer with one exact KV head, in a softmax layer, and in a constant state."""
    model = tiny.converted("oal in some heads").model
    sizes = []
    for tokens in (8, 20):
        _, cache = tiny.decode(model, tiny.prompt(3, tokens), [tokens])
        sizes.append(cache_bytes(cache))
    layers = converted_layers(model)
    exact = sum(tiny.KV_HEADS - x.kernel.shape.kv_heads for x in layers.values())
    exact += tiny.KV_HEADS * (tiny.LAYERS - len(layers))
    assert exact == 2
    assert sizes[1] - sizes[0] == 3 * 12 * exact * 2 * tiny.HEAD_DIM * 4
    assert cache_bytes(None) == 0
