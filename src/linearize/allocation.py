"""One budget of state memory, divided among the layers where it buys most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linearize.capture import capture
from linearize.errors import PlanError
from linearize.models import AttentionLayer
from linearize.ops.quadratic import feature_count
from linearize.plan import Plan
from linearize.transform import logit_directions

__all__ = ["allocate", "share"]


def allocate(
    model: PreTrainedModel, layers: Sequence[AttentionLayer], prompts: Sequence[Tensor], plan: Plan
) -> dict[int, int]:
    """The rank of every layer under ``plan.state_budget``, from second moments on the prompts.

    A rank is worth the mean square of the logits along its direction. Each step goes to the layer
    where it is worth most per byte.

    Raises:
        PlanError: the budget does not hold one direction a layer.
    """
    budget = plan.state_budget
    assert budget is not None
    shapes = {layer.index: layer.shape for layer in layers}
    prices = [_bytes(shape.kv_heads, shape.value_dim, 1) for shape in shapes.values()]
    if sum(prices) > budget:
        raise PlanError(
            f"states of {budget:,} bytes in all",
            f"{len(layers)} layers, whose smallest states take {sum(prices):,}",
            f"Allow at least {sum(prices):,}, or convert fewer layers.",
        )
    energies = {}
    for arrived in capture(model, prompts, list(shapes)):
        data, scale = arrived.activations(0, len(prompts)), shapes[arrived.index].scale
        keys = data.k[:, :, min(plan.sinks, data.k.shape[2] - 1) :]
        if plan.center:
            keys = keys - keys.mean((0, 2), keepdim=True)
        energies[arrived.index] = logit_directions(data.q, keys)[0].sum(0) * scale**2
    return share(energies, {i: (s.kv_heads, s.value_dim) for i, s in shapes.items()}, budget=budget)


def share(
    energies: dict[int, Tensor], shapes: dict[int, tuple[int, int]], *, budget: int
) -> dict[int, int]:
    """Greedy division.

    Args:
        energies: per layer, what each direction is worth, descending, ``[d]``.
        shapes: per layer, KV heads and value dimension.
        budget: bytes in all; at least one direction a layer must fit.
    """
    ranks = {layer: 1 for layer in energies}
    left = budget - sum(_bytes(*shapes[layer], 1) for layer in energies)
    worth = {layer: [float(x) for x in energy] for layer, energy in energies.items()}
    while True:
        options = []
        for layer, rank in ranks.items():
            if rank == len(worth[layer]):
                continue
            price = _bytes(*shapes[layer], rank + 1) - _bytes(*shapes[layer], rank)
            if price <= left:
                options.append((worth[layer][rank] / price, layer, price))
        if not options:
            return ranks
        _, layer, price = max(options)
        ranks[layer] += 1
        left -= price


def _bytes(kv_heads: int, value_dim: int, rank: int) -> int:
    return kv_heads * feature_count(rank) * (value_dim + 1) * torch.finfo(torch.float32).bits // 8
