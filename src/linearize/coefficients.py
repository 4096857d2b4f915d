"""The coefficient file of the OAL authors: read it into a model, write it from one.

Layout (SPEC section 2): ``layers["4"].heads["0"]`` holds the groups (bulk first), the row-major lower
triangle of L and the matrix ``M = L Lᵀ``, both zero-padded to the layer's ``max_groups``; the kernel is
``epsilon + ‖[1, z_1, …, z_K] L‖²`` with the scale inside z.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.attention import LinearAttention
from linearize.convert import ConversionReport, check_layers
from linearize.converted import attach, converted_layers
from linearize.errors import CheckpointError
from linearize.kernels.oal import OAL
from linearize.models import AttentionLayer, Loaded, attention_layers
from linearize.output import write_json
from linearize.plan import Plan

__all__ = ["export_coefficients", "import_coefficients"]


def export_coefficients(
    loaded: Loaded, file: str | Path, report: ConversionReport | None = None
) -> None:
    """Write the groups and factors of every converted layer.

    Args:
        loaded: a model converted with an OAL kernel.
        file: JSON file to write.
        report: gives ``validation_output_mse``; ``null`` without it.

    Raises:
        CheckpointError: a converted layer has another kernel, or keeps keys exact or centred, which
            the file cannot say.
    """
    layers = converted_layers(loaded.model)
    if not layers:
        raise CheckpointError(
            "exporting coefficients", "a model without converted layers", "Convert it first."
        )
    kernels = {index: _plain(index, linear) for index, linear in sorted(layers.items())}
    errors = {one.layer: one.validation_mse for one in report.layers} if report else {}
    first = next(iter(kernels.values()))
    content = {
        "model_name": loaded.ref,
        "layer_ids_zero_based": list(kernels),
        "head_dim": first.shape.head_dim,
        "epsilon": first.eps,
        "seq_len": loaded.plan.block if loaded.plan else None,
        "layers": {
            str(index): {
                "max_groups": kernel.factor.shape[-1] - 1,
                "heads": {
                    str(head): _export_head(kernel, head, errors.get(index))
                    for head in range(kernel.shape.query_heads)
                },
            }
            for index, kernel in kernels.items()
        },
    }
    write_json(file, content)


def import_coefficients(loaded: Loaded, file: str | Path) -> Loaded:
    """Convert a model, in place, with groups and factors from a file; nothing is fitted.

    Raises:
        CheckpointError: the file is damaged or does not fit the model's layers and heads.
        PlanError: a layer cannot be converted.
    """
    path = Path(file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        indices = [int(index) for index in content["layer_ids_zero_based"]]
        eps, dim = float(content["epsilon"]), int(content["head_dim"])
        heads = {index: content["layers"][str(index)]["heads"] for index in indices}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"coefficient file {path}",
            f"{type(error).__name__}: {error}",
            "Give a JSON file with layer_ids_zero_based, head_dim, epsilon and layers.",
        ) from error
    plan = Plan(kernel=OAL.name, layers=indices, eps=eps, block=content.get("seq_len") or 4096)
    layers = check_layers(loaded.model, attention_layers(loaded.model), plan)
    fitted = {}
    for layer in layers:
        if layer.shape.head_dim != dim:
            raise CheckpointError(
                f"coefficients for head_dim {dim}",
                f"head_dim {layer.shape.head_dim} in layer {layer.index}",
                f"Use the model they were made for ({content.get('model_name')}).",
            )
        fitted[layer.index] = _import_layer(layer, heads[layer.index], plan, path)
    names = {layer.index: layer.name for layer in layers}
    attach(loaded.model, fitted, names, plan, loaded.ref)
    return Loaded(loaded.model, loaded.tokenizer, plan, loaded.ref)


def _plain(index: int, linear: LinearAttention) -> OAL:
    kernel = linear.kernel
    if not isinstance(kernel, OAL):
        raise CheckpointError(
            f"the coefficients of layer {index}",
            f"kernel {kernel.name!r}, which has no groups",
            "Only OAL and the learned global quadratic can be written in this form.",
        )
    if linear.sinks or linear.window or not linear.keys.identity or linear.heads:
        raise CheckpointError(
            f"the coefficients of layer {index}",
            "exact keys or heads, or transformed keys, which the file cannot hold",
            "Save the model with linearize.save(..., adapter_only=True) instead.",
        )
    return kernel


def _export_head(kernel: OAL, head: int, errors: list[float] | None) -> dict[str, Any]:
    groups, count = kernel.groups[head], kernel.group_counts[head]
    members = [(groups == group).nonzero().flatten().tolist() for group in range(count)]
    factor = kernel.factor.detach()[head].double().tril().clone()
    factor[count + 1 :] = 0
    rows, columns = torch.tril_indices(*factor.shape)
    return {
        "group_count": count,
        "groups": members,
        "special_dims": sorted(dim for group in members[1:] for dim in group),
        "packed_lower_triangular": factor[rows, columns].tolist(),
        "expanded_quadratic_matrix": (factor @ factor.T).tolist(),
        "validation_output_mse": None if errors is None else errors[head],
    }


def _import_layer(
    layer: AttentionLayer, heads: Mapping[str, Any], plan: Plan, path: Path
) -> LinearAttention:
    linear = LinearAttention.from_plan(plan, layer.shape, layer.index, {"eps": plan.eps})
    kernel = linear.kernel
    assert isinstance(kernel, OAL)
    try:
        read = [
            _import_head(heads[str(head)], layer.shape.head_dim)
            for head in range(layer.shape.query_heads)
        ]
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"the heads of layer {layer.index} in {path}",
            f"{type(error).__name__}: {error}",
            f"The file must give groups and a packed factor for {layer.shape.query_heads} heads.",
        ) from error
    if len(heads) != len(read):
        raise CheckpointError(
            f"{len(heads)} heads for layer {layer.index}",
            f"a layer with {len(read)} query heads",
            "Use the model the coefficients were made for.",
        )
    size = max(factor.shape[0] for _, factor in read)
    factors = torch.zeros(len(read), size, size, dtype=torch.float64)
    for head, (_, factor) in enumerate(read):
        factors[head, : factor.shape[0], : factor.shape[0]] = factor
    kernel.assign(torch.stack([groups for groups, _ in read]), factors)
    return linear


def _import_head(entry: Mapping[str, Any], dim: int) -> tuple[Tensor, Tensor]:
    """Groups ``[d]`` and factor ``[n, n]`` of one head."""
    groups = torch.full((dim,), -1, dtype=torch.long)
    for group, members in enumerate(entry["groups"]):
        groups[torch.tensor(members, dtype=torch.long)] = group
    if bool((groups < 0).any()):
        raise ValueError(f"dimensions {(groups < 0).nonzero().flatten().tolist()} in no group")
    packed = torch.tensor(entry["packed_lower_triangular"], dtype=torch.float64)
    size = int((8 * len(packed) + 1) ** 0.5 - 1) // 2
    if size * (size + 1) // 2 != len(packed) or size < len(entry["groups"]) + 1:
        raise ValueError(f"{len(packed)} packed numbers for {len(entry['groups'])} groups")
    factor = torch.zeros(size, size, dtype=torch.float64)
    rows, columns = torch.tril_indices(size, size)
    factor[rows, columns] = packed
    return groups, factor
