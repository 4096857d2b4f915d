"""Repeated forward passes over the same tokens that compute only what has changed since."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["decoder_layers", "replaying"]

Prepare = Callable[[Hashable, Sequence[Hashable]], None]


def decoder_layers(model: nn.Module, names: dict[int, str]) -> tuple[list[nn.Module], list[int]]:
    """The layers that a model runs one after the other, found from modules inside them.

    Args:
        names: number of an attention layer -> its module.

    Returns:
        all modules of the outermost list that holds them, and the numbers of the attention layers in
        them, -1 where ``names`` has none; two empty lists where they lie in no common list.
    """
    places: dict[str, dict[int, int]] = {}
    for number, name in names.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            holder = ".".join(parts[:depth])
            if isinstance(model.get_submodule(holder), nn.ModuleList):
                places.setdefault(holder, {})[int(parts[depth])] = number
                break
    if len(places) != 1:
        return [], []
    ((holder, numbers),) = places.items()
    layers = list(model.get_submodule(holder).children())
    return layers, [numbers.get(position, -1) for position in range(len(layers))]


@contextmanager
def replaying(layers: Sequence[nn.Module]) -> Iterator[Prepare]:
    """Let layers return what they returned last, up to the first one that has changed.

    Before every forward pass, call the function this yields with a name for the tokens of the pass
    and the state of every layer. Leading layers whose states are those of the last pass over these
    tokens are not computed. All else a layer depends on must stay as it is.
    """
    memory: dict[Hashable, tuple[list[Hashable], list[Any]]] = {}
    outputs: list[Any] = []
    known = 0
    own = [layer.__dict__.get("forward") for layer in layers]

    def prepare(tokens: Hashable, states: Sequence[Hashable]) -> None:
        nonlocal outputs, known
        before, outputs = memory.get(tokens, ([], []))
        known = 0
        while known < len(outputs) and before[known] == states[known]:
            known += 1
        del outputs[known:]
        memory[tokens] = list(states), outputs

    def replayed(position: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if position >= known:
                outputs.append(forward(*args, **kwargs))
            return outputs[position]

        return run

    for position, layer in enumerate(layers):
        layer.forward = replayed(position, layer.forward)
    try:
        yield prepare
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
