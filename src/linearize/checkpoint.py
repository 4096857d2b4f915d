"""Saving and loading converted models: whole Hugging Face folders, or the kernels alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from linearize.attention import LinearAttention
from linearize.convert import ConversionReport
from linearize.converted import attach, converted_layers, rebuild
from linearize.errors import CheckpointError, LinearizeError, PlanError
from linearize.lora import (
    lora_layers,
    merged_weights,
    restore_lora,
    store_lora,
    without_lora,
)
from linearize.models import Loaded, attention_layers, load_pretrained
from linearize.output import new_folder, write_json
from linearize.plan import Plan
from linearize.tensors import check_tensors
from linearize.versions import versions

__all__ = ["ADAPTER", "REPORT", "load", "load_adapter", "save"]

ADAPTER = "linearize_adapter.json"
KERNELS = "linearize_kernels.safetensors"
REPORT = "conversion.json"


def save(
    loaded: Loaded,
    folder: str | Path,
    adapter_only: bool = False,
    *,
    overwrite: bool = False,
    report: ConversionReport | None = None,
    merge: bool = False,
    accounts: dict[str, Any] | None = None,
) -> None:
    """Save a converted or adapted model.

    Args:
        loaded: a model with converted layers, with LoRA, or with both.
        folder: written at once; an interruption leaves what was there.
        adapter_only: only kernels and LoRA, naming the base they belong to; otherwise an ordinary
            Hugging Face folder (safetensors, configuration, tokenizer) with a ``linearize`` section
            and LoRA in a file of its own.
        overwrite: replace a folder that has content.
        report: stored beside the weights as ``conversion.json``.
        merge: fold LoRA into the stored weights; the model in memory stays as it is.
        accounts: further JSON to store, by file name.

    Raises:
        CheckpointError: the model is neither converted nor adapted, or nothing is left to store.
        OutputError: the folder cannot be written.
    """
    model = loaded.model
    section = getattr(model.config, "linearize", None)
    if section is None and not lora_layers(model):
        raise CheckpointError(
            "saving a converted model", "a model without converted layers", "Convert it first."
        )
    if merge and adapter_only:
        raise CheckpointError(
            "an adapter with LoRA folded in",
            "an adapter, which has no weights to fold it into",
            "Choose one of the two.",
        )
    with new_folder(folder, overwrite) as scratch:
        if report is not None:
            write_json(scratch / REPORT, report.as_dict())
        for name, account in (accounts or {}).items():
            write_json(scratch / name, account)
        if not merge:
            store_lora(model, scratch)
        if adapter_only:
            write_json(scratch / ADAPTER, section or _unconverted(loaded))
            safetensors.torch.save_file(_kernel_tensors(model), scratch / KERNELS)
            return
        folded = merged_weights(model) if merge else {}
        with without_lora(model):
            model.save_pretrained(scratch, state_dict=model.state_dict() | folded)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(scratch)


def load(
    ref: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    base: Loaded | None = None,
) -> Loaded:
    """Load any model, converted or not.

    Args:
        ref: Hugging Face id, folder, ``.gguf`` file, ``"smollm2-135m"``, a folder that
            :func:`save` wrote, or an adapter folder.
        dtype: precision of the weights (kernels stay fp32); the checkpoint's own by default.
        device: where to put it.
        base: the model an adapter belongs to, if not the one it names.

    Raises:
        ModelError: nothing loadable is there. CheckpointError: damaged, or not for this base.
    """
    folder = Path(ref)
    if (folder / ADAPTER).is_file():
        section = _read_json(folder / ADAPTER)
        if base is None:
            if not section.get("base"):
                raise CheckpointError(
                    f"adapter {folder}",
                    "no base named in it",
                    "Pass base=Loaded(model, tokenizer).",
                )
            base = load_pretrained(section["base"], dtype=dtype, device=device)
        return load_adapter(base, folder)
    config_file = folder / "config.json"
    stored = _read_json(config_file).get("linearize") if config_file.is_file() else None
    if stored is None:
        plain = load_pretrained(ref, dtype=dtype, device=device)
        restore_lora(plain.model, folder)
        return plain
    model, plan = _load_converted(folder, stored, dtype)
    restore_lora(model, folder)
    if device is not None:
        nn.Module.to(model, device)
    tokenizer = None
    if (folder / "tokenizer_config.json").is_file():
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            raise CheckpointError(
                f"the tokenizer of {folder}",
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                "A tokenizer file is missing or damaged; save it again.",
            ) from error
    return Loaded(model.eval(), tokenizer, plan, str(ref))


def load_adapter(base: Loaded, folder: str | Path) -> Loaded:
    """Put stored kernels and LoRA into their base model, in place.

    Raises:
        CheckpointError: the base has other layers or head shapes, is converted or adapted already,
            or tensors are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    section = _read_json(folder / ADAPTER)
    if converted_layers(base.model) or lora_layers(base.model):
        done = "converted" if converted_layers(base.model) else "adapted"
        raise CheckpointError(
            f"loading adapter {folder}", f"a model that is {done} already", "Load a fresh base."
        )
    if section.get("plan", section) is None:  # LoRA of an unconverted model
        restore_lora(base.model, folder)
        return Loaded(base.model.eval(), base.tokenizer, None, str(folder))
    layers, names, plan = _rebuild(section, folder)
    present = {layer.index: layer for layer in attention_layers(base.model)}
    for index, linear in layers.items():
        there = present.get(index)
        if there is None or there.shape != linear.shape:
            found = "no such layer" if there is None else str(there.shape)
            raise CheckpointError(
                f"adapter {folder} for layer {index} with {linear.shape}",
                f"a base with {found}",
                f"Use the base it was made for ({section.get('base')}).",
            )
        names[index] = there.name
    _fill(layers, names, folder)
    for linear in layers.values():
        linear.to(base.model.device)
    attach(base.model, layers, names, plan, section.get("base"))
    restore_lora(base.model, folder)
    return Loaded(base.model.eval(), base.tokenizer, plan, str(folder))


