"""Tiny random models and what is done to them: shared by the tests of everything above the kernels.

The weights are drawn wide (standard deviation 0.2), so that attention is far from uniform and every
mistake in it moves the logits.
"""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import linearize
from linearize import Loaded, Plan
from linearize.attention import LinearAttention
from linearize.convert import check_layers
from linearize.converted import attach, converted_layers
from linearize.interface import recording, use_interface
from linearize.models import attention_layers

VOCAB = 99
LAYERS = 3
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
HIDDEN = HEADS * HEAD_DIM

_COMMON = {
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DECODER = _COMMON | {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 16384,
}
_HEAD_DIM = {"head_dim": HEAD_DIM}

# name -> (configuration class, its arguments)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DECODER),
    "qwen2": ("Qwen2Config", _DECODER),
    "qwen3": ("Qwen3Config", _DECODER | _HEAD_DIM),
    "mistral": ("MistralConfig", _DECODER | {"sliding_window": None}),
    "gemma": ("GemmaConfig", _DECODER | _HEAD_DIM),
    "gemma2": (
        "Gemma2Config",
        _DECODER | _HEAD_DIM | {"query_pre_attn_scalar": 16, "sliding_window": 4},
    ),
    "gpt2": (
        "GPT2Config",
        _COMMON
        | {
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 256,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
        | {"rotary_pct": 0.5},
    ),
    "phi": ("PhiConfig", _DECODER),
    "bloom": (
        "BloomConfig",
        _COMMON | {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
    ),
}
CONVERTIBLE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "gpt_neox", "phi")


def model(name: str = "llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A fresh random model in evaluation mode; ``changes`` go into its configuration."""
    class_name, arguments = ARCHITECTURES[name]
    config = getattr(transformers, class_name)(**arguments | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = transformers.AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in made.named_parameters():
            if parameter.ndim == 1:  # norms and biases, which start as ones and zeros
                spread = 0.3 * torch.randn_like(parameter)
                base = 0.0 if parameter_name.endswith("bias") else parameter.detach()
                parameter.data.copy_(base + spread)
    return made.eval()


def loaded(name: str = "llama", *, seed: int = 0, **changes: Any) -> Loaded:
    """The same as the library hands models around: without tokenizer."""
    return Loaded(model(name, seed=seed, **changes), None)


def text(tokens: int = 800, *, seed: int = 1) -> Tensor:
    """Random token ids ``[tokens]`` without the padding and BOS ids."""
    return torch.randint(2, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))


def prompt(batch: int, tokens: int, *, seed: int = 2) -> Tensor:
    """Random token ids ``[batch, tokens]`` without the padding and BOS ids."""
    return text(batch * tokens, seed=seed).view(batch, tokens)


def plan(**changes: Any) -> Plan:
    """A plan that fits a tiny model and :func:`text` in a fraction of a second."""
    settings: dict[str, Any] = {
        "layers": "all",
        "prompts": 4,
        "prompt_length": 16,
        "block": 64,
        "skip_blocks": 1,
        "fit_blocks": 4,
        "validation_blocks": 2,
        "positions": 32,
        "bootstrap": 50,
        "joint_steps": 4,
    }
    return Plan(**settings | changes)


# Every kind of converted layer that differs in what it stores or how it decodes. Kernels without an
# entry run with their defaults; see `variants`.
_VARIANTS: dict[str, dict[str, Any]] = {
    "oal": {"kernel": "oal"},
    "oal+window": {"kernel": "oal", "window": 4},
    "oal+hybrid": {"kernel": "oal", "window": 3, "sinks": 2, "center": True, "saturation": 4},
    "oal+sinks": {"kernel": "oal", "sinks": 3},
    "oal+rank": {"kernel": "oal", "sinks": 2, "window": 3, "center": True, "state_rank": 3},
    "global": {"kernel": "global"},
    "softmax+sinks+window": {"kernel": "softmax", "sinks": 2, "window": 3},
}
# Softmax beside it: in layers before and behind, and in KV heads of the same layer.
_MIXED: dict[str, dict[str, Any]] = {
    "oal in layer 1": {"kernel": "oal", "layers": "1"},
    "oal in some heads": {"kernel": "oal", "sinks": 1, "heads": "auto", "keep": "2"},
}
MIXED = tuple(_MIXED)
FITTED = ("oal", "global")  # fitted through `convert`, in a moment; others are filled at random


def variants() -> list[str]:
    """Every variant that converts all it can; the others are ``MIXED``."""
    others = [name for name in linearize.kernels.available() if name not in FITTED]
    return [*_VARIANTS, *others]


def variant_plan(variant: str, **changes: Any) -> Plan:
    """The plan of a variant."""
    return plan(**(_VARIANTS | _MIXED).get(variant, {"kernel": variant}) | changes)


def converted(variant: str = "oal", name: str = "llama", **changes: Any) -> Loaded:
    """A freshly converted tiny model of one's own."""
    result: Loaded = copy.deepcopy(_converted(variant, name, tuple(sorted(changes.items()))))
    return result


@cache
def _converted(variant: str, name: str, changes: tuple[tuple[str, Any], ...]) -> Loaded:
    settings = variant_plan(variant, **dict(changes))
    if settings.kernel in FITTED:
        return linearize.convert(loaded(name), text(), settings).loaded
    return filled(loaded(name), settings)


def filled(base: Loaded, settings: Plan, *, seed: int = 3) -> Loaded:
    """Convert in place without fitting: parameters moved at random, OAL groups drawn at random."""
    layers = check_layers(base.model, attention_layers(base.model), settings)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in layers:
        linear = LinearAttention.from_plan(settings, layer.shape, layer.index)
        for parameter in linear.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.1 * noise.to(parameter.dtype))
        groups = getattr(linear.kernel, "groups", None)
        if groups is not None:
            count = linear.kernel.factor.shape[-1] - 1
            groups.copy_(torch.randint(count, groups.shape, generator=generator))
            linear.kernel.factor.data.tril_()
        made[layer.index] = linear
    attach(base.model, made, {layer.index: layer.name for layer in layers}, settings, None)
    return Loaded(base.model, base.tokenizer, settings, base.ref)


def kernel_tensors(converted_model: PreTrainedModel) -> dict[str, Tensor]:
    """Everything the converted layers store, by name."""
    return {
        f"{index}.{key}": value.detach().clone()
        for index, linear in converted_layers(converted_model).items()
        for key, value in linear.state_dict().items()
    }


@torch.no_grad()
def logits(of: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits of one pass without cache, ``[B, N, vocabulary]``."""
    result: Tensor = of(input_ids=ids, use_cache=False, **inputs).logits
    return result


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Sequences of different lengths as one left-padded batch with mask and position ids."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, longest - len(row) :] = row
        mask[at, longest - len(row) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a character (ids 2 …), ``<pad>`` 0, ``<s>`` 1; ``bos`` puts ``<s>`` before texts."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {"<pad>": 0, "<s>": 1} | {c: 2 + i for i, c in enumerate(characters)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = Split("", "isolated")
    if bos:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", padding_side="left"
    )


def recorded(of: PreTrainedModel, ids: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of every layer in one ordinary pass over one sequence."""
    seen = {}

    def keep(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        seen[module.layer_idx] = (q.clone(), k.clone(), v.clone())

    with use_interface(of), recording(keep):
        logits(of, ids[None])
    return seen


FORMS = ("fresh", "loaded", "adapter")


@cache
def shared(variant: str = "oal", form: str = "fresh") -> Loaded:
    """A converted tiny Llama that tests only read: fresh, saved and loaded, or as an adapter."""
    fresh = converted(variant)
    if form == "fresh":
        return fresh
    with tempfile.TemporaryDirectory() as folder:
        linearize.save(fresh, folder, adapter_only=form == "adapter", overwrite=True)
        return linearize.load(folder, base=loaded() if form == "adapter" else None)


@torch.no_grad()
def decode(of: PreTrainedModel, ids: Tensor, sizes: list[int], cache: Any = None) -> Any:
    """Feed ``ids [B, N]`` in parts of these sizes through one cache -> (logits, cache)."""
    parts = []
    for part in ids.split(sizes, dim=1):
        output = of(input_ids=part, cache=cache, use_cache=True)
        cache = output.cache
        parts.append(output.logits)
    return torch.cat(parts, 1), cache
