"""Hedgehog: learned feature maps that imitate the attention weights of softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linearize.errors import PlanError
from linearize.fitting import Calibration, FitResult, match_outputs
from linearize.fitting.match import Objective
from linearize.kernels.base import HeadShape, Kernel
from linearize.ops.features import Features, KernelMap
from linearize.ops.partial import fold_heads, log_held, unfold_heads

__all__ = ["Hedgehog", "weight_matching"]

MATCHES = ("weights", "outputs")


class Hedgehog(Kernel):
    """``φ(x) = softmax([W x; −W x])``, W per query head, apart for queries and keys.

    W starts as the identity. With a window of exact keys this is the kernel of LoLCATs, which
    matches outputs.

    Args:
        shape: head geometry.
        match: ``"weights"`` trains by the cross-entropy to the softmax attention weights (the
            Hedgehog paper), ``"outputs"`` by the error of the outputs (LoLCATs).
        seed: unused; nothing is random.

    Raises:
        PlanError: ``match`` is unknown.
    """

    name = "hedgehog"
    title = "Hedgehog"
    source = "The Hedgehog & the Porcupine, section 4"
    shared_state = False

    def __init__(self, shape: HeadShape, *, match: str = "weights", seed: int = 0) -> None:
        super().__init__(shape, seed=seed)
        if match not in MATCHES:
            raise PlanError(
                f"hedgehog with match={match!r}", f"choices {', '.join(MATCHES)}", "Choose one."
            )
        self.match = match
        identity = torch.eye(shape.head_dim, dtype=torch.float32).expand(shape.query_heads, -1, -1)
        self.query_map = nn.Parameter(identity.clone())
        self.key_map = nn.Parameter(identity.clone())

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "match": self.match}

    @property
    def feature_count(self) -> int:
        return 2 * self.shape.head_dim

    def query_features(self, q: Tensor) -> Features:
        return _spikes(q, self.query_map)

    def key_features(self, k: Tensor) -> Features:
        return _spikes(self.repeat_keys(k), self.key_map)

    def fit(self, calibration: Calibration) -> FitResult:
        """Train W; steps, blocks and the selection by validation output error are those of all."""
        objective = weight_matching(calibration) if self.match == "weights" else None
        return match_outputs(self, calibration, objective=objective)[0]


def weight_matching(calibration: Calibration) -> Objective:
    """Cross-entropy from softmax attention weights to the layer's own normalised weights, ``[Hq]``.

    Keys that the plan keeps exact enter with their exact weight, under the same denominator.
    """
    data, seen, plan = calibration.fit, calibration.kernel_fit, calibration.plan

    def cross_entropy(kernel: KernelMap, block: int, at: Tensor) -> Tensor:
        part = slice(block, block + 1)
        q, k = data.q[part, :, at].to(kernel.dtype), data.k[part].to(kernel.dtype)
        folded = fold_heads(q * calibration.scale, k.shape[1]) @ k.transpose(-1, -2)
        logits = unfold_heads(folded, q.shape[1])
        key = torch.arange(k.shape[2], device=k.device)
        distance = at[:, None] - key
        causal = distance >= 0
        exact = causal & ((key < plan.sinks) | (distance < plan.window))

        values, query_log, key_log = kernel.weights(q, seen.k[part].to(kernel.dtype))
        own = values.clamp(min=torch.finfo(values.dtype).tiny).log()
        for log_scale in (query_log, key_log):
            own = own if log_scale is None else own + log_scale
        if plan.saturation is not None:
            count = (causal & ~exact).sum(-1, keepdim=True)
            own = own + log_held(count, plan.saturation, own.dtype)
        own = torch.where(exact, logits, own).masked_fill(~causal, -torch.inf)
        target = logits.masked_fill(~causal, -torch.inf).softmax(-1)
        log_share = own.log_softmax(-1).masked_fill(~causal, 0)
        return -(target * log_share).sum(-1).mean((0, 2))

    return cross_entropy


def _spikes(x: Tensor, weight: Tensor) -> Features:
    """``x [B, Hq, N, d]``, ``weight [Hq, d, d]`` -> ``[B, Hq, N, 2d]``."""
    mapped = x @ weight.to(x.dtype).transpose(-1, -2)
    return Features(torch.cat([mapped, -mapped], dim=-1).softmax(-1))
