"""Continuing a prompt with a model, and what its cache holds afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from linearize.cache import cache_bytes
from linearize.errors import ModelError, TextError
from linearize.models import Loaded

__all__ = ["Continuation", "continue_prompt"]


@dataclass(frozen=True)
class Continuation:
    """A continued prompt.

    Attributes:
        text: what follows the prompt. prompt_tokens, new_tokens: how many tokens there are.
        cache_bytes: decoding memory at the end, all layers and beams.
        seconds: from the prompt to the last token.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    cache_bytes: int
    seconds: float


def continue_prompt(
    loaded: Loaded, prompt: str, *, seed: int, stream: bool = False, **settings: Any
) -> Continuation:
    """Continue a prompt, as ``model.generate(**settings)`` does.

    Args:
        loaded: any model with a tokenizer. prompt: taken as it is, without a chat template.
        seed: of sampling. stream: print the tokens as they come (not with beams).

    Raises:
        ModelError: there is no tokenizer. TextError: the prompt has no token.
    """
    tokenizer: Any = loaded.tokenizer
    if tokenizer is None:
        raise ModelError(
            f"text from {loaded.ref}",
            "a model without tokenizer",
            "Save the tokenizer in its folder.",
        )
    inputs = tokenizer(prompt, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    if not length:
        raise TextError("continuing a prompt", "no token in it", "Give a longer --prompt.")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(seed)
    started = time.perf_counter()
    model: Any = loaded.model
    made = model.generate(
        input_ids=inputs["input_ids"].to(model.device),
        attention_mask=inputs["attention_mask"].to(model.device),
        pad_token_id=pad,
        return_dict_in_generate=True,
        streamer=streamer if stream else None,
        **settings,
    )
    seconds = time.perf_counter() - started
    new = made.sequences[0, length:]
    return Continuation(
        tokenizer.decode(new, skip_special_tokens=True),
        length,
        len(new),
        cache_bytes(made.past_key_values),
        seconds,
    )
