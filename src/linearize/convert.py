"""Conversion: capture, fit, and put the fitted layers into the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from linearize.allocation import allocate
from linearize.attention import LinearAttention
from linearize.capture import LayerCapture, capture
from linearize.converted import attach, converted_layers
from linearize.errors import PlanError
from linearize.fitting import Calibration
from linearize.grouping import contributions
from linearize.kernels import get
from linearize.models import AttentionLayer, Loaded, attention_layers
from linearize.plan import Plan
from linearize.processes import Processes
from linearize.selection import Selection, check_memory, choose
from linearize.text import Division, Source, divide, tokenize
from linearize.versions import versions

__all__ = [
    "Conversion",
    "ConversionReport",
    "LayerReport",
    "calibrate",
    "check_layers",
    "check_reach",
    "convert",
]

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what was done


@dataclass(frozen=True)
class LayerReport:
    """One converted layer; lists run over the query heads.

    Attributes:
        layer: zero-based index.
        groups: dimensions of every group, bulk first, per head (kernels without groups: empty).
        profile: contribution of every dimension, on the keys the kernel sees, ``[Hq][d]``.
        fit_mse: output error on the fitting positions (kernels without parameters: empty).
        validation_mse, validation_relative: output error on the validation blocks, all positions.
        start: which start won.
        curve: fitting loss along the fit.
        trainable, state_bytes: kernel parameters, and decoding state of one sequence in bytes.
        seconds: time to fit and measure.
        rank: directions of the keys the kernel sees; ``None``: all.
        heads: the query heads the lists run over; those of ``kept`` KV heads keep their softmax.
        kept: KV heads of this layer that keep their softmax.
    """

    layer: int
    groups: list[list[list[int]]]
    profile: list[list[float]]
    fit_mse: list[float]
    validation_mse: list[float]
    validation_relative: list[float]
    start: list[str]
    curve: list[float]
    trainable: int
    state_bytes: int
    seconds: float
    rank: int | None = None
    heads: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ConversionReport:
    """How a conversion went.

    Attributes:
        plan: the plan. base: what was converted. layers: per converted layer, ascending.
        tokens: tokens of the text; fit_blocks, validation_blocks: block numbers used.
        cache_bytes_per_token: what one token adds to the decoding memory of one converted layer
            before conversion (fp32). model_layers: attention layers in all.
        seconds: whole time. versions: of everything that matters.
        kv_heads: of a layer. selection: how layers or heads were chosen by measurement.
    """

    plan: dict[str, Any]
    base: str | None
    layers: list[LayerReport]
    tokens: int
    fit_blocks: list[int]
    validation_blocks: list[int]
    model_layers: int
    cache_bytes_per_token: int
    seconds: float
    versions: dict[str, str] = field(default_factory=versions)
    kv_heads: int = 1
    selection: Selection | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Conversion:
    """The converted model and the account of it."""

    loaded: Loaded
    report: ConversionReport


def convert(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    progress: Progress | None = None,
) -> Conversion:
    """Replace the softmax attention of the plan's layers by fitted linear-time attention, in place.

    Several processes of a launcher share the layers, unless each is fitted behind the one before
    (``fitting="sequential"``); all of them end with the same model.

    Args:
        loaded: a model from :func:`linearize.load`, or any transformers causal LM built in memory:
            ``Loaded(model=..., tokenizer=None)``. The model object itself is changed.
        text: calibration text: a string, strings, paths or token ids; the standard library's
            documentation by default.
        plan: what to convert and how; the paper's settings by default.
        progress: called with (layers done, layers in all, message) after every layer.

    Returns:
        the converted model and a report per layer and head.

    Raises:
        PlanError: layers outside the model, already converted, or impossible to convert; or sinks
            and window leave the kernel no key of a block.
        TextError: the text has fewer than two blocks. ModelError: activations are not finite, or
            the architecture lacks the attention interface.
    """
    started = time.perf_counter()
    plan = plan or Plan()
    model = loaded.model
    everything = attention_layers(model)
    layers = check_layers(model, everything, plan)
    check_reach(plan)
    tokens = tokenize(text, loaded.tokenizer)
    division = divide(tokens, plan)
    ranks: dict[int, int] = {}
    if plan.state_budget is not None:
        ranks = allocate(model, layers, division.prompts, plan)
    unfitted = {layer.index: _unfitted(layer, plan, ranks) for layer in layers}
    check_memory(plan, list(unfitted.values()), len(everything) - len(layers))

    blocks = [*division.prompts, *division.fit, *division.validation]
    fitted: dict[int, LinearAttention] = {}
    reports: list[LayerReport] = []
    processes = Processes.join() if plan.fitting != "sequential" else Processes()
    own = processes.share(layers)
    for arrived in capture(model, blocks, [layer.index for layer in own]):
        layer = next(one for one in layers if one.index == arrived.index)
        linear = unfitted[layer.index]
        reports.append(_fit_layer(linear, arrived, layer, division, plan))
        fitted[layer.index] = linear.to(model.device)
        if plan.fitting == "sequential":
            arrived.replace(linear.output)
        if progress is not None:
            errors = reports[-1].validation_relative
            error = sum(errors) / len(errors)
            progress(len(reports), len(own), f"layer {layer.index}: relative error {error:.3f}")
    reports = processes.gather(reports)
    if processes.count > 1:
        filled = processes.gather([fitted[layer.index].to("cpu") for layer in own])
        fitted = {
            layer.index: linear.to(model.device)
            for layer, linear in zip(layers, filled, strict=True)
        }
    names = {layer.index: layer.name for layer in layers}
    selection = None
    if plan.automatic:
        retained = len(everything) - len(layers)
        fitted, selection = choose(
            model, fitted, names, plan, division.validation, retained=retained, progress=progress
        )
        reports = [_of_remaining(one, fitted[one.layer]) for one in reports if one.layer in fitted]
    attach(model, fitted, names, plan, loaded.ref)
    shape = layers[0].shape
    report = ConversionReport(
        plan=plan.model_dump(mode="json"),
        base=loaded.ref,
        layers=reports,
        tokens=len(tokens),
        fit_blocks=division.fit_at,
        validation_blocks=division.validation_at,
        model_layers=len(everything),
        cache_bytes_per_token=4 * shape.kv_heads * (shape.head_dim + shape.value_dim),
        seconds=time.perf_counter() - started,
        kv_heads=shape.kv_heads,
        selection=selection,
    )
    return Conversion(Loaded(model, loaded.tokenizer, plan, loaded.ref), report)


def check_layers(
    model: PreTrainedModel, everything: list[AttentionLayer], plan: Plan
) -> list[AttentionLayer]:
    """The layers to convert, or a reason why not.

    Raises:
        PlanError: outside the model, already converted, or with attention a kernel cannot honour.
    """
    get(plan.kernel)  # an unknown name shows before work
    done = converted_layers(model)
    if done:
        raise PlanError(
            f"converting layers {plan.layers!r}",
            f"a model whose layers {sorted(done)} are converted already",
            "Load the original model again.",
        )
    by_index = {layer.index: layer for layer in everything}
    chosen = [by_index[i] for i in plan.layer_indices(len(everything))]
    if plan.layers == "auto":
        chosen = [layer for layer in chosen if not layer.obstacles]
    blocked = [layer for layer in chosen if layer.obstacles]
    if blocked:
        free = [layer.index for layer in everything if not layer.obstacles]
        raise PlanError(
            f"layer {blocked[0].index}",
            f"attention with {' and '.join(blocked[0].obstacles)}, which linear attention would drop",
            f"Convert only layers without: {free}." if free else "This model cannot be converted.",
        )
    for layer in chosen:
        _unfitted(layer, plan, {})  # bad options show before work
    return chosen


def check_reach(plan: Plan) -> None:
    """Refuse to fit a kernel on blocks all of whose keys stay exact.

    Raises:
        PlanError: sinks and window leave it none.
    """
    if plan.sinks + plan.window >= plan.block and not get(plan.kernel).exact:
        raise PlanError(
            f"{plan.sinks} sinks and a window of {plan.window} keys",
            f"blocks of {plan.block} tokens to fit on, none of whose keys would reach the kernel",
            f"Keep at most {plan.block - 1} keys exact in all, or fit on longer blocks.",
        )


def _unfitted(layer: AttentionLayer, plan: Plan, ranks: dict[int, int]) -> LinearAttention:
    settings = {"rank": ranks[layer.index]} if layer.index in ranks else {}
    return LinearAttention.from_plan(plan, layer.shape, layer.index, settings)


def calibrate(
    arrived: LayerCapture, layer: AttentionLayer, division: Division, plan: Plan
) -> Calibration:
    """What a kernel of one layer may learn from.

    Args:
        arrived: the layer's activations over the division's prompts, fitting and validation blocks,
            in this order; further blocks may follow and are not touched.
        layer: the layer. division: the blocks. plan: the plan.
    """
    first, second = len(division.prompts), len(division.prompts) + len(division.fit)
    prompts = arrived.activations(0, first)
    fit = arrived.activations(first, second)
    validation = arrived.activations(second, second + len(division.validation))
    return Calibration.plain(
        prompts, fit, validation, scale=layer.shape.scale, layer=layer.index, plan=plan
    )


def _fit_layer(
    linear: LinearAttention,
    arrived: LayerCapture,
    layer: AttentionLayer,
    division: Division,
    plan: Plan,
) -> LayerReport:
    started = time.perf_counter()
    calibration = calibrate(arrived, layer, division, plan)
    result = linear.fit(calibration)
    error = linear.error(calibration.validation)
    prompts = calibration.prompts
    profile = contributions(prompts.q, linear.transformed(prompts).k, layer.shape.scale).mean(0)
    return LayerReport(
        layer=layer.index,
        groups=_members(getattr(linear.kernel, "groups", None)),
        profile=profile.tolist(),
        fit_mse=result.fit_mse if result else [],
        validation_mse=error.mse,
        validation_relative=error.relative,
        start=result.start if result else [],
        curve=result.curve if result else [],
        trainable=linear.kernel.trainable_numbers,
        state_bytes=linear.state_bytes,
        seconds=time.perf_counter() - started,
        rank=linear.keys.rank,
        heads=list(range(layer.shape.query_heads)),
    )


def _of_remaining(report: LayerReport, linear: LinearAttention) -> LayerReport:
    """The account of a layer, cut to the heads that stayed converted."""
    if linear.heads is None:
        return report
    ratio = linear.shape.ratio
    rows = [head * ratio + i for head in linear.heads for i in range(ratio)]
    cut: dict[str, Any] = {
        name: [values[row] for row in rows]
        for name in (
            "groups",
            "profile",
            "fit_mse",
            "validation_mse",
            "validation_relative",
            "start",
        )
        if (values := getattr(report, name))
    }
    return replace(
        report,
        **cut,
        heads=rows,
        kept=[head for head in range(linear.shape.kv_heads) if head not in linear.heads],
        trainable=linear.kernel.trainable_numbers,
        state_bytes=linear.state_bytes,
    )


def _members(groups: Tensor | None) -> list[list[list[int]]]:
    if groups is None:
        return []
    return [
        [(row == g).nonzero().flatten().tolist() for g in range(int(row.max()) + 1)]
        for row in groups
    ]
