"""Tokens a second at each context length: the converted model beside the same weights with softmax."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from linearize.attention import LinearAttention
from linearize.bench.measure import (
    Progress,
    Timing,
    clock,
    interleave,
    machine,
    memory_limit,
    silent,
)
from linearize.bench.oracle import BOUNDS, deviation, expected, in_double
from linearize.bench.target import Target, check_model
from linearize.cache import LinearCacheLayer, cache_bytes
from linearize.converted import original_attention
from linearize.errors import PlanError
from linearize.growing import grow_in_place
from linearize.kernels import HeadShape
from linearize.models import AttentionLayer, attention_layers
from linearize.ops import State

__all__ = ["DecodeBench", "DecodePoint", "decode_benchmark"]

METHOD = (
    "The context is not read: softmax layers get random keys and values of its length, converted "
    "layers the state their operator makes of random ones. Speed and memory do not depend on them."
)
WARM = 2  # untimed tokens


@dataclass(frozen=True)
class DecodePoint:
    """One context length.

    Attributes:
        context: tokens before the timed ones.
        status, reason: ``"ok"``, ``"differs"`` (an output is not the definition's) or ``"skipped"``.
        error: largest relative error of one decoded token of a layer against the definition.
        converted, softmax: seconds per step, which gives every sequence a token. softmax_in_place:
            softmax with the cache its layers have in the converted model, which appends in place
            instead of copying itself.
        converted_bytes, softmax_bytes: memory of all sequences: states, windows, sinks, and the keys
            and values of softmax layers.
        speedup: tokens per second, converted over softmax as transformers runs it.
        state_bytes: what the converted heads hold of one sequence.
        state_tokens: as many tokens of these heads' keys and values take that memory.
    """

    context: int
    status: str
    reason: str | None = None
    error: float | None = None
    converted: Timing | None = None
    softmax: Timing | None = None
    softmax_in_place: Timing | None = None
    converted_bytes: int | None = None
    softmax_bytes: int | None = None
    speedup: float | None = None
    state_bytes: int | None = None
    state_tokens: float | None = None


@dataclass(frozen=True)
class DecodeBench:
    """All context lengths of one run, and what they depend on.

    ``model_error`` is the relative error of the logits against the definition in every layer.
    """

    settings: dict[str, Any]
    method: str
    machine: dict[str, Any]
    model_error: float
    points: list[DecodePoint]
    seconds: float


def decode_benchmark(
    target: Target,
    *,
    contexts: Sequence[int],
    batch: int = 1,
    tokens: int = 8,
    repeats: int = 5,
    memory: int | None = None,
    progress: Progress = silent,
) -> DecodeBench:
    """Decode at every context length, converted and softmax in turn.

    Args:
        target: the model. contexts: lengths. batch: sequences decoded side by side.
        tokens: steps a turn, each of them timed. repeats: turns.
        memory: bytes the two caches of a context may take; by default 60 % of what is free.
        progress: told after every context.

    Raises:
        PlanError: no context, or one below 1; no sequence.
    """
    started = time.perf_counter()
    if not contexts or min(contexts) < 1 or batch < 1 or tokens < 1 or repeats < 1:
        raise PlanError(
            f"contexts {list(contexts)}, batch {batch}", "no positive number", "Give positive ones."
        )
    contexts = sorted(set(contexts))
    model = target.model
    limit = memory_limit(memory, model.device)
    described = machine(model.device)
    layers = attention_layers(model)
    model_error, reason = check_model(target)
    points = []
    for done, context in enumerate(contexts, 1):
        if reason is not None:
            points.append(DecodePoint(context, "differs", reason))
            continue
        points.append(_point(target, layers, context, batch, tokens, repeats, limit))
        progress(done, len(contexts), f"{context:,} tokens")
    settings = target.settings() | {
        "contexts": list(contexts),
        "batch": batch,
        "tokens": tokens,
        "repeats": repeats,
        "memory": limit,
    }
    seconds = time.perf_counter() - started
    return DecodeBench(settings, METHOD, described, model_error, points, seconds)


@torch.no_grad()
def _point(
    target: Target,
    layers: list[AttentionLayer],
    context: int,
    batch: int,
    tokens: int,
    repeats: int,
    limit: int,
) -> DecodePoint:
    model = target.model
    element = torch.finfo(model.dtype).bits // 8
    needed = sum(_key_bytes(layer.shape, element) for layer in layers) * context * batch
    if 4 * needed > limit:  # three caches, and a copy of one
        return DecodePoint(
            context,
            "skipped",
            f"the caches may need {4 * needed / 1e9:.1f} GB; the limit is {limit / 1e9:.1f} GB",
        )
    states: dict[Any, State] = {}
    error = 0.0
    for linear in target.layers.values():
        if (key := _kind(linear)) not in states:
            states[key], off = _state(linear, context, model.dtype, model.device)
            error = max(error, off)
    bound = BOUNDS.get(model.dtype, BOUNDS[torch.float32])
    if error > bound:
        reason = f"a decoded token off by {error:.2g} of its size"
        return DecodePoint(context, "differs", reason, error)
    converted = _cache(target, layers, context, batch, states)
    softmax, in_place = (_cache(target, layers, context, batch, None) for _ in range(2))
    sizes = cache_bytes(converted), cache_bytes(softmax)
    grow_in_place(in_place)
    ids = torch.ones(batch, 1, dtype=torch.long, device=model.device)

    def decode(cache: Cache, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            started = clock(model.device)
            model(input_ids=ids, cache=cache, use_cache=True)
            seconds.append(clock(model.device) - started)
        return seconds

    def with_softmax(cache: Cache, count: int) -> list[float]:
        with original_attention(model):
            return decode(cache, count)

    turns: dict[str, Callable[[], dict[str, list[float]]]] = {
        "converted": lambda: {"token": decode(converted, tokens)},
        "softmax": lambda: {"token": with_softmax(softmax, tokens)},
        "in place": lambda: {"token": with_softmax(in_place, tokens)},
    }
    decode(converted, WARM)
    with_softmax(softmax, WARM)
    with_softmax(in_place, WARM)
    timed = interleave(turns, repeats=repeats, budget=float("inf"))
    ours, theirs, appending = (timed[turn]["token"] for turn in turns)
    speedup = theirs.median / ours.median
    held = sum(states[_kind(linear)].nbytes for linear in target.layers.values())
    token = sum(_key_bytes(linear.kernel.shape, element) for linear in target.layers.values())
    return DecodePoint(
        context, "ok", None, error, ours, theirs, appending, *sizes, speedup, held, held / token
    )


def _kind(linear: LinearAttention) -> Any:
    """Layers of one kind have states of one size."""
    return linear.kernel.shape, type(linear.kernel), linear.keys.rank, str(linear.kernel.settings())


def _state(
    linear: LinearAttention, context: int, dtype: torch.dtype, device: torch.device
) -> tuple[State, float]:
    """The state after ``context`` random tokens, and the error of the token decoded from it."""
    shape = linear.kernel.shape
    generator = torch.Generator().manual_seed(context)
    q = _normal((1, shape.query_heads, context + 1, shape.head_dim), generator, dtype, device)
    k = _normal((1, shape.kv_heads, context + 1, shape.head_dim), generator, dtype, device)
    v = _normal((1, shape.kv_heads, context + 1, shape.value_dim), generator, dtype, device)
    _, state = linear(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1])
    assert state is not None
    last = slice(context, None)
    copied = state.map(torch.clone)
    output, _ = linear(q[:, :, last], k[:, :, last], v[:, :, last], state=copied)
    at = torch.tensor([context], device=device)
    wanted = expected(in_double(linear), q[:, :, last], k, v, at)
    return state, deviation(output, wanted)


def _cache(
    target: Target,
    layers: list[AttentionLayer],
    context: int,
    batch: int,
    states: dict[Any, State] | None,
) -> DynamicCache:
    """A cache of ``batch`` sequences after ``context`` tokens.

    Of the converted model, or (``states=None``) of softmax.
    """
    model = target.model
    cache = DynamicCache(config=model.config)
    while len(cache.layers) <= max(layer.index for layer in layers):
        cache.layers.append(DynamicLayer())
    generator = torch.Generator().manual_seed(context)
    for layer in layers:
        linear = target.layers.get(layer.index) if states is not None else None
        place: Any = cache.layers[layer.index]
        heads = layer.shape.kv_heads
        if linear is not None and states is not None:
            place = cache.layers[layer.index] = LinearCacheLayer()
            state = states[_kind(linear)]
            place.state = state.map(lambda one: one.repeat_interleave(batch, dim=0))
            place.length, place.is_initialized = context, True
            heads -= linear.kernel.shape.kv_heads
            place = place.exact
        if heads:
            widths = layer.shape.head_dim, layer.shape.value_dim
            place.update(
                *(
                    _normal((batch, heads, context, w), generator, model.dtype, model.device)
                    for w in widths
                )
            )
    return cache


def _key_bytes(shape: HeadShape, element: int) -> int:
    return shape.kv_heads * (shape.head_dim + shape.value_dim) * element


def _normal(
    size: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.randn(size, generator=generator).to(device, dtype)
