"""Logits of the last positions only: the head is a good part of the work of a small model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["logits_from"]


@torch.no_grad()
def logits_from(
    model: PreTrainedModel, ids: Tensor, first: int, mask: Tensor | None = None
) -> Tensor:
    """Logits ``[B, N - first, vocabulary]`` of positions ``first`` and later.

    Args:
        ids: token ids ``[B, N]``. mask: 1 for tokens, 0 for padding, ``[B, N]``.
    """
    given: dict[str, Any] = {} if mask is None else {"attention_mask": mask.to(model.device)}
    spares = "logits_to_keep" in inspect.signature(model.forward).parameters
    if spares:
        given["logits_to_keep"] = ids.shape[1] - first
    logits: Tensor = model(input_ids=ids.to(model.device), use_cache=False, **given).logits
    return logits if spares else logits[:, first:]
