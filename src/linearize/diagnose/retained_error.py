"""How much of a kernel's error sits in the few coordinates that contribute most (table 1).

The kernel is applied to those coordinates of a head alone, ``S_h``, the union of OAL's non-bulk
groups, while all others stay exact (see :mod:`linearize.diagnose.hybrid`). With ``E`` the mean square
error of the outputs over heads, positions and channels,

    ``R = E(kernel on S) / E(kernel on everything)``

for every layer and sequence, and its mean over both. Kernels that draw at random do so once for each
seed, and their errors are averaged over the seeds before the ratio (OAL paper, appendix A.2).

Two comparisons say what R means. The Gaussian control repeats everything, the grouping included, with
queries and keys from N(0, 1). The randomization test puts random subsets of the bulk, as large as
``S_h``, in its place.

A kernel is taken as it is before fitting: the paper fits kernels for its table 2, and names no
fitting here. What a kernel measures on data without training (SpectraFormer's φ) is measured on the
calibration prompts, whole vectors. The kernel is the same object in numerator and denominator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.diagnose.controls import control_errors, draw_subsets
from linearize.diagnose.data import (
    Inputs,
    Progress,
    calibrate,
    gaussian_like,
    generator,
    oal_groups,
    prepare,
    silent,
    stream,
)
from linearize.diagnose.hybrid import Sampled, full_errors, hybrid_errors, sample
from linearize.diagnose.retained_result import (
    KernelRetained,
    RetainedError,
    Selection,
    summarise,
)
from linearize.errors import PlanError
from linearize.fitting import Activations, Calibration
from linearize.kernels import HeadShape, Kernel, get
from linearize.models import AttentionLayer, Loaded
from linearize.parts import Parts, model_identity, text_identity
from linearize.plan import Plan
from linearize.text import Source

__all__ = ["KERNELS", "retained_error"]

KERNELS = ("performer", "spectraformer", "dijiang", "taylorshift")  # of the paper's table
SEEDS = (0, 1, 2, 3, 4)
POSITIONS = 32
CONTROLS = 1000
PROTOCOL = 1  # counts changes that make stored parts of older versions wrong
KINDS = ("pretrained", "gaussian")


def retained_error(
    loaded: Loaded,
    text: Source | None = None,
    plan: Plan | None = None,
    *,
    kernels: Sequence[str] = KERNELS,
    seeds: Sequence[int] = SEEDS,
    positions: int = POSITIONS,
    controls: int = CONTROLS,
    fitted: bool = False,
    progress: Progress = silent,
    store: str | Path | None = None,
) -> RetainedError:
    """Retained-error ratios in the plan's layers, on the first ``plan.skip_blocks`` blocks.

    Args:
        kernels: names. seeds: of kernels that draw at random; the first is everyone else's.
        positions: query positions per sequence. controls: replicates of the randomization test.
        fitted: fit every kernel to the fitting blocks first.
        progress: called with (parts done, parts in all, message).
        store: folder where every finished part is kept; parts found there are not done again.

    Raises:
        PlanError: unknown kernels, layers or settings that do not fit.
        TextError: the text is too short. CheckpointError: the store holds parts of other settings.
    """
    started = time.perf_counter()
    plan = plan or Plan()
    names, seeds = list(dict.fromkeys(kernels)), list(dict.fromkeys(seeds))
    inputs = prepare(loaded, text, plan)
    _check(names, inputs, seeds)
    evaluation, fit, validation = inputs.blocks()
    parts = Parts(store, _settings(inputs, seeds, positions, controls, fitted))
    work = [
        _Part(layer.index, name, kind, tuple(chosen))
        for layer in inputs.layers
        for name in names
        for kind, chosen in _kinds(name, layer.shape, seeds, controls)
    ]
    done = {part: value for part in work if (value := parts.get(part.name)) is not None}
    progress(len(done), len(work), "capturing activations")
    open_layers = sorted({part.layer for part in work if part not in done})
    sequences = [inputs.prompts, evaluation, *((fit, validation) if fitted else ())]
    for layer, data in stream(inputs, sequences, open_layers) if open_layers else ():
        bench = _Bench(layer, data, plan, positions, controls, fitted)
        for part in work:
            if part.layer != layer.index or part in done:
                continue

            def tell(message: str, part: _Part = part) -> None:
                progress(len(done), len(work), f"{part.name} {message}")

            done[part] = bench.run(part, tell)
            parts.put(part.name, done[part])
            tell("finished")
    found = [_summary(name, [p for p in work if p.kernel == name], done) for name in names]
    selections = [_selection(layer.index, work, done) for layer in inputs.layers]
    numbers = sum(layer.shape.query_heads * layer.shape.head_dim for layer in inputs.layers)
    return RetainedError(
        plan=plan.model_dump(mode="json"),
        base=loaded.ref,
        layers=[layer.index for layer in inputs.layers],
        sequences=len(evaluation),
        block=plan.block,
        positions=min(positions, plan.block),
        fitted=fitted,
        share=sum(len(s) for each in selections for s in each.pretrained) / numbers,
        gaussian_share=sum(len(s) for each in selections for s in each.gaussian) / numbers,
        selections=selections,
        kernels=found,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Part:
    """One unit of work: a kernel on a layer, pretrained, Gaussian, or one seed of the controls."""

    layer: int
    kernel: str
    kind: str
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        seed = f"-seed{self.seeds[0]}" if self.kind == "controls" else ""
        return f"{self.kernel}-layer{self.layer}-{self.kind}{seed}"


class _Bench:
    """One layer's data, on which its parts are run. Each kind is prepared when first needed."""

    def __init__(
        self,
        layer: AttentionLayer,
        data: list[Activations],
        plan: Plan,
        positions: int,
        controls: int,
        fitted: bool,
    ) -> None:
        self._layer, self._data, self._plan = layer, data, plan
        self._positions, self._controls, self._fitted = positions, controls, fitted
        self._ready: dict[str, tuple[Calibration, Tensor, Sampled]] = {}
        self._kernels: dict[tuple[str, str, int], Kernel] = {}

    def run(self, part: _Part, tell: Any) -> dict[str, Any]:
        """The part's numbers, as JSON; errors are means over positions and channels."""
        kind = "gaussian" if part.kind == "gaussian" else "pretrained"
        _, selected, data = self._prepared(kind)
        if part.kind == "controls":
            return {"errors": self._control(part, selected, data, tell).tolist()}
        full, hybrid = [], []
        for seed in part.seeds:
            kernel = self._kernel(part.kernel, kind, seed)
            with torch.no_grad():
                full.append(full_errors(kernel, data).tolist())
                hybrid.append(hybrid_errors(kernel, data, selected).tolist())
        return {"selected": _coordinates(selected), "full": full, "hybrid": hybrid}

    def _control(self, part: _Part, selected: Tensor, data: Sampled, tell: Any) -> Tensor:
        source = generator(self._plan.seed, self._layer.index, "subset")
        subsets = draw_subsets(selected, self._controls, source)

        def progress(done: int, total: int) -> None:
            if done * 10 // total > (done - 1) * 10 // total and done < total:
                tell(f"{done * 100 // total} %")

        kernel = self._kernel(part.kernel, "pretrained", part.seeds[0])
        return control_errors(kernel, data, subsets, progress)

    def _prepared(self, kind: str) -> tuple[Calibration, Tensor, Sampled]:
        """Calibration, selection ``[Hq, d]`` and sampled evaluation sequences."""
        if kind not in self._ready:
            shape, index, seed = self._layer.shape, self._layer.index, self._plan.seed
            data = self._data
            if kind == "gaussian":
                source = generator(seed, index, "gauss")
                data = [gaussian_like(each, source) for each in data]
            prompts, evaluation, *rest = data
            calibration = calibrate(self._layer, self._plan, prompts, *rest)
            selected = oal_groups(calibration, shape) > 0
            at = generator(seed, index, "at")  # the same positions in both
            sampled = sample(evaluation, shape.scale, self._positions, at)
            self._ready[kind] = calibration, selected, sampled
        return self._ready[kind]

    def _kernel(self, name: str, kind: str, seed: int) -> Kernel:
        key = name, kind, seed
        if key not in self._kernels:
            calibration, _, _ = self._prepared(kind)
            kernel = get(name).build(self._layer.shape, _draw(seed, self._layer.index))
            if self._fitted:
                kernel.fit(calibration)
            elif callable(measure := getattr(kernel, "measure", None)):
                measure(calibration.prompts)  # what it takes from data without training
            self._kernels[key] = kernel
        return self._kernels[key]


