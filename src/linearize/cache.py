"""The constant-size cache layer of a converted attention layer, in transformers' ordinary Cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from linearize.errors import ModelError
from linearize.growing import GrowingLayer, grow_in_place
from linearize.ops import State

__all__ = ["LinearCacheLayer", "cache_bytes", "hand_over_cache"]


class LinearCacheLayer(CacheLayerMixin):
    """Holds a :class:`State` instead of keys and values; its size does not depend on the length.

    ``update`` returns only the new keys and values; the attention function folds them into the
    state it finds here. KV heads of the layer that keep their softmax have their keys and values in
    ``exact``, which grows.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.exact = GrowingLayer()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated before the first attention call."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them back as they are."""
        self.is_initialized = True
        self.length += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks cover every token seen, as for a softmax layer."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Only the empty crop is possible: a state cannot forget its last tokens.

        Raises:
            ModelError: tokens would have to be removed.
        """
        if tokens_to_remove:
            raise ModelError(
                f"removing {abs(tokens_to_remove)} tokens from a linear-attention state",
                "a sum over all tokens, from which none can be taken back",
                "Use ordinary (not assisted or contrastive) generation, or keep a copy of the cache.",
            )

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.exact, self.length = None, GrowingLayer(), 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self._change(lambda t: t.index_select(0, beam_idx.to(t.device)))
        self.exact.reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._change(lambda t: t.repeat_interleave(repeats, dim=0))
        self.exact.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        self._change(lambda t: t[indices.to(t.device)])
        self.exact.batch_select_indices(indices)

    def offload(self) -> None:
        """The state is small; it stays where it is used."""

    def prefetch(self) -> None:
        """See :meth:`offload`."""

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map(function)


def cache_bytes(cache: Cache | None) -> int:
    """Bytes of all keys, values and states a cache holds, spare room included."""
    total = 0
    for layer in [] if cache is None else cache.layers:
        exact: Any = layer
        if isinstance(layer, LinearCacheLayer):
            total += 0 if layer.state is None else layer.state.nbytes
            exact = layer.exact
        if isinstance(exact, GrowingLayer):
            total += exact.nbytes
            continue
        for tensor in (getattr(exact, "keys", None), getattr(exact, "values", None)):
            total += 0 if tensor is None else tensor.nbytes
    return total


def hand_over_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a converted attention module: give it its layer of the cache in use.

    The layer transformers made for it is replaced on first use; those of the softmax layers grow in
    place from then on.

    Raises:
        ModelError: the cache already holds softmax keys for this layer, or has no plain layers.
    """
    cache = next((a for a in (*kwargs.values(), *args) if isinstance(a, Cache)), None)
    linear: Any = module.linear_attention
    index: Any = module.layer_idx
    linear.cache_layer = None
    if cache is None:
        return
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    layer = cache.layers[index]
    if not linear.active:
        if isinstance(layer, LinearCacheLayer):
            raise ModelError(
                f"softmax attention of layer {index} from a cache that its linear attention filled",
                "a state without keys",
                "Start from an empty cache.",
            )
        return
    if not isinstance(layer, LinearCacheLayer):
        if type(layer) not in (DynamicLayer, GrowingLayer) or layer.get_seq_length():
            raise ModelError(
                f"decoding converted layer {index} from a {type(layer).__name__} "
                f"of {layer.get_seq_length()} tokens",
                "a layer whose state cannot be computed from it",
                "Start from an empty transformers DynamicCache, or from a cache this model filled.",
            )
        layer = cache.layers[index] = LinearCacheLayer()
    linear.cache_layer = layer
    grow_in_place(cache)
