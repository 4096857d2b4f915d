"""Low-rank adapters (LoRA, through peft) on the attention projections: adding, storing, folding in.

peft is an optional dependency; it is imported when a model with adapters is made or loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from linearize.errors import BackendError, CheckpointError, PlanError
from linearize.models import attention_layers
from linearize.output import write_json
from linearize.tensors import check_tensors

__all__ = [
    "LORA",
    "LoraSettings",
    "add_lora",
    "lora_disabled",
    "lora_layers",
    "lora_settings",
    "lora_tensors",
    "merged_weights",
    "projections",
    "restore_lora",
    "store_lora",
    "without_lora",
]

LORA = "linearize_lora.json"
WEIGHTS = "linearize_lora.safetensors"
ADAPTER = "default"  # peft's name of the one adapter there is


@dataclass(frozen=True)
class LoraSettings:
    """Adapters ``W + (alpha / rank) B A`` with dropout on their input.

    Attributes:
        rank, alpha, dropout: see above. targets: dotted names of the adapted projections.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


def projections(model: PreTrainedModel) -> list[str]:
    """Dotted names of the projections of every attention layer: queries, keys, values, output.

    They are the linear maps inside the attention modules, fused or not, whatever their names.

    Raises:
        PlanError: a layer has none.
    """
    found: list[str] = []
    for layer in attention_layers(model):
        own = [
            f"{layer.name}.{name}"
            for name, module in layer.module.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and not name.startswith("linear_attention.")
        ]
        if not own:
            raise PlanError(
                f"LoRA on the projections of layer {layer.index}",
                f"no linear map inside {type(layer.module).__name__}",
                "Adapt with rank 0: only kernel parameters are trained then.",
            )
        found += own
    return found


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Wrap the target projections in place: ``A`` random (torch's global generator), ``B`` zero.

    Adapters are in fp32 whatever the precision of the model. Which of the model's own parameters
    require gradients does not change.

    Raises:
        BackendError: peft is not installed. PlanError: the model has adapters already.
    """
    if lora_layers(model):
        raise PlanError(
            "adding LoRA",
            "a model that has LoRA already",
            "Fold it into the weights first: linearize merge DIR --out OTHER.",
        )
    peft = _peft()
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets),
        fan_in_fan_out=any(
            isinstance(model.get_submodule(name), Conv1D) for name in settings.targets
        ),
        bias="none",
    )
    peft.inject_adapter_in_model(config, model, ADAPTER)
    for name, layer in lora_layers(model).items():
        for part in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            part.float().requires_grad_(True)
        for parameter_name, parameter in layer.base_layer.named_parameters():
            parameter.requires_grad_(before[f"{name}.{parameter_name}"])
    for name, parameter in model.named_parameters():
        if name in before:
            parameter.requires_grad_(before[name])
    model.train(model.training)  # new modules start in training mode


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """peft's adapter layers by the name of the projection each wraps; empty without adapters."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def lora_settings(model: nn.Module) -> LoraSettings | None:
    """The settings of a model's adapters; ``None`` without adapters."""
    layers = lora_layers(model)
    if not layers:
        return None
    first = next(iter(layers.values()))
    dropout = float(getattr(first.lora_dropout[ADAPTER], "p", 0.0))
    return LoraSettings(
        first.r[ADAPTER], float(first.lora_alpha[ADAPTER]), dropout, tuple(sorted(layers))
    )


def lora_tensors(model: nn.Module) -> dict[str, Tensor]:
    """``{projection}.A [rank, in]`` and ``{projection}.B [out, rank]`` of all adapters."""
    found = {}
    for name, layer in sorted(lora_layers(model).items()):
        found[f"{name}.A"] = layer.lora_A[ADAPTER].weight
        found[f"{name}.B"] = layer.lora_B[ADAPTER].weight
    return found


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Run a model for a while as if it had no adapters."""
    layers = [layer for layer in lora_layers(model).values() if not layer.disable_adapters]
    trained = [[p.requires_grad for p in layer.parameters()] for layer in layers]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, flags in zip(layers, trained, strict=True):
            layer.enable_adapters(True)
            for parameter, flag in zip(layer.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Take the adapters out for a while, so that the model has the parameter names it had before."""
    layers = lora_layers(model)
    for name, layer in layers.items():
        _replace(model, name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in layers.items():
            _replace(model, name, layer)


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """``W + (alpha / rank) B A`` by parameter name, rounded once to the precision of ``W``."""
    found = {}
    for name, layer in lora_layers(model).items():
        weight = layer.base_layer.weight
        delta = layer.get_delta_weight(ADAPTER)
        found[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
    return found


def store_lora(model: nn.Module, folder: Path) -> None:
    """Write settings and tensors of the adapters into a folder; nothing without adapters."""
    settings = lora_settings(model)
    if settings is None:
        return
    write_json(folder / LORA, asdict(settings))
    tensors = {name: value.detach().contiguous() for name, value in lora_tensors(model).items()}
    safetensors.torch.save_file(tensors, folder / WEIGHTS)


def restore_lora(model: PreTrainedModel, folder: Path) -> None:
    """Add the adapters stored in a folder, exactly; nothing if it holds none.

    Raises:
        CheckpointError: files are damaged, or the model lacks a projection or has another shape.
        BackendError: peft is not installed.
    """
    if not (folder / LORA).is_file():
        return
    try:
        content = json.loads((folder / LORA).read_text(encoding="utf-8"))
        settings = LoraSettings(**content | {"targets": tuple(content["targets"])})
        stored = safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"LoRA in {folder}",
            f"{type(error).__name__}: {error}",
            "A file is missing or damaged; save it again.",
        ) from error
    known = set(projections(model))
    strangers = [name for name in settings.targets if name not in known]
    if strangers:
        raise CheckpointError(
            f"LoRA of {folder} on {strangers[0]}",
            "a model without this projection",
            "Use the base it was made for.",
        )
    with torch.random.fork_rng(devices=[]):
        add_lora(model, settings)
    fill_lora(model, stored, str(folder / WEIGHTS))


def fill_lora(model: nn.Module, stored: dict[str, Tensor], source: str) -> None:
    """Put stored tensors into the adapters a model has.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    wanted = lora_tensors(model)
    check_tensors(
        wanted,
        stored,
        source=source,
        remedy="Use the base and the settings it was made with.",
        label="LoRA ",
    )
    with torch.no_grad():
        for name, own in wanted.items():
            own.copy_(stored[name])


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise BackendError(
            "LoRA adapters",
            f"no usable package peft ({error})",
            "Run: pip install 'linearize[adapt]'.",
        ) from error
    return peft
