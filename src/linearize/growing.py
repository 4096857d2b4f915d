"""Keys and values of softmax heads that grow in place, for models that keep some of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

__all__ = ["GrowingLayer", "grow_in_place"]

SPARE = 64  # tokens of room at least
SHARE = 16  # and a sixteenth of what is held


class GrowingLayer(DynamicLayer):
    """A :class:`DynamicLayer` that writes new tokens into spare room instead of copying all old ones.

    A dynamic layer copies everything it holds for each decoded token, which beside a constant-size
    state would be most of the work. Here the copies are one in every sixteenth of the length. Whatever
    else changes the keys (beams, crops, offloading) leaves ordinary tensors, which the next token
    moves into new room. Where gradients are recorded nothing is written in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[Tensor | None] = [None, None]

    @classmethod
    def of(cls, layer: DynamicLayer) -> GrowingLayer:
        """The same content."""
        grown = cls()
        vars(grown).update(vars(layer))
        return grown

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values, ``[B, Hkv, N, ·]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        given = (self.keys, self.values, key_states, value_states)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._append(0, self.keys, key_states)
        self.values = self._append(1, self.values, value_states)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget everything, the room too."""
        self._rooms = [None, None]
        super().reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, and of the room around them."""
        total = 0
        for tensor, room in zip((self.keys, self.values), self._rooms, strict=True):
            if tensor is not None:
                total += (
                    room.nbytes if room is not None and _inside(tensor, room) else tensor.nbytes
                )
        return total

    def _append(self, which: int, held: Tensor, new: Tensor) -> Tensor:
        before = held.shape[-2] if held.dim() == 4 else 0
        after = before + new.shape[-2]
        room = self._rooms[which]
        if room is None or not before or not _fits(held, room, new, after):
            batch, heads, _, width = new.shape
            size = after + max(SPARE, after // SHARE)
            room = self._rooms[which] = new.new_empty(batch, heads, size, width)
            if before:
                room[:, :, :before] = held
        room[:, :, before:after] = new
        return room[:, :, :after]


def grow_in_place(cache: Cache) -> None:
    """Let the plain layers of the cache grow in place."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer.of(layer)


def _inside(held: Tensor, room: Tensor) -> bool:
    """Whether the tensor is the beginning of the room."""
    same = held.data_ptr() == room.data_ptr() and held.stride() == room.stride()
    return same and held.shape[:2] == room.shape[:2]


def _fits(held: Tensor, room: Tensor, new: Tensor, tokens: int) -> bool:
    """Whether the room around what is held can take the new tokens, ``tokens`` with them."""
    same = room.dtype == new.dtype and room.device == new.device
    writable = torch.is_inference_mode_enabled() or not room.is_inference()
    return same and writable and _inside(held, room) and room.shape[2] >= tokens
