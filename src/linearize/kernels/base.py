"""The Kernel contract. A module in this folder that defines one is available everywhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linearize.errors import PlanError
from linearize.fitting import Calibration, FitResult, match_outputs
from linearize.ops.features import Features, KernelMap, Weights
from linearize.ops.partial import fold_heads, unfold_heads

__all__ = ["HeadShape", "Kernel", "available", "get"]


@dataclass(frozen=True)
class HeadShape:
    """Head geometry of one attention layer: counts, dimensions and the model's logit scale."""

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float

    @property
    def ratio(self) -> int:
        """Query heads per KV head; query head ``h`` reads KV head ``h // ratio``."""
        return self.query_heads // self.kv_heads


class Kernel(nn.Module, ABC):
    """A positive kernel on query-key pairs with linear-time features.

    Subclasses define the feature maps, and override :meth:`weights` where the definition is not the
    plain inner product of features. Everything random is drawn in ``__init__`` from ``seed`` and
    stored in buffers; :meth:`settings` returns the arguments that rebuild the same structure, whose
    numbers then come from a checkpoint. Kernels know nothing of windows, sinks, caches or models.

    Attributes:
        name: how users call it.
        title: how tables and charts call it.
        source: paper and equation.
        dtype: precision of features and sums.
        shared_state: one state serves all query heads of a KV head.
        head_wise: every parameter leads with the query head, so each head is selected on its own.
        exact: it is softmax itself; a layer keeps every key for it instead of a state, or with a window
            no more than its exact keys.
        projects: keys in r directions give it a smaller state; see :meth:`projected`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    shared_state: bool = True
    dtype: torch.dtype = torch.float32
    head_wise: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    projects: ClassVar[bool] = False

    def __init__(self, shape: HeadShape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.seed = seed

    @classmethod
    def build(cls, shape: HeadShape, settings: dict[str, Any]) -> Kernel:
        """The kernel with the given settings.

        Raises:
            PlanError: it has no such setting, or a value is out of range.
        """
        known = [name for name in inspect.signature(cls).parameters if name != "shape"]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise PlanError(
                f"option {unknown[0]!r} of kernel {cls.name!r}",
                f"options {', '.join(known)}",
                "Use one of these in Plan(options=...).",
            )
        return cls(shape, **settings)

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of ``__init__`` (besides ``shape``) that rebuild this structure, as JSON."""
        return {"seed": self.seed}

    @property
    @abstractmethod
    def feature_count(self) -> int:
        """Number of features F; the state of one head holds ``F (dv + 1)`` numbers."""

    @abstractmethod
    def query_features(self, q: Tensor) -> Features:
        """``q [B, Hq, N, d]`` in ``dtype`` -> features ``[B, Hq, N, F]``."""

    @abstractmethod
    def key_features(self, k: Tensor) -> Features:
        """``k [B, Hkv, N, d]`` in ``dtype`` -> ``[B, Hs, N, F]``, Hs = Hkv if shared else Hq."""

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """Pairwise weights ``[B, Hq, Nq, Nk]``; the inner product of the features unless overridden."""
        query, keys = self.query_features(q), self.key_features(k)
        heads = q.shape[1]
        product = fold_heads(query.values, keys.values.shape[1]) @ keys.values.transpose(-1, -2)
        key_log = keys.log_scale
        if key_log is not None:
            key_log = key_log.transpose(-1, -2)
            key_log = key_log.repeat_interleave(heads // key_log.shape[1], dim=1)
        return Weights(unfold_heads(product, heads), query.log_scale, key_log)

    def map(self) -> KernelMap:
        """The kernel map for the current parameters, made once per attention call."""
        return self

    def projected(self, directions: Tensor) -> KernelMap:
        """The same kernel on keys ``k = directions @ z``, as a map on the coordinates ``z``.

        ``directions`` is ``[Hkv, d, r]``; the map has ``1 + r + r(r+1)/2`` features. Only kernels with
        ``projects`` have one.
        """
        raise NotImplementedError

    def select(self, kv_heads: Sequence[int]) -> Kernel:
        """The kernel of some KV heads, with their query heads, as a kernel of its own.

        Numbers that belong to a head lead with it (query or KV head); all others are shared.
        """
        shape = self.shape
        queries = [h * shape.ratio + i for h in kv_heads for i in range(shape.ratio)]
        part = replace(shape, query_heads=len(queries), kv_heads=len(kv_heads))
        chosen = type(self).build(part, self.settings())
        numbers = {**dict(chosen.named_parameters()), **dict(chosen.named_buffers())}
        with torch.no_grad():
            for name, value in self.state_dict().items():
                if numbers[name].shape != value.shape:
                    heads = queries if len(value) == shape.query_heads else list(kv_heads)
                    value = value[heads]
                numbers[name].data = value.clone()
        chosen.dtype = self.dtype
        return chosen

    def fit(self, calibration: Calibration) -> FitResult | None:
        """Learn structure and parameters from frozen activations; ``None`` if there is nothing to.

        By default every parameter is trained by gradient steps on the layer's outputs.
        """
        if not (self.trainable_numbers or calibration.parameters):
            return None
        return match_outputs(self, calibration, head_wise=self.head_wise)[0]

    @property
    def state_heads(self) -> int:
        """How many states the layer keeps: one per KV head if shared, else one per query head."""
        return self.shape.kv_heads if self.shared_state else self.shape.query_heads

    @property
    def state_numbers(self) -> int:
        """Numbers in the state of all heads, on all dimensions of the keys."""
        return self.state_heads * self.feature_count * (self.shape.value_dim + 1)

    @property
    def trainable_numbers(self) -> int:
        """Trainable numbers of this layer."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def repeat_keys(self, k: Tensor) -> Tensor:
        """``[B, Hkv, N, d]`` -> ``[B, Hq, N, d]`` for maps that differ between query heads."""
        return k.repeat_interleave(self.shape.ratio, dim=1)


def available() -> list[str]:
    """Names of all kernels, sorted."""
    return sorted(_discover())


def get(name: str) -> type[Kernel]:
    """The kernel class called ``name``.

    Raises:
        PlanError: there is none.
    """
    found = _discover()
    if name not in found:
        raise PlanError(
            f"kernel {name!r}", f"kernels {', '.join(sorted(found))}", "Choose one of these."
        )
    return found[name]


@cache
def _discover() -> dict[str, type[Kernel]]:
    package = importlib.import_module("linearize.kernels")
    found: dict[str, type[Kernel]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"linearize.kernels.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Kernel) and "name" in vars(value):
                found[value.name] = value
    return found