def _load_converted(
    folder: Path, section: dict[str, Any], dtype: torch.dtype | None
) -> tuple[PreTrainedModel, Plan]:
    layers, names, plan = _rebuild(section, folder)
    try:
        config = AutoConfig.from_pretrained(str(folder))
        base: Any = AutoModelForCausalLM._model_mapping[type(config)]

        class Converted(base):
            """The architecture with its converted layers in place before weights are loaded."""

            def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
                super().__init__(config, *args, **kwargs)
                attach(self, layers, names, plan, section.get("base"))

        Converted.__name__ = Converted.__qualname__ = base.__name__
        Converted.__module__ = base.__module__  # else transformers takes it for custom code
        model, info = Converted.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except LinearizeError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise CheckpointError(
            f"converted model {folder}",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "The folder is damaged or incomplete; save it again.",
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise CheckpointError(
                f"converted model {folder}",
                f"{kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:3]}",
                "The weights do not belong to this configuration; save the model again.",
            )
    model.config.linearize = section
    return model, plan


def _rebuild(
    section: dict[str, Any], folder: Path
) -> tuple[dict[int, LinearAttention], dict[int, str], Plan]:
    try:
        return rebuild(section)
    except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
        wrote = section.get("versions") if isinstance(section, dict) else None
        version = wrote.get("linearize", "unknown") if isinstance(wrote, dict) else "unknown"
        raise CheckpointError(
            f"converted model {folder}",
            f"a linearize section that cannot be read ({error})",
            f"Load it with the version of linearize that wrote it: {version}.",
        ) from error


def _fill(layers: dict[int, LinearAttention], names: dict[int, str], folder: Path) -> None:
    """Read the stored kernels into unfilled layers, exactly."""
    try:
        stored = safetensors.torch.load_file(folder / KERNELS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"kernels in {folder}", f"{error}", "The file is missing or damaged; save it again."
        ) from error
    expected = {
        f"{index}.{key}": value
        for index, linear in layers.items()
        for key, value in linear.state_dict().items()
    }
    check_tensors(
        expected,
        stored,
        source=str(folder / KERNELS),
        remedy="The kernels belong to another plan; load them with the plan they were saved with.",
    )
    for index, linear in layers.items():
        own = {key: stored[f"{index}.{key}"] for key in linear.state_dict()}
        linear.load_state_dict(own)


def _kernel_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        f"{index}.{key}": value.contiguous()
        for index, linear in converted_layers(model).items()
        for key, value in linear.state_dict().items()
    }


def _unconverted(loaded: Loaded) -> dict[str, Any]:
    """The account of an adapter that holds LoRA alone."""
    return {"plan": None, "base": loaded.ref, "layers": {}, "versions": versions()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}", f"{error}", "The file is damaged; save it again."
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}", "JSON that is no object", "Save the model again.")
    return content
