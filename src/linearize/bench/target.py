"""The model a benchmark runs: converted layers, fitted or not, and whether they compute what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from linearize.attention import LinearAttention
from linearize.bench.oracle import BOUNDS, deviation, expected, in_double
from linearize.convert import check_layers
from linearize.converted import attach, converted_layers
from linearize.errors import PlanError
from linearize.interface import recording
from linearize.models import Loaded, attention_layers, vocabulary_and_width
from linearize.plan import Plan

__all__ = ["Target", "check_model", "prepare"]

CHECKED = 40  # tokens of the check
DECODED = 8  # of these, fed one by one
MODEL_SLACK = 10  # rounding grows through the layers: bound of the logits over that of one layer


@dataclass(frozen=True)
class Target:
    """A model with converted layers.

    Attributes:
        loaded: the model.
        layers: its converted layers by index. count: attention layers in all.
        fitted: whether the kernels were fitted; times do not depend on it.
    """

    loaded: Loaded
    layers: dict[int, LinearAttention]
    count: int
    fitted: bool

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self.loaded.model

    def settings(self) -> dict[str, Any]:
        """What was measured, as JSON."""
        plan = self.loaded.plan
        return {
            "model": self.loaded.ref,
            "plan": None if plan is None else plan.model_dump(mode="json"),
            "converted_layers": sorted(self.layers),
            "attention_layers": self.count,
            "fitted": self.fitted,
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }


def prepare(loaded: Loaded, plan: Plan | None) -> Target:
    """A target from a converted model as it is, or from an original one with unfitted kernels.

    The original model object is changed.

    Args:
        loaded: the model.
        plan: what to convert; ``None`` for a converted model.

    Raises:
        PlanError: a plan for a model that is converted already, or one that does not fit the model.
    """
    model = loaded.model
    known = converted_layers(model)
    layers = attention_layers(model)
    if known:
        if plan is not None:
            raise PlanError(
                "layers, kernel, window, sinks or state rank",
                f"a model whose layers {sorted(known)} are converted already",
                "Leave these options out, or name the original model.",
            )
        return Target(loaded, known, len(layers), True)
    plan = plan or Plan()
    chosen = check_layers(model, layers, plan)
    made = {
        layer.index: LinearAttention.from_plan(plan, layer.shape, layer.index).to(model.device)
        for layer in chosen
    }
    attach(model, made, {layer.index: layer.name for layer in chosen}, plan, loaded.ref)
    return Target(Loaded(model, loaded.tokenizer, plan, loaded.ref), made, len(layers), False)


@torch.no_grad()
def check_model(target: Target) -> tuple[float, str | None]:
    """Compare logits, prefilled and then decoded one by one, with the definition in every layer.

    Returns:
        the largest relative error of a position's logits, and why the model must not be timed if
        that is too large.
    """
    model = target.model
    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_and_width(model)[0]
    ids = torch.randint(vocabulary, (1, CHECKED), generator=generator).to(model.device)
    with recording(_Definition(target)):
        wanted = model(input_ids=ids, use_cache=False).logits
    output = model(input_ids=ids[:, :-DECODED], use_cache=True)
    parts, cache = [output.logits], output.cache
    for at in range(CHECKED - DECODED, CHECKED):
        parts.append(model(input_ids=ids[:, at : at + 1], cache=cache, use_cache=True).logits)
    error = deviation(torch.cat(parts, dim=1), wanted)
    if error > MODEL_SLACK * BOUNDS.get(model.dtype, BOUNDS[torch.float32]):
        return error, f"logits off by {error:.2g} of their size from the definition's"
    return error, None


class _Definition:
    """Answers the attention calls of converted layers with the definition in fp64."""

    def __init__(self, target: Target) -> None:
        self._layers = {id(linear): in_double(linear) for linear in target.layers.values()}

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        linear: Any = getattr(module, "linear_attention", None)
        if linear is None:
            return None
        layer = self._layers[id(linear)]
        at = torch.arange(q.shape[2], device=q.device)
        if layer.heads is None:
            return expected(layer, q, k, v, at).to(q.dtype)
        wide = [x.double() for x in (q, k, v)]
        output = functional.scaled_dot_product_attention(
            wide[0], wide[1], wide[2], is_causal=True, scale=scale, enable_gqa=True
        )
        by_head = output.unflatten(1, (k.shape[1], -1))
        served = list(layer.heads)
        part = expected(layer, *layer.served(q, k, v), at)
        by_head[:, served] = part.unflatten(1, (len(served), -1))
        return by_head.flatten(1, 2).to(q.dtype)
