"""Keys and values that grow in place are those of transformers' own layer, whatever happens to them."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from linearize.cache import cache_bytes
from linearize.growing import SPARE, GrowingLayer, grow_in_place

CHANGES: dict[str, Any] = {
    "crop": lambda layer: layer.crop(-1),
    "reorder": lambda layer: layer.reorder_cache(torch.arange(layer.keys.shape[0]).flip(0)),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([0])),
    "reset": lambda layer: layer.reset(),
    "offload": lambda layer: layer.offload(),
}


def some(tokens: int, batch: int = 2, seed: int = 0, **kwargs: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 3, tokens, 4, generator=generator).requires_grad_(**kwargs),
        torch.randn(batch, 3, tokens, 5, generator=generator).requires_grad_(**kwargs),
    )


def same(layer: DynamicLayer, other: DynamicLayer) -> bool:
    return all(
        torch.equal(a, b) for a, b in ((layer.keys, other.keys), (layer.values, other.values))
    )


@given(steps=st.lists(st.one_of(st.integers(1, 90), st.sampled_from(sorted(CHANGES))), max_size=8))
def test_it_holds_what_the_dynamic_layer_holds(steps: list[int | str]) -> None:
    layers = [DynamicLayer(), GrowingLayer()]
    for at, step in enumerate([7, *steps, 3]):
        for layer in layers:
            if isinstance(step, int):
                batch = layer.keys.shape[0] if layer.get_seq_length() else 2
                k, v = some(step, batch, at, requires_grad=False)
                keys, values = layer.update(k, v)
                assert keys is layer.keys and values is layer.values
            elif layer.is_initialized:
                CHANGES[step](layer)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()
        if layers[0].is_initialized:
            assert same(*layers)


def test_few_tokens_move_what_is_there() -> None:
    layer = GrowingLayer()
    layer.update(*some(1600, requires_grad=False))
    places = []
    for _ in range(200):
        layer.update(*some(1, requires_grad=False))
        places.append(layer.keys.data_ptr())
    assert len(set(places)) == 2  # a sixteenth of 1600 is 100
    assert layer.keys.shape == (2, 3, 1800, 4)


def test_its_bytes_count_the_room() -> None:
    layer = GrowingLayer()
    layer.update(*some(10, requires_grad=False))
    assert layer.nbytes == 2 * 3 * (10 + SPARE) * (4 + 5) * 4
    layer.batch_select_indices(torch.tensor([1]))
    assert layer.nbytes == 3 * 10 * (4 + 5) * 4
    cache = DynamicCache()
    cache.layers.append(layer)
    assert cache_bytes(cache) == layer.nbytes
    layer.reset()
    assert layer.nbytes == 0


def test_gradients_go_through_all_tokens() -> None:
    """Nothing a graph has kept is overwritten."""
    layer, first = GrowingLayer(), some(4, requires_grad=True)
    keys, values = layer.update(*first)
    before = (keys.square().sum() + values.square().sum()) * 1
    k, v = layer.update(*some(3, seed=1, requires_grad=True))
    (before + k.sum() + v.sum()).backward()
    assert first[0].grad is not None
    assert torch.allclose(first[0].grad, 2 * first[0].detach() + 1)


def test_a_cache_filled_in_inference_mode_goes_on_without() -> None:
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(*some(4, requires_grad=False))
    keys, _ = layer.update(*some(1, requires_grad=False))
    assert keys.shape[2] == 5


def test_a_deep_copy_is_a_branch() -> None:
    layer = GrowingLayer()
    layer.update(*some(4, requires_grad=False))
    other = copy.deepcopy(layer)
    for each, seed in ((layer, 1), (other, 2)):
        each.update(*some(1, seed=seed, requires_grad=False))
    assert torch.equal(layer.keys[:, :, :4], other.keys[:, :, :4])
    assert not torch.equal(layer.keys, other.keys)


@pytest.mark.parametrize("filled", [True, False])
def test_plain_layers_of_a_cache_become_growing_ones(filled: bool) -> None:
    cache = DynamicCache()
    k, v = some(4, requires_grad=False)
    if filled:
        cache.update(k, v, 0)
    else:
        cache.layers.append(DynamicLayer())
    grow_in_place(cache)
    assert type(cache.layers[0]) is GrowingLayer
    keys, _ = cache.update(k, v, 0)
    assert torch.equal(keys, torch.cat([k, k], 2) if filled else k)
