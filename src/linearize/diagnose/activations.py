"""Large activations in the residual stream, layer by layer (figure 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linearize.diagnose.data import Progress, silent
from linearize.errors import ModelError
from linearize.models import Loaded, attention_layers
from linearize.plan import Plan
from linearize.text import Source, divide, tokenize

__all__ = ["ActivationProfile", "LayerActivations", "activation_profile"]

SHOWN = 3
BATCH = 8


@dataclass(frozen=True)
class LayerActivations:
    """The output of one decoder block.

    For every hidden dimension the largest absolute value over all tokens and prompts is taken; the
    rest describes these numbers.

    Attributes:
        layer: zero-based.
        top: the three largest, descending; dimensions: where they are.
        median: the median over the hidden dimensions.
    """

    layer: int
    top: list[float]
    dimensions: list[int]
    median: float


@dataclass(frozen=True)
class ActivationProfile:
    """Every layer of the model, on ``prompts`` prompts of ``prompt_length`` tokens."""

    hidden: int
    prompts: int
    prompt_length: int
    layers: list[LayerActivations]


@torch.no_grad()
def activation_profile(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    progress: Progress = silent,
) -> ActivationProfile:
    """Largest residual activations of every decoder block on the calibration prompts.

    A decoder block is the module that holds the attention module, whatever the architecture.

    Raises:
        TextError: the text is too short. ModelError: the attention modules have no block around
            them.
    """
    plan = plan or Plan()
    model = loaded.model
    tokens = tokenize(text, loaded.tokenizer)
    prompts = divide(tokens, plan).prompts
    largest: dict[int, Tensor] = {}

    def remember(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            now = hidden.detach().abs().flatten(0, -2).amax(0).double().cpu()
            largest[layer] = torch.maximum(largest[layer], now) if layer in largest else now

        return hook

    handles = []
    training = model.training
    model.eval()
    try:
        for layer in attention_layers(model):
            parent = layer.name.rpartition(".")[0]
            if not parent or model.get_submodule(parent) is model.base_model:
                raise ModelError(
                    f"the decoder block of layer {layer.index}",
                    f"the attention module {layer.name!r} directly in the model",
                    "Use a model whose attention modules live in decoder blocks.",
                )
            hook = remember(layer.index)
            handles.append(model.get_submodule(parent).register_forward_hook(hook))
        for start in range(0, len(prompts), BATCH):
            ids = torch.stack(prompts[start : start + BATCH]).to(model.device)
            model.base_model(input_ids=ids, use_cache=False)
            progress(min(start + BATCH, len(prompts)), len(prompts), "prompts")
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    hidden = len(next(iter(largest.values())))
    found = [_describe(index, largest[index]) for index in sorted(largest)]
    return ActivationProfile(hidden, len(prompts), len(prompts[0]), found)


def _describe(layer: int, largest: Tensor) -> LayerActivations:
    top = largest.sort(descending=True, stable=True)
    return LayerActivations(
        layer,
        top.values[:SHOWN].tolist(),
        top.indices[:SHOWN].tolist(),
        float(largest.quantile(0.5)),
    )
