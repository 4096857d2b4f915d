"""Attention transfer (LoLCATs, section 3.1): converted layers learn softmax outputs, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from linearize.attention import LinearAttention, take_heads
from linearize.converted import converted_layers
from linearize.interface import recording

__all__ = ["transfer_backward"]


def transfer_backward(model: PreTrainedModel, ids: Tensor, weight: float) -> float:
    """Add the gradients of the transfer loss on a batch to the kernel parameters.

    The loss is the mean over the converted layers of ``‖ŷ - y‖² / ‖y‖²``: the layer's output before
    the output projection against softmax on the same queries, keys and values. Softmax outputs are
    passed on, so that every layer works on the activations of the original model and each is a
    problem of its own: gradients are formed inside the layer and no activation is kept.

    Args:
        ids: ``[B, N]``. weight: factor on the gradients.

    Returns:
        the loss, without the factor.
    """
    count = len(converted_layers(model))
    losses: list[float] = []

    def learn(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, kwargs: dict[str, Any]
    ) -> Tensor | None:
        linear = getattr(module, "linear_attention", None)
        if not isinstance(linear, LinearAttention):
            return None
        with torch.autocast(q.device.type, enabled=False):
            q, k, wide = q.float(), k.float(), v.float()
            target = functional.scaled_dot_product_attention(
                q, k, wide, is_causal=True, scale=scale, enable_gqa=True
            )
            wanted = target
            if linear.heads is not None:
                wanted = take_heads(target, linear.heads, k.shape[1])
            with torch.enable_grad():
                output = linear.output(*linear.served(q, k, wide))
                loss = (output - wanted).square().sum() / wanted.square().sum()
                if loss.requires_grad:
                    (loss * (weight / count)).backward()
        losses.append(float(loss.detach()))
        return target.to(v.dtype)

    with torch.no_grad(), recording(learn):
        model.base_model(input_ids=ids, use_cache=False)
    return sum(losses) / count
