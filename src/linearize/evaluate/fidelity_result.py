"""What a fidelity run gives: the sums of every run, and the measures they come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from linearize.kernels import get
from linearize.versions import versions

__all__ = ["Errors", "Fidelity", "KernelFidelity", "LayerFidelity", "Run", "pool", "summary"]


@dataclass(frozen=True)
class Errors:
    """The four measures of a set of layers; ``relative`` is RelMSE, ``after`` is after ``W_o``."""

    mse: float
    relative: float
    mse_after: float
    relative_after: float


@dataclass(frozen=True)
class Run:
    """One kernel with one seed on one layer: the sums that every measure is made of.

    Attributes:
        kernel, seed, layer: which.
        features: features of a head; 0 for a kernel that keeps every key.
        state_numbers, state_bytes: decoding state of one sequence in this layer, with the keys and
            values kept exact; 0 for a kernel that keeps every key.
        trainable: trainable numbers of the layer.
        fit_seconds, evaluation_seconds: time to fit, and to run and compare the held-out blocks.
        error, energy: ``‖Ŷ − Y‖²`` and ``‖Y‖²`` per held-out sequence and query head.
        error_after, energy_after: the same after ``W_o``, per sequence.
        count, count_after: numbers of a sequence, of one head and after ``W_o``.
    """

    kernel: str
    seed: int
    layer: int
    features: int
    state_numbers: int
    state_bytes: int
    trainable: int
    fit_seconds: float
    evaluation_seconds: float
    error: list[list[float]]
    energy: list[list[float]]
    error_after: list[float]
    energy_after: list[float]
    count: int
    count_after: int


@dataclass(frozen=True)
class LayerFidelity:
    """One kernel on one layer, averaged over its seeds; ``heads``: RelMSE before ``W_o`` per head."""

    layer: int
    errors: Errors
    heads: list[float]


@dataclass(frozen=True)
class KernelFidelity:
    """One kernel over all evaluated layers.

    Attributes:
        kernel, title: its name, and how charts call it.
        exact: it keeps every key, so it has no state of constant size.
        seeds: seeds averaged over; one unless the kernel draws at random and several were asked for.
        errors: pooled over the layers, averaged over the seeds.
        spread: sample standard deviation of each measure over the seeds; ``None`` with one seed.
        features: of a head, in the layer with most.
        state_numbers, state_bytes, trainable: per layer, averaged over the layers.
        fit_seconds, evaluation_seconds: per layer, averaged over layers and seeds.
        layers: every layer by itself.
    """

    kernel: str
    title: str
    exact: bool
    seeds: list[int]
    errors: Errors
    spread: Errors | None
    features: int
    state_numbers: float
    state_bytes: float
    trainable: float
    fit_seconds: float
    evaluation_seconds: float
    layers: list[LayerFidelity]


@dataclass(frozen=True)
class Fidelity:
    """The comparison of kernels on one model.

    Attributes:
        plan: the settings shared by all kernels. base: the model.
        layers: zero-based, ascending. tokens: tokens of the text.
        evaluation_blocks, fit_blocks, validation_blocks: block numbers in the text.
        kernels: in the order asked for. runs: the sums behind them.
        seconds: time of this call; results taken from a store cost none.
        versions: of everything that matters.
    """

    plan: dict[str, Any]
    base: str | None
    layers: list[int]
    tokens: int
    evaluation_blocks: list[int]
    fit_blocks: list[int]
    validation_blocks: list[int]
    kernels: list[KernelFidelity]
    runs: list[Run]
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def pool(runs: Sequence[Run]) -> Errors:
    """The measures of one kernel and seed over the layers of ``runs``."""
    error, energy, error_after, energy_after = (
        [
            sum(sum(s) if isinstance(s := getattr(run, name)[b], list) else s for run in runs)
            for b in range(len(runs[0].error))
        ]
        for name in ("error", "energy", "error_after", "energy_after")
    )
    count = sum(run.count * len(run.error[0]) for run in runs)
    count_after = sum(run.count_after for run in runs)
    return Errors(
        mse=statistics.fmean(error) / count,
        relative=_relative(error, energy),
        mse_after=statistics.fmean(error_after) / count_after,
        relative_after=_relative(error_after, energy_after),
    )


def summary(runs: list[Run]) -> KernelFidelity:
    """One kernel from its runs over layers and seeds."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    layers = list(dict.fromkeys(run.layer for run in runs))
    pooled = [pool([run for run in runs if run.seed == seed]) for seed in seeds]
    cls = get(runs[0].kernel)

    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    def of_layer(layer: int) -> LayerFidelity:
        own = [run for run in runs if run.layer == layer]
        heads = [
            statistics.fmean(
                _relative([b[head] for b in run.error], [b[head] for b in run.energy])
                for run in own
            )
            for head in range(len(own[0].error[0]))
        ]
        return LayerFidelity(layer, _each(statistics.fmean, [pool([run]) for run in own]), heads)

    return KernelFidelity(
        kernel=runs[0].kernel,
        title=cls.title,
        exact=not any(run.state_bytes for run in runs),
        seeds=seeds,
        errors=_each(statistics.fmean, pooled),
        spread=_each(_deviation, pooled) if len(seeds) > 1 else None,
        features=max(run.features for run in runs),
        state_numbers=mean("state_numbers"),
        state_bytes=mean("state_bytes"),
        trainable=mean("trainable"),
        fit_seconds=mean("fit_seconds"),
        evaluation_seconds=mean("evaluation_seconds"),
        layers=[of_layer(layer) for layer in layers],
    )


def _each(function: Callable[[list[float]], float], errors: list[Errors]) -> Errors:
    """``function`` of every measure."""
    return Errors(*(function([getattr(e, f.name) for e in errors]) for f in fields(Errors)))


def _deviation(values: list[float]) -> float:
    """Sample standard deviation; NaN, not an exception, where a value is not finite."""
    return float(torch.tensor(values, dtype=torch.float64).std())


def _relative(error: list[float], energy: list[float]) -> float:
    """Mean over sequences of the ratio; outputs that are zero on both sides agree."""
    return statistics.fmean(
        e / y if y else (0.0 if e == 0 else float("inf"))
        for e, y in zip(error, energy, strict=True)
    )
