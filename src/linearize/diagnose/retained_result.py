"""The account of a retained-error measurement, and the statistics that make it from mean errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from linearize.kernels import get
from linearize.versions import versions

__all__ = [
    "Controls",
    "KernelRetained",
    "LayerRetained",
    "RetainedError",
    "Selection",
    "p_value",
    "summarise",
]


@dataclass(frozen=True)
class LayerRetained:
    """One kernel on one layer: means over the sequences.

    Attributes:
        layer: zero-based.
        ratio, gaussian: R of the pretrained head and of the Gaussian control.
        selected_mse, full_mse: error on the selected coordinates and of the whole kernel.
        gaussian_selected_mse, gaussian_full_mse: the same for the control.
        controls: mean of R over the random subsets; ``None`` without them.
        p: of this layer alone.
    """

    layer: int
    ratio: float
    gaussian: float
    selected_mse: float
    full_mse: float
    gaussian_selected_mse: float
    gaussian_full_mse: float
    controls: float | None
    p: float | None


@dataclass(frozen=True)
class Controls:
    """The randomization test.

    Attributes:
        ratios: R of every replicate. mean, largest: of these.
        reached: how many are at least the observed R. p: ``(1 + reached) / (replicates + 1)``.
    """

    ratios: list[float]
    mean: float
    largest: float
    reached: int
    p: float


@dataclass(frozen=True)
class KernelRetained:
    """One kernel over all layers and sequences; see :class:`LayerRetained` and :class:`Controls`."""

    kernel: str
    title: str
    seeds: list[int]
    ratio: float
    gaussian: float
    controls: Controls | None
    layers: list[LayerRetained]


@dataclass(frozen=True)
class Selection:
    """The selected coordinates of every query head of a layer, in the model and in the control."""

    layer: int
    pretrained: list[list[int]]
    gaussian: list[list[int]]


@dataclass(frozen=True)
class RetainedError:
    """The measurement.

    Attributes:
        plan: settings of division and grouping. base: the model. layers: zero-based.
        sequences, block, positions: evaluation sequences, their tokens, query positions in each.
        fitted: whether kernels were fitted first.
        share, gaussian_share: selected coordinates of all.
        selections: which they are. kernels: in the order asked for.
        seconds: time of this call; parts taken from a store cost none.
        versions: of everything that matters.
    """

    plan: dict[str, Any]
    base: str | None
    layers: list[int]
    sequences: int
    block: int
    positions: int
    fitted: bool
    share: float
    gaussian_share: float
    selections: list[Selection]
    kernels: list[KernelRetained]
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)


def p_value(observed: float, replicates: Tensor) -> tuple[int, float]:
    """How many replicates reach the observed value, and ``(1 + that) / (replicates + 1)``."""
    reached = int((replicates >= observed).sum())
    return reached, (1 + reached) / (len(replicates) + 1)


def summarise(
    kernel: str,
    seeds: list[int],
    layers: list[int],
    errors: dict[str, tuple[Tensor, Tensor]],
    replicates: Tensor | None,
) -> KernelRetained:
    """From errors averaged over seeds, heads, positions and channels.

    Args:
        errors: for ``"pretrained"`` and ``"gaussian"``, the error on the selected coordinates and of
            the whole kernel, ``[layers, B]`` each.
        replicates: the error on random subsets, ``[layers, replicates, B]``.
    """
    selected, full = errors["pretrained"]
    gaussian, gaussian_full = errors["gaussian"]
    ratio, gaussian_ratio = selected / full, gaussian / gaussian_full
    drawn = None if replicates is None else replicates / full[:, None]

    def of_layer(at: int) -> LayerRetained:
        own = None if drawn is None else drawn[at].mean(1)
        observed = float(ratio[at].mean())
        return LayerRetained(
            layer=layers[at],
            ratio=observed,
            gaussian=float(gaussian_ratio[at].mean()),
            selected_mse=float(selected[at].mean()),
            full_mse=float(full[at].mean()),
            gaussian_selected_mse=float(gaussian[at].mean()),
            gaussian_full_mse=float(gaussian_full[at].mean()),
            controls=None if own is None else float(own.mean()),
            p=None if own is None else p_value(observed, own)[1],
        )

    return KernelRetained(
        kernel=kernel,
        title=get(kernel).title,
        seeds=seeds,
        ratio=float(ratio.mean()),
        gaussian=float(gaussian_ratio.mean()),
        controls=None if drawn is None else _test(float(ratio.mean()), drawn.mean((0, 2))),
        layers=[of_layer(at) for at in range(len(layers))],
    )


def _test(observed: float, ratios: Tensor) -> Controls:
    reached, p = p_value(observed, ratios)
    return Controls(ratios.tolist(), float(ratios.mean()), float(ratios.max()), reached, p)
