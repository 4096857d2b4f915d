"""Frozen-attention fidelity: how far each kernel is from softmax on a model's own activations.

Kernels are fitted layer by layer with queries, keys and values frozen, then compared with softmax on
held-out sequences (OAL paper, table 2; SPEC section 5). With ``Ŷ_b`` the kernel's and ``Y_b`` the
softmax output of sequence b, all heads of the layers considered in one tensor of ``n_b`` numbers,

    ``MSE = mean_b ‖Ŷ_b − Y_b‖² / n_b``        ``RelMSE = mean_b ‖Ŷ_b − Y_b‖² / ‖Y_b‖²``,

before the output projection ``W_o`` (the heads' outputs) and after it (the heads concatenated in
order, then the model's frozen projection). Over several layers squares are summed inside a sequence
before the ratio is taken.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linearize.attention import LinearAttention
from linearize.capture import LayerCapture, capture
from linearize.convert import calibrate, check_layers, check_reach
from linearize.errors import ModelError, PlanError
from linearize.evaluate.fidelity_result import (
    Fidelity,
    Run,
    pool,
    summary,
)
from linearize.fitting import Activations, softmax_outputs
from linearize.kernels import HeadShape, get
from linearize.models import AttentionLayer, Loaded, attention_layers
from linearize.parts import Parts, model_identity, text_identity
from linearize.plan import Plan
from linearize.processes import Processes
from linearize.text import Division, Source, divide, split_blocks, tokenize

__all__ = ["fidelity", "output_projection"]

Progress = Callable[[int, int, str], None]
PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")  # what models call W_o


def fidelity(
    loaded: Loaded,
    text: Source,
    layers: Sequence[int] | str,
    kernels: Sequence[str],
    plan: Plan,
    *,
    seeds: Sequence[int] | None = None,
    progress: Progress | None = None,
    store: str | Path | None = None,
) -> Fidelity:
    """Fit every kernel on every layer and measure its outputs against softmax on held-out text.

    The first ``plan.skip_blocks`` blocks of the text are held out for the measures; the kernels see
    the ``fit_blocks`` and ``validation_blocks`` after them. The model is not changed. Several
    processes of a launcher share the layers, and all of them end with the whole result.

    Args:
        loaded: an unconverted model. text: see :func:`linearize.text.tokenize`.
        layers: zero-based layers, or text as in :class:`Plan`.
        kernels: names of kernels.
        plan: settings shared by all kernels; its own ``kernel`` and ``layers`` are not used.
        seeds: seeds of kernels that draw at random; the first is everyone else's.
            The plan's by default.
        progress: called with (runs done, runs in all, message); a run is a kernel, seed and layer.
        store: folder where every finished run is kept; runs found there are not done again.

    Raises:
        PlanError: an unknown kernel, or layers, settings or shapes that do not fit.
        TextError: the text is too short for all the blocks. ModelError: no output projection.
        CheckpointError: the store holds runs of other settings.
    """
    started = time.perf_counter()
    plan = Plan(**plan.model_dump() | {"layers": layers})
    if not kernels or not plan.skip_blocks:
        raise PlanError(
            f"fidelity of {len(kernels)} kernels on {plan.skip_blocks} held-out blocks",
            "nothing to measure",
            "Name kernels, and set skip_blocks to the number of held-out blocks.",
        )
    kernels, seeds = list(dict.fromkeys(kernels)), list(dict.fromkeys(seeds or [plan.seed]))
    for name in kernels:
        get(name)
    everything = attention_layers(loaded.model)
    for name in kernels:
        check_reach(_plan_of(plan, name, seeds[0]))
        chosen = check_layers(loaded.model, everything, _plan_of(plan, name, seeds[0]))
    projections = {one.index: output_projection(one) for one in chosen}
    tokens = tokenize(text, loaded.tokenizer)
    held_out, division = _divide(tokens, plan)

    work = [
        (layer, name, seed)
        for layer in chosen
        for name in kernels
        for seed in (seeds if _draws(name, layer.shape, plan) else seeds[:1])
    ]
    processes = Processes.join()
    own = {layer.index for layer in processes.share(chosen)}
    own_work = [item for item in work if item[0].index in own]
    shelf = Parts(store, _settings(loaded, plan, tokens))
    done = {
        (run.layer, run.kernel, run.seed): run
        for layer, name, seed in own_work
        if (run := shelf.read(_part(name, seed, layer.index), Run, "run")) is not None
    }

    def finished(run: Run) -> None:
        shelf.put(_part(run.kernel, run.seed, run.layer), asdict(run))
        done[run.layer, run.kernel, run.seed] = run
        report(f"{run.kernel}, layer {run.layer}: RelMSE {pool([run]).relative:.3f}")

    def report(message: str) -> None:
        if progress is not None:
            progress(len(done), len(own_work), message)

    open_work = [item for item in own_work if (item[0].index, *item[1:]) not in done]
    open_layers = {layer.index: layer for layer, _, _ in open_work}
    report("capturing activations" if open_work else "nothing left to do")
    blocks = [*division.prompts, *division.fit, *division.validation, *held_out]
    for arrived in capture(loaded.model, blocks, list(open_layers)) if open_work else ():
        layer = open_layers[arrived.index]
        pairs = [(name, seed) for one, name, seed in open_work if one is layer]
        _run_layer(arrived, layer, division, len(held_out), pairs, plan, projections, finished)
    everyone = {
        (run.layer, run.kernel, run.seed): run for run in processes.gather([*done.values()])
    }
    runs = [everyone[layer.index, name, seed] for layer, name, seed in work]
    return Fidelity(
        plan=_shared(plan),
        base=loaded.ref,
        layers=[layer.index for layer in chosen],
        tokens=len(tokens),
        evaluation_blocks=list(range(len(held_out))),
        fit_blocks=division.fit_at,
        validation_blocks=division.validation_at,
        kernels=[summary([run for run in runs if run.kernel == name]) for name in kernels],
        runs=runs,
        seconds=time.perf_counter() - started,
    )


def output_projection(layer: AttentionLayer) -> nn.Module:
    """``W_o`` of an attention module, as a copy in fp32 on the CPU, bias included.

    It is found among the module's children by name. The heads are taken to enter it unchanged,
    concatenated in order, as they do in all common architectures; one that normalises or gates them
    in between has no such projection to measure behind.

    Raises:
        ModelError: there is none, or it does not take the concatenated heads.
    """
    children = dict(layer.module.named_children())
    found = next((children[name] for name in PROJECTIONS if name in children), None)
    if found is None:
        raise ModelError(
            f"the output projection of {layer.name}",
            f"children {', '.join(children) or 'none'}",
            f"Attention modules are expected to call it one of {', '.join(PROJECTIONS)}.",
        )
    projection = copy.deepcopy(found).to("cpu", torch.float32)
    width = layer.shape.query_heads * layer.shape.value_dim
    try:
        with torch.no_grad():
            projection(torch.zeros(1, width))
    except RuntimeError as error:
        raise ModelError(
            f"the output projection of {layer.name} on {layer.shape.query_heads} concatenated heads "
            f"of {layer.shape.value_dim}",
            f"{' '.join(str(error).split())[:200]}",
            "This architecture changes the heads' outputs before it projects them.",
        ) from error
    return projection


def _divide(tokens: Tensor, plan: Plan) -> tuple[list[Tensor], Division]:
    """Held-out blocks, and the division of the rest: as many of each as the plan says, or an error."""
    first, second = plan.skip_blocks, plan.skip_blocks + plan.fit_blocks
    stop = second + plan.validation_blocks
    blocks = split_blocks(tokens, plan.block, need=stop)
    division = replace(
        divide(tokens, plan),  # on a text of a few blocks it would validate on fewer
        fit=blocks[first:second],
        validation=blocks[second:stop],
        fit_at=list(range(first, second)),
        validation_at=list(range(second, stop)),
    )
    return blocks[:first], division


def _run_layer(
    arrived: LayerCapture,
    layer: AttentionLayer,
    division: Division,
    held_out: int,
    pairs: list[tuple[str, int]],
    plan: Plan,
    projections: dict[int, nn.Module],
    finished: Callable[[Run], None],
) -> None:
    """All kernels on one layer; they share its softmax outputs."""
    calibration = calibrate(arrived, layer, division, plan)
    first = len(division.prompts) + len(division.fit) + len(division.validation)
    data = arrived.activations(first, first + held_out)
    for name, seed in pairs:
        own = _plan_of(plan, name, seed)
        linear = LinearAttention.from_plan(own, layer.shape, layer.index)
        started = time.perf_counter()
        linear.fit(replace(calibration, plan=own))
        fitted = time.perf_counter()
        sums = _measure(linear, data, projections[layer.index])
        finished(
            Run(
                kernel=name,
                seed=seed,
                layer=layer.index,
                features=linear.kernel.feature_count,
                state_numbers=linear.state_numbers,
                state_bytes=linear.state_bytes,
                trainable=linear.kernel.trainable_numbers,
                fit_seconds=fitted - started,
                evaluation_seconds=time.perf_counter() - fitted,
                **sums,
            )
        )


@torch.no_grad()
def _measure(linear: LinearAttention, data: Activations, projection: nn.Module) -> dict[str, Any]:
    """The sums of :class:`Run`, by the linear-time engine that serves a converted model."""
    sums: dict[str, Any] = {name: [] for name in ("error", "energy", "error_after", "energy_after")}
    for block in range(len(data)):
        part = slice(block, block + 1)
        output = linear(data.q[part], data.k[part], data.v[part])[0][0]  # [Hq, N, dv]
        target = softmax_outputs(data, linear.kernel.shape.scale, block)
        sums["error"].append(_square(output - target, (1, 2)).tolist())
        sums["energy"].append(_square(target, (1, 2)).tolist())
        projected, wanted = (
            projection(x.transpose(0, 1).flatten(1)) for x in (output, target)
        )  # [N, hidden]
        sums["error_after"].append(float(_square(projected - wanted, (0, 1))))
        sums["energy_after"].append(float(_square(wanted, (0, 1))))
    return sums | {"count": target[0].numel(), "count_after": wanted.numel()}


def _square(x: Tensor, dim: tuple[int, int]) -> Tensor:
    return x.double().square().sum(dim)


def _plan_of(plan: Plan, kernel: str, seed: int) -> Plan:
    return plan.model_copy(update={"kernel": kernel, "seed": seed})


def _draws(kernel: str, shape: HeadShape, plan: Plan) -> bool:
    """Whether a kernel's structure or start depends on the seed."""
    one, other = (
        LinearAttention.from_plan(_plan_of(plan, kernel, seed), shape, 0).state_dict()
        for seed in (0, 1)
    )
    return any(not torch.equal(one[key], other[key]) for key in one)


def _shared(plan: Plan) -> dict[str, Any]:
    """The plan without what differs between the runs."""
    return plan.model_dump(mode="json", exclude={"kernel", "layers"})


def _settings(loaded: Loaded, plan: Plan, tokens: Tensor) -> dict[str, Any]:
    """Everything that decides a run besides its kernel, seed and layer."""
    settings = _shared(plan)
    del settings["seed"]
    settings["model"] = model_identity(loaded.model)
    settings["text"] = text_identity(tokens)
    return settings


def _part(kernel: str, seed: int, layer: int) -> str:
    return f"{kernel}-seed{seed}-layer{layer}"
