"""A model with converted layers: putting them in, finding them, switching them off, describing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from linearize.attention import LinearAttention, Part
from linearize.cache import hand_over_cache
from linearize.interface import set_interface
from linearize.kernels import HeadShape
from linearize.lora import lora_disabled
from linearize.plan import Plan
from linearize.versions import versions

__all__ = [
    "attach",
    "converted_layers",
    "describe",
    "only_part",
    "original_attention",
    "rebuild",
]


def converted_layers(model: PreTrainedModel) -> dict[int, LinearAttention]:
    """The converted layers of a model by zero-based index."""
    found: dict[int, LinearAttention] = {}
    for module in model.modules():
        linear, index = (
            getattr(module, "linear_attention", None),
            getattr(module, "layer_idx", None),
        )
        if isinstance(linear, LinearAttention) and isinstance(index, int):
            found[index] = linear
    return found


@contextmanager
def original_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a converted model run with its softmax attention for a while: the reference beside it.

    LoRA is off as well: what runs is the model before conversion and adaptation.
    Caches made inside the block do not fit outside it, and the other way round.
    """
    layers = [linear for linear in converted_layers(model).values() if linear.active]
    for linear in layers:
        linear.active = False
    try:
        with lora_disabled(model):
            yield
    finally:
        for linear in layers:
            linear.active = True


@contextmanager
def only_part(model: PreTrainedModel, part: Part) -> Iterator[None]:
    """Run a converted model for a while with only its exact keys, or only its kernels.

    Hybrids are known to bypass their linear part; the three scores side by side show it. Caches
    made inside the block do not fit outside it.
    """
    layers = list(converted_layers(model).values())
    before = [linear.part for linear in layers]
    for linear in layers:
        linear.part = part
    try:
        yield
    finally:
        for linear, one in zip(layers, before, strict=True):
            linear.part = one


def attach(
    model: PreTrainedModel,
    fitted: dict[int, LinearAttention],
    names: dict[int, str],
    plan: Plan,
    base: str | None,
) -> None:
    """Give attention modules their linear attention, and the configuration its account of it."""
    for index, linear in fitted.items():
        module = model.get_submodule(names[index])
        module.linear_attention = linear
        module.register_forward_pre_hook(hand_over_cache, with_kwargs=True)
    set_interface(model)
    model.config.linearize = describe(fitted, names, plan, base)


def describe(
    fitted: dict[int, LinearAttention], names: dict[int, str], plan: Plan, base: str | None
) -> dict[str, Any]:
    """The ``linearize`` section of a configuration: all that rebuilds the structure, as JSON."""
    return {
        "plan": plan.model_dump(mode="json"),
        "base": base,
        "versions": versions(),
        "layers": {
            str(index): {
                "name": names[index],
                "shape": asdict(linear.shape),
                **linear.settings(),
            }
            for index, linear in sorted(fitted.items())
        },
    }


def rebuild(section: dict[str, Any]) -> tuple[dict[int, LinearAttention], dict[int, str], Plan]:
    """Unfilled layers, module names and plan from a ``linearize`` section."""
    plan = Plan(**section["plan"])
    layers, names = {}, {}
    for key, entry in section["layers"].items():
        index = int(key)
        names[index] = entry["name"]
        shape = HeadShape(**entry["shape"])
        stored = entry | {"kernel": entry["kernel"]}  # without its settings nothing is rebuilt
        layers[index] = LinearAttention.from_plan(plan, shape, index, stored)
    return layers, names, plan