def _kinds(
    name: str, shape: HeadShape, seeds: list[int], controls: int
) -> Iterator[tuple[str, list[int]]]:
    """The parts of one kernel and layer with their seeds."""
    own = seeds if _draws(name, shape) else seeds[:1]
    for kind in KINDS:
        yield kind, own
    if controls:
        for seed in own:
            yield "controls", [seed]


def _draws(name: str, shape: HeadShape) -> bool:
    """Whether the kernel's structure or start depends on the seed."""
    one, other = (get(name).build(shape, _draw(seed, 0)).state_dict() for seed in (0, 1))
    return any(not torch.equal(one[key], other[key]) for key in one)


def _draw(seed: int, layer: int) -> dict[str, Any]:
    """Settings of a kernel that draws apart in every layer, as in a conversion."""
    return {"seed": seed * 1000 + layer}


def _check(names: list[str], inputs: Inputs, seeds: list[int]) -> None:
    if not names or not seeds:
        raise PlanError("retained errors", "no kernel or no seed", "Name at least one of each.")
    for name in names:
        cls = get(name)
        if cls.exact:
            raise PlanError(
                f"the retained error of kernel {name!r}",
                "a kernel without error",
                "Leave it out.",
            )
        for layer in inputs.layers:
            cls.build(layer.shape, {})  # a shape it cannot take shows before work


