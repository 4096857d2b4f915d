"""The ways to compute one attention layer, and whether each gives the definition's output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from linearize import kernels as catalogue
from linearize.attention import LinearAttention
from linearize.bench.oracle import BOUNDS, deviation, expected, in_double
from linearize.errors import LinearizeError
from linearize.kernels import HeadShape
from linearize.plan import Plan

__all__ = [
    "CHECKED",
    "DTYPES",
    "AttentionPath",
    "arithmetic",
    "check_small",
    "layer_of",
    "paths_of",
    "random_inputs",
    "short",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKED = 200  # tokens of the check of every output and gradient; no multiple of a chunk
GRADIENT_SLACK = 4  # gradients divide twice by the denominator

SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
ON_CUDA = {"efficient": SDPBackend.EFFICIENT_ATTENTION}


@dataclass
class AttentionPath:
    """A way to compute attention, and what is known of it so far.

    Attributes:
        name, title: how options and tables call it.
        layer: the kernel's layer; ``None`` for SDPA.
        run: from ``q [1, Hq, N, d]``, ``k [1, Hkv, N, d]``, ``v [1, Hkv, N, dv]`` to the output.
        oracle: the same layer (softmax for SDPA) in fp64.
        quadratic: whether its time grows with the square of the length.
        score_bytes: bytes it needs for every pair of query and key of a head.
        known: by name, a length and what was measured there.
        error, gradient_error: what :func:`check_small` found.
        refusal: status and reason, if it is not to be timed.
    """

    name: str
    title: str
    layer: LinearAttention | None
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    oracle: LinearAttention
    quadratic: bool
    score_bytes: int
    known: dict[str, tuple[int, float]] = field(default_factory=dict)
    error: float = math.nan
    gradient_error: float | None = None
    refusal: tuple[str, str] | None = None

    def predicted(self, what: str, tokens: int, power: int) -> float:
        """What was measured at a shorter length, grown with a power of the length; 0 if nothing."""
        if what not in self.known:
            return 0.0
        before, value = self.known[what]
        return float(value * (tokens / before) ** power)


def arithmetic(layer: LinearAttention | None, shape: HeadShape, tokens: int) -> float:
    """Floating-point operations a method cannot do without, for one causal pass.

    Softmax: both products over the causal pairs. A kernel: reading its state once per query head and
    adding to it once per state head, ``2 F (dv + 1)`` each, and both products over its exact keys.
    Forming features and the pairs inside a chunk are an implementation's own and do not count, so
    that one number is comparable between implementations.
    """
    pairs = 2 * shape.query_heads * (shape.head_dim + shape.value_dim)
    if layer is None or layer.every_key:
        return pairs * tokens * (tokens + 1) / 2
    device = next((x.device for x in (*layer.parameters(), *layer.buffers())), None)
    key = torch.ones(1, shape.kv_heads, 1, shape.head_dim, device=device)
    features = layer.map().key_features(key.to(layer.kernel.dtype)).values.shape  # [1, Hs, 1, F]
    reads = 2 * (shape.query_heads + features[1]) * features[3] * (shape.value_dim + 1)
    exact = min(layer.window + layer.sinks, tokens)
    return tokens * (reads + pairs * exact)


def paths_of(
    shape: HeadShape, names: list[str], plan: Plan, groups: int, device: torch.device, backend: str
) -> list[AttentionPath]:
    """Softmax through every SDPA backend, then the kernels ``names``."""
    softmax = in_double(layer_of("softmax", shape, Plan(), groups, device))
    backends = SDPA | (ON_CUDA if device.type == "cuda" else {})
    paths = [
        AttentionPath(
            f"sdpa-{name}",
            f"softmax, SDPA {name}",
            None,
            _sdpa(chosen),
            softmax,
            quadratic=True,
            score_bytes=12 if name == "math" else 0,  # logits, weights and a copy in fp32
        )
        for name, chosen in backends.items()
    ]
    for name in names:
        layer = layer_of(name, shape, plan, groups, device)
        title = catalogue.get(name).title + (f", G = {groups}" if name == "oal" else "")
        paths.append(
            AttentionPath(
                name,
                title,
                layer,
                _kernel(layer, backend),
                in_double(layer),
                quadratic=layer.every_key,
                score_bytes=0,
            )
        )
    return paths


def layer_of(
    name: str, shape: HeadShape, plan: Plan, groups: int, device: torch.device
) -> LinearAttention:
    """An unfitted layer; ``groups`` is for the OAL kernel."""
    options = {"groups": groups} if name == "oal" else {}
    chosen = plan.model_copy(update={"kernel": name, "options": options})
    layer: LinearAttention = LinearAttention.from_plan(chosen, shape, 0).to(device)
    return layer


def _sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )

    return run


def _kernel(layer: LinearAttention, backend: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: layer(q, k, v, backend=backend, return_state=False)[0]


def random_inputs(
    shape: HeadShape,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal ``q, k, v`` of batch 1."""
    sizes = (
        (1, shape.query_heads, tokens, shape.head_dim),
        (1, shape.kv_heads, tokens, shape.head_dim),
        (1, shape.kv_heads, tokens, shape.value_dim),
    )
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    return q, k, v


def check_small(
    path: AttentionPath, shape: HeadShape, dtype: torch.dtype, device: torch.device, backward: bool
) -> None:
    """Compare every output row, and the gradients, with the definition; note a refusal."""
    path.known.clear()
    path.refusal = None
    path.error, path.gradient_error = math.nan, None
    generator = torch.Generator().manual_seed(0)
    leaves = [x.requires_grad_() for x in random_inputs(shape, CHECKED, dtype, device, generator)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    at = torch.arange(CHECKED, device=device)
    with torch.set_grad_enabled(backward):
        wanted = expected(path.oracle, doubles[0], doubles[1], doubles[2], at)
        try:
            with torch.no_grad():
                actual = path.run(leaves[0], leaves[1], leaves[2])
            path.error = deviation(actual, wanted)
            if backward:
                direction = torch.randn(actual.shape, generator=generator).to(device, dtype)
                path.run(leaves[0], leaves[1], leaves[2]).backward(direction)
                wanted.backward(direction.double())
                path.gradient_error = max(
                    deviation(_gradient(x), _gradient(y))
                    for x, y in zip(leaves, doubles, strict=True)
                )
        except (RuntimeError, LinearizeError) as error:
            path.refusal = "skipped", f"cannot run: {short(error)}"
            return
        finally:
            for layer in (path.layer, path.oracle):
                if layer is not None:
                    layer.zero_grad(set_to_none=True)
    bound = BOUNDS[dtype]
    if path.error > bound:
        path.refusal = "differs", f"output off by {path.error:.2g} of its size"
    elif path.gradient_error is not None and path.gradient_error > GRADIENT_SLACK * bound:
        path.refusal = "differs", f"gradients off by {path.gradient_error:.2g} of their size"


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def short(error: Exception) -> str:
    """A message on one line."""
    return " ".join(str(error).split())[:160]
