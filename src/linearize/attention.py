"""One converted attention layer: exact sinks and window, and a kernel for all other keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linearize import kernels
from linearize.errors import PlanError
from linearize.fitting import (
    Activations,
    Calibration,
    FitResult,
    match_outputs,
    softmax_outputs,
)
from linearize.kernels import HeadShape, Kernel
from linearize.ops import Features, KernelMap, State, Weights, kernel_attention
from linearize.ops.features import Grouped, grouped_form
from linearize.ops.quadratic import feature_count
from linearize.plan import Plan
from linearize.transform import KeyTransform

__all__ = ["LayerError", "LinearAttention", "Part", "take_heads"]

Part = Literal["both", "exact", "kernel"]
EVERY_KEY = 2**62  # a window no sequence fills
JOINT_RATE = 0.1  # peak learning rate of the joint fit, in units of a parameter's root mean square
JOINT_POSITIONS = 16  # query positions of a step; twice as many cost half more time and gain 1 %
JOINT_CHECKS = 200  # steps between two validations


@dataclass(frozen=True)
class LayerError:
    """Output error of one layer against softmax, per query head, over all positions.

    ``mse`` is the mean square error; ``relative`` divides the summed square error by the summed
    square of the softmax output.
    """

    mse: list[float]
    relative: list[float]


class LinearAttention(nn.Module):
    """A kernel with its key transform and its exact neighbours, under one shared denominator.

    Args:
        kernel: the kernel, shaped like the heads it serves.
        sinks, window: how many first and latest keys stay exact. Softmax as a kernel keeps every key
            without a window; with one, these keys alone.
        saturation: how many keys the kernel's part counts for at most beside the exact ones; ``None``
            for as many as there are.
        center: whether the kernel sees ``k - μ``; softmax is unchanged by such a shift.
        rank: how many directions of the keys the kernel sees; ``None`` for all.
        heads: the layer's KV heads that the kernel serves; the others keep their softmax. ``None``: all.
        shape: of the whole layer, if the kernel serves a part of it.

    ``part`` restricts the layer to its exact keys or to its kernel, to see what each is worth;
    with ``"kernel"`` every key goes through the kernel.

    A kernel that stands beside exact keys gets a learned gain (a log-scale per query head), so that
    the two parts agree on their size. Parameters and buffers keep their precision when the model is
    cast to a half type.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        sinks: int = 0,
        window: int = 0,
        saturation: int | None = None,
        center: bool = False,
        rank: int | None = None,
        heads: tuple[int, ...] | None = None,
        shape: HeadShape | None = None,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.sinks = sinks
        self.window = EVERY_KEY if kernel.exact and not window else window
        self.saturation = saturation
        self.heads = heads
        self.shape = shape or kernel.shape
        shape = kernel.shape
        self.keys = KeyTransform(shape.kv_heads, shape.head_dim, center=center, rank=rank)
        self.part: Part = "both"
        self.active = True  # false: the module falls through to the softmax it had
        self.cache_layer: Any = None  # the cache layer of the call under way, set by its pre-hook
        self.gain: nn.Parameter | None = None
        if (sinks or window) and not kernel.exact:
            self.gain = nn.Parameter(torch.zeros(shape.query_heads))

    @staticmethod
    def from_plan(
        plan: Plan, shape: HeadShape, layer: int, settings: dict[str, Any] | None = None
    ) -> LinearAttention:
        """The unfitted layer ``plan`` asks for; ``settings`` say what is known of its structure.

        Args:
            plan: the plan. shape: of the whole layer. layer: zero-based index.
            settings: parts of what :meth:`settings` returned; the plan decides the rest.

        Raises:
            PlanError: the kernel has no such option, or cannot work on the plan's directions.
        """
        cls = kernels.get(plan.kernel)
        known = {"rank": plan.state_rank, "heads": None, **(settings or {})}
        rank, heads = known["rank"], known["heads"]
        if rank is not None or plan.state_budget is not None:
            _check_rank(cls, rank or 1, shape)
        served = shape
        if heads is not None:
            heads = tuple(heads)
            served = replace(shape, query_heads=len(heads) * shape.ratio, kv_heads=len(heads))
        options = known.get("kernel", {"seed": plan.seed * 1000 + layer, **plan.options})
        return LinearAttention(
            cls.build(served, options),
            sinks=plan.sinks,
            window=plan.window,
            saturation=plan.saturation,
            center=plan.center,
            rank=rank,
            heads=heads,
            shape=shape,
        )

    def settings(self) -> dict[str, Any]:
        """What :meth:`from_plan` needs, beside plan and shape, to rebuild this structure, as JSON."""
        heads = None if self.heads is None else list(self.heads)
        return {"kernel": self.kernel.settings(), "rank": self.keys.rank, "heads": heads}

    def select(self, heads: Sequence[int]) -> LinearAttention:
        """The same for some of the KV heads it serves (numbered as in the layer), a copy."""
        served = range(self.kernel.shape.kv_heads) if self.heads is None else self.heads
        rows = [list(served).index(head) for head in heads]
        ratio = self.kernel.shape.ratio
        part = LinearAttention(
            self.kernel.select(rows),
            sinks=self.sinks,
            window=self.window,
            saturation=self.saturation,
            center=self.keys.center is not None,
            rank=self.keys.rank,
            heads=tuple(heads),
            shape=self.shape,
        )
        part.part, part.active = self.part, self.active
        for name, value in self.keys.state_dict().items():
            getattr(part.keys, name).data = value[rows].clone()
        if self.gain is not None and part.gain is not None:
            part.gain.data = self.gain.detach().unflatten(0, (-1, ratio))[rows].flatten().clone()
        return part.to(self._device)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        state: State | None = None,
        backend: str = "auto",
        return_state: bool = True,
        overwrite: bool = False,
    ) -> tuple[Tensor, State | None]:
        """``q [B, Hq, N, d]``, new keys and values ``[B, Hkv, N, ·]`` -> output and next state.

        Autocast does not reach inside: weights, features and sums keep the kernel's precision.
        """
        with torch.autocast(q.device.type, enabled=False):
            return kernel_attention(
                self.map(),
                q,
                k,
                v,
                scale=self.kernel.shape.scale,
                sinks=0 if self.part == "kernel" else self.sinks,
                window=0 if self.part == "kernel" else self.window,
                saturation=self.saturation,
                key_mask=key_mask,
                state=state,
                backend=backend,
                return_state=return_state,
                overwrite=overwrite,
            )

    def output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output alone, on whole sequences."""
        return self(q, k, v, return_state=False)[0]

    def served(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads that the kernel serves, of a whole layer's queries, keys and values."""
        if self.heads is None:
            return q, k, v
        chosen = list(self.heads)
        return take_heads(q, chosen, k.shape[1]), k[:, chosen], v[:, chosen]

    def map(self) -> KernelMap:
        """The kernel map as this layer presents it: transformed keys, gain applied."""
        gain: Tensor | None = self.gain
        if self.part == "exact" or self.kernel.exact:  # weights of zero: only the exact keys speak
            gain = torch.full((self.kernel.shape.query_heads,), -torch.inf, device=self._device)
        up = self.keys.up
        kernel = self.kernel.map() if up is None else self.kernel.projected(up)
        return _View(kernel, self.keys, gain)

    def fit(self, calibration: Calibration) -> FitResult | None:
        """Fit the layer on frozen activations.

        The key transform starts from moments of queries and keys, the kernel (and its gain) is
        fitted to what it leaves of the keys; then all of them together follow the output error for
        ``plan.joint_steps`` gradient steps.
        """
        self.keys.fit(calibration.fit, self.sinks)
        seen = replace(
            calibration,
            kernel_prompts=self.transformed(calibration.prompts),
            kernel_fit=self.transformed(calibration.fit),
            kernel_validation=self.transformed(calibration.validation),
            view=lambda kernel: _View(kernel, None, self.gain),
            parameters=() if self.gain is None else (self.gain,),
        )
        result = self.kernel.fit(seen)
        steps = calibration.plan.joint_steps
        if self.keys.identity or self.kernel.exact or not steps:
            return result
        joint, _ = match_outputs(
            self,
            calibration,
            steps=steps,
            learning_rate=lambda p: JOINT_RATE * (1.0 if p is self.gain else _size(p)),
            decay=True,
            positions=JOINT_POSITIONS,
            validate_every=JOINT_CHECKS,
            head_wise=self.kernel.head_wise,
            start="joint",
        )
        if result is None:
            return joint
        return FitResult(joint.fit_mse, result.start, result.curve + joint.curve)

    @torch.no_grad()
    def error(self, data: Activations) -> LayerError:
        """Output error on whole sequences, by the linear-time engine that will serve the layer."""
        squared = torch.zeros(self.kernel.shape.query_heads, dtype=torch.float64)
        energy = torch.zeros_like(squared)
        for block in range(len(data)):
            part = slice(block, block + 1)
            output, _ = self(data.q[part], data.k[part], data.v[part])
            target = softmax_outputs(data, self.kernel.shape.scale, block).double()
            squared += (output[0].double() - target).square().sum((1, 2))
            energy += target.square().sum((1, 2))
        count = len(data) * data.q.shape[2] * data.v.shape[3]
        return LayerError((squared / count).tolist(), (squared / energy).tolist())

    @property
    def every_key(self) -> bool:
        """Whether all keys stay exact, so that time and memory grow as softmax's do."""
        return self.window == EVERY_KEY

    @property
    def state_numbers(self) -> int:
        """Numbers in one sequence's decoding state, apart from what grows."""
        return sum(self._stored)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's decoding state with the model in fp32, apart from what grows.

        Zero for softmax over every key.
        """
        sums, exact = self._stored
        return sums * (torch.finfo(self.kernel.dtype).bits // 8) + exact * 4

    @property
    def _stored(self) -> tuple[int, int]:
        """Numbers in the kernel's sums, and in exact keys and values."""
        if self.every_key:
            return 0, 0
        shape, rank = self.kernel.shape, self.keys.rank
        features = self.kernel.feature_count if rank is None else feature_count(rank)
        features = max(features, 1)  # softmax over its exact keys stores one, which is zero
        sums = self.kernel.state_heads * features * (shape.value_dim + 1)
        exact = (self.sinks + self.window) * shape.kv_heads * (shape.head_dim + shape.value_dim)
        return sums, exact

    def transformed(self, data: Activations) -> Activations:
        """The activations with the keys as the kernel sees them."""
        if self.keys.identity:
            return data
        with torch.no_grad():
            return data.with_keys(self.keys(data.k))

    @property
    def _device(self) -> torch.device:
        tensors = [*self.parameters(), *self.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearAttention:
        """Follow the model to another device, but never to another precision."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_precision, recurse)
        return self


def take_heads(x: Tensor, kv_heads: Sequence[int], count: int) -> Tensor:
    """The heads of ``x [B, H, …]`` that belong to some of ``count`` KV heads."""
    return x.unflatten(1, (count, -1))[:, list(kv_heads)].flatten(1, 2)


def _size(parameter: Tensor) -> float:
    """Root mean square, and a hundredth for what starts at zero."""
    return max(float(parameter.detach().square().mean().sqrt()), 0.01)


def _check_rank(kernel: type[Kernel], rank: int, shape: HeadShape) -> None:
    if not kernel.projects:
        able = [name for name in kernels.available() if kernels.get(name).projects]
        raise PlanError(
            f"a state of rank {rank} for kernel {kernel.name!r}",
            "a kernel whose state does not shrink with the directions of the keys",
            f"Use one of {', '.join(able)}, or leave the rank out.",
        )
    if rank > shape.head_dim:
        raise PlanError(
            f"a state of rank {rank}",
            f"keys of {shape.head_dim} dimensions",
            f"Use at most {shape.head_dim}; leaving the rank out keeps them all.",
        )


class _View:
    """A kernel map seen through a transform of the keys and a gain on the weights."""

    def __init__(self, kernel: KernelMap, keys: KeyTransform | None, gain: Tensor | None) -> None:
        self._kernel, self._keys, self._gain = kernel, keys, gain
        self.dtype = kernel.dtype
        self.shared_state = kernel.shared_state

    def query_features(self, q: Tensor) -> Features:
        values, log_scale = self._kernel.query_features(q)
        return Features(values, self._with_gain(log_scale, q))

    def key_features(self, k: Tensor) -> Features:
        return self._kernel.key_features(self._see(k))

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        values, query_log, key_log = self._kernel.weights(q, self._see(k))
        return Weights(values, self._with_gain(query_log, q), key_log)

    def grouped(self, q: Tensor, k: Tensor) -> Grouped | None:
        form = grouped_form(self._kernel, q, self._see(k))
        return form and form._replace(query_log=self._with_gain(form.query_log, q))

    def _see(self, k: Tensor) -> Tensor:
        return k if self._keys is None else self._keys.coordinates(k)

    def _with_gain(self, log_scale: Tensor | None, q: Tensor) -> Tensor | None:
        if self._gain is None:
            return log_scale
        gain = self._gain.to(q.dtype)[:, None, None].expand(q.shape[0], -1, q.shape[2], 1)
        return gain if log_scale is None else log_scale + gain
