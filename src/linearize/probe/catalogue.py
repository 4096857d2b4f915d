"""Which mixers can be trained, by name: all kernels, the rungs of ReBased, and outside references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from linearize import kernels
from linearize.errors import PlanError
from linearize.ops.quadratic import feature_count
from linearize.probe.mixers import KernelMixer, ShortConvolution
from linearize.probe.references import mamba_layers, rwkv_layers

__all__ = ["DEFAULT", "Architecture", "ladder", "layers_of", "mixer_names", "mixer_title"]

RUNGS: dict[str, dict[str, bool]] = {
    "square": {"norm": False, "affine": False},
    "norm": {"norm": True, "affine": False},
    "affine": {"norm": False, "affine": True},
}
LADDERS = ("rebased-outer", "rebased")  # the kernels with rungs; each kernel itself is the last one
REFERENCES: dict[str, str] = {"mamba": "Mamba", "rwkv": "RWKV", "none": "no mixing"}
DEFAULT = (
    *("softmax", "based", "rebased", "rebased-outer", "oal", "taylorshift", "performer"),
    *("hedgehog", "mamba", "rwkv"),
)


@dataclass(frozen=True)
class Architecture:
    """The shape of a recall model, apart from its width.

    Attributes:
        layers: blocks; with kernels every second one attends and the ones before it are short
            convolutions. References mix in every block.
        heads: heads of a kernel layer; at most the width.
        softmax_heads: heads of softmax, which share the width as queries and keys.
        feature_dim: dimensions of queries and keys of a kernel's head.
        convolution: taps of a short convolution.
        groups: groups of every head of oal.
        initial: standard deviation of projections at the start; ``None`` for ``width^{-1/2}``.
        gate: bias of the convolutions' gates at the start; published is 0. With open gates and
            larger projections the same models learn the task in a tenth of the steps.
        dropout: of the embeddings while training.
        options: settings of kernels, by kernel.
    """

    layers: int = 2
    heads: int = 1
    softmax_heads: int = 1
    feature_dim: int = 16
    convolution: int = 3
    groups: int = 4
    initial: float | None = None
    gate: float = 1.0
    dropout: float = 0.0
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = (
            *(self.layers, self.heads, self.softmax_heads, self.feature_dim),
            *(self.convolution, self.groups),
        )
        if min(counts) < 1 or self.groups > self.feature_dim:
            raise PlanError(
                f"a recall model of {self}",
                "a count below 1, or more groups than feature dimensions",
                "Take counts of 1 or more.",
            )


def mixer_names() -> list[str]:
    """Everything :func:`layers_of` knows: kernels, rungs of the ladder, references."""
    return [*kernels.available(), *_rungs(), *REFERENCES]


def mixer_title(name: str) -> str:
    """How tables and charts call a mixer."""
    if name in REFERENCES:
        return REFERENCES[name]
    form, rung = _rungs().get(name, (name, ""))
    title = kernels.get(form).title
    return f"{title}, {rung}" if rung else title


def ladder(names: list[str]) -> list[str]:
    """``names`` with every rung of the ReBased kernels among them, each before its kernel."""
    result: list[str] = []
    for name in names:
        rungs = [f"{name}-{rung}" for rung in RUNGS] if name in LADDERS else []
        result += [one for one in (*rungs, name) if one not in result]
    return result


def layers_of(
    name: str, architecture: Architecture, width: int, length: int, seed: int
) -> list[nn.Module]:
    """The mixers of a model, first block first; parameters are drawn from torch's generator.

    Raises:
        PlanError: there is no such mixer, or it cannot have this shape.
    """
    if name in REFERENCES:
        return _REFERENCE_LAYERS[name](architecture, width, length)
    form, rung = _rungs().get(name, (name, ""))
    if form not in kernels.available():
        raise PlanError(
            f"mixer {name!r}", f"mixers {', '.join(mixer_names())}", "Choose one of these."
        )
    heads, dim = architecture.heads, architecture.feature_dim
    if kernels.get(form).exact:
        heads = architecture.softmax_heads
        dim = max(1, width // heads)
    if heads > width:
        raise PlanError(
            f"{heads} heads of {name}", f"width {width}", "Take at most one head per channel."
        )
    options = _options(form, architecture) | RUNGS.get(rung, {})
    return [
        KernelMixer(
            width, heads, dim, form, options, initial=architecture.initial, seed=seed + layer
        )
        if layer % 2
        else _convolution(architecture, width, architecture.convolution)
        for layer in range(architecture.layers)
    ]


def _convolution(architecture: Architecture, width: int, size: int) -> nn.Module:
    return ShortConvolution(width, size, initial=architecture.initial, gate=architecture.gate)


def _options(kernel: str, architecture: Architecture) -> dict[str, Any]:
    """Settings of a kernel where the library's own are made for larger heads."""
    fitting: dict[str, dict[str, Any]] = {
        "oal": {"groups": architecture.groups},
        # as many as the features of the quadratic kernels, so that states are of equal size
        "performer": {"features": feature_count(architecture.feature_dim)},
    }
    return fitting.get(kernel, {}) | architecture.options.get(kernel, {})


def _rungs() -> dict[str, tuple[str, str]]:
    """Name of a rung -> kernel and rung."""
    return {f"{form}-{rung}": (form, rung) for form in LADDERS for rung in RUNGS}


_REFERENCE_LAYERS: dict[str, Callable[[Architecture, int, int], list[nn.Module]]] = {
    "mamba": lambda shape, width, length: mamba_layers(width, shape.layers),
    "rwkv": lambda shape, width, length: rwkv_layers(width, shape.layers, length),
    # gates of the token itself: everything but mixing
    "none": lambda shape, width, length: [
        _convolution(shape, width, 1) for _ in range(shape.layers)
    ],
}