def _settings(
    inputs: Inputs, seeds: list[int], positions: int, controls: int, fitted: bool
) -> dict[str, Any]:
    """Everything that decides a part besides its name."""
    settings = inputs.plan.model_dump(mode="json", exclude={"kernel", "layers", "options"})
    return settings | {
        "model": model_identity(inputs.loaded.model),
        "text": text_identity(inputs.tokens),
        "seeds": seeds,
        "query_positions": positions,
        "controls": controls,
        "fitted": fitted,
        "protocol": PROTOCOL,
    }


def _coordinates(selected: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in selected]


def _selection(layer: int, work: list[_Part], done: dict[_Part, Any]) -> Selection:
    pretrained, gaussian = (
        next(done[p]["selected"] for p in work if p.layer == layer and p.kind == kind)
        for kind in KINDS
    )
    return Selection(layer, pretrained, gaussian)


def _summary(name: str, work: list[_Part], done: dict[_Part, Any]) -> KernelRetained:
    """Average over the seeds, and over the heads of a layer; the rest is statistics."""
    layers = sorted({part.layer for part in work})

    def errors(kind: str, which: str) -> Tensor:  # [layers, B]
        stored = [done[part][which] for part in work if part.kind == kind]
        return torch.stack([torch.tensor(each).double().mean((0, 2)) for each in stored])

    def drawn(layer: int) -> Tensor:  # [replicates, B]
        stored = [done[p]["errors"] for p in work if p.kind == "controls" and p.layer == layer]
        return torch.stack([torch.tensor(each).double() for each in stored]).mean(0)

    tested = any(part.kind == "controls" for part in work)
    return summarise(
        name,
        list(next(part.seeds for part in work if part.kind == "pretrained")),
        layers,
        {kind: (errors(kind, "hybrid"), errors(kind, "full")) for kind in KINDS},
        torch.stack([drawn(layer) for layer in layers]) if tested else None,
    )
