"""One attention layer on random inputs: every kernel beside softmax (the OAL paper's figure 3)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linearize import kernels as catalogue
from linearize.bench.measure import (
    Progress,
    Timing,
    clock,
    crossover,
    interleave,
    machine,
    matmul_ceiling,
    memory_limit,
    peak_memory,
    silent,
)
from linearize.bench.oracle import BOUNDS, deviation, expected
from linearize.bench.paths import (
    CHECKED,
    DTYPES,
    AttentionPath,
    arithmetic,
    check_small,
    paths_of,
    random_inputs,
    short,
)
from linearize.errors import LinearizeError, PlanError
from linearize.kernels import HeadShape
from linearize.plan import Plan

__all__ = ["Crossover", "OperatorBench", "OperatorRow", "operator_benchmark"]

ROWS = 16  # query rows checked at the full length


@dataclass(frozen=True)
class OperatorRow:
    """One path at one length and precision.

    Attributes:
        path, title: ``"sdpa-flash"``, ``"sdpa-math"``, ... or the kernel's name, and how tables call it.
        reference: whether it is softmax itself.
        dtype: of the inputs. tokens: length.
        status: ``"ok"``, ``"differs"`` (not timed, since not the definition's output) or ``"skipped"``.
        reason: why there is no time.
        error: largest relative output error per head against the fp64 definition, over all rows at a
            small length and a sample of rows at this one.
        gradient_error: the same for the gradients of q, k, v at the small length.
        forward: seconds of a call without gradients.
        forward_with_gradients, backward: seconds of the two halves of a training step.
        peak_bytes: most bytes allocated at once beyond inputs and outputs. total_bytes: with them.
        backward_peak_bytes: the same for a training step, beyond inputs, outputs and gradients.
        gflops: arithmetic of the method (:func:`arithmetic`) per second of the forward call.
        ceiling_share: that against square matrix products in the inputs' precision.
        speedup: time of the fastest softmax at this length over the time of this forward call.
    """

    path: str
    title: str
    reference: bool
    dtype: str
    tokens: int
    status: str
    reason: str | None = None
    error: float | None = None
    gradient_error: float | None = None
    forward: Timing | None = None
    forward_with_gradients: Timing | None = None
    backward: Timing | None = None
    peak_bytes: int | None = None
    total_bytes: int | None = None
    backward_peak_bytes: int | None = None
    gflops: float | None = None
    ceiling_share: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Crossover:
    """From which length a kernel is faster than the fastest softmax, by interpolation.

    ``tokens`` is ``None`` where it is not within ``first``..``last``; ``note`` says which side.
    """

    path: str
    dtype: str
    tokens: float | None
    first: int
    last: int
    note: str


@dataclass(frozen=True)
class OperatorBench:
    """All rows of one run, with what they depend on.

    ``ceilings`` are GFLOP/s of square matrix products; ``settings`` everything that was asked for.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    ceilings: dict[str, float]
    rows: list[OperatorRow]
    crossovers: list[Crossover]
    seconds: float


def operator_benchmark(
    shape: HeadShape,
    *,
    lengths: Sequence[int],
    dtypes: Sequence[str] = ("fp32",),
    kernels: Sequence[str] | None = None,
    plan: Plan | None = None,
    groups: int = 5,
    backward: bool = False,
    repeats: int = 5,
    budget: float = 60.0,
    memory: int | None = None,
    device: str | torch.device = "cpu",
    backend: str = "auto",
    progress: Progress = silent,
) -> OperatorBench:
    """Time every kernel and softmax on the same normal q, k, v of batch 1.

    A path is timed only where its output is that of the definition: every row (and, with
    ``backward``, every gradient) at a small length, a random sample of rows at the full one.

    Args:
        shape: heads and dimensions. lengths: tokens. dtypes: names in :data:`DTYPES`.
        kernels: names; by default all but softmax, which SDPA stands for.
        plan: window, sinks, state rank and seed are taken from here. groups: of the OAL kernel, whose
            coefficients, like all others', are unfitted starts.
        backward: also time training steps.
        repeats: timed rounds after the warm-up. budget: seconds one path may take at one length.
        memory: bytes one path may need; by default 60 % of what is free.
        device, backend: where, and by which engine.
        progress: told after every path and length.

    Raises:
        PlanError: an unknown kernel, precision or setting.
    """
    started = time.perf_counter()
    place = torch.device(device)
    plan = plan or Plan()
    for name in dtypes:
        if name not in DTYPES:
            raise PlanError(f"precision {name!r}", f"{', '.join(DTYPES)}", "Choose among these.")
    if not lengths or min(lengths) < 1 or repeats < 1:
        raise PlanError(f"lengths {list(lengths)}", "no positive length", "Give some.")
    names = _chosen(kernels, plan)
    limit = memory_limit(memory, place)
    lengths = sorted(set(lengths))
    rows: list[OperatorRow] = []
    ceilings: dict[str, float] = {}
    crossovers: list[Crossover] = []
    described = machine(place)
    generator = torch.Generator().manual_seed(plan.seed)
    for dtype in dtypes:
        ceilings[dtype] = matmul_ceiling(DTYPES[dtype], place)
        paths = paths_of(shape, names, plan, groups, place, backend)
        total = len(dtypes) * len(lengths) * len(paths)
        of_dtype: list[OperatorRow] = []
        for path in paths:
            check_small(path, shape, DTYPES[dtype], place, backward)
        for tokens in lengths:
            q, k, v = random_inputs(shape, tokens, DTYPES[dtype], place, generator)
            run = _Run(tokens, dtype, q, k, v, repeats, budget, limit, backward, ceilings[dtype])

            advance = partial(_tell, progress, run, len(rows + of_dtype), total)
            of_dtype += run.measure(paths, advance)
        fastest = _fastest_softmax(of_dtype)
        rows += [_with_speedup(row, fastest) for row in of_dtype]
        crossovers += _crossovers(of_dtype, fastest, dtype)
    settings = {
        "shape": vars(shape) | {"batch": 1},
        "lengths": list(lengths),
        "dtypes": list(dtypes),
        "kernels": names,
        "groups": groups,
        "window": plan.window,
        "sinks": plan.sinks,
        "state_rank": plan.state_rank,
        "backward": backward,
        "repeats": repeats,
        "budget": budget,
        "memory": limit,
        "backend": backend,
        "seed": plan.seed,
        "checked_tokens": CHECKED,
        "checked_rows": ROWS,
        "bounds": {name: BOUNDS[DTYPES[name]] for name in dtypes},
    }
    seconds = time.perf_counter() - started
    return OperatorBench(settings, described, ceilings, rows, crossovers, seconds)


def _tell(progress: Progress, run: _Run, before: int, total: int, done: int, path: str) -> None:
    progress(before + done, total, f"{run.dtype} {run.tokens:,} tokens: {path}")


@dataclass
class _Run:
    """All paths at one length and precision."""

    tokens: int
    dtype: str
    q: Tensor
    k: Tensor
    v: Tensor
    repeats: int
    budget: float
    limit: int
    backward: bool
    ceiling: float

    def measure(
        self, paths: list[AttentionPath], advance: Callable[[int, str], None]
    ) -> list[OperatorRow]:
        found: dict[str, dict[str, Any]] = {}
        for done, path in enumerate(paths, 1):
            found[path.name] = self._warm(path)
            advance(done, path.name)
        able = {path.name: path for path in paths if found[path.name]["status"] == "ok"}
        timed = interleave(
            {name: self._forward(path) for name, path in able.items()},
            repeats=self.repeats,
            budget=self.budget,
        )
        stepping = {n: p for n, p in able.items() if "backward_peak_bytes" in found[n]}
        steps = interleave(
            {name: self._step(path) for name, path in stepping.items()},
            repeats=self.repeats,
            budget=self.budget,
        )
        for name, path in able.items():
            forward = timed[name]["forward"]
            path.known["forward"] = self.tokens, forward.median
            shape = path.oracle.shape
            work = arithmetic(path.layer, shape, self.tokens)
            found[name] |= timed[name] | steps.get(name, {})
            found[name]["gflops"] = work / forward.median / 1e9
            found[name]["ceiling_share"] = found[name]["gflops"] / self.ceiling
            if name in steps:
                step = steps[name]
                seconds = step["forward_with_gradients"].median + step["backward"].median
                path.known["step"] = self.tokens, seconds
        return [
            OperatorRow(
                path.name,
                path.title,
                path.layer is None or path.layer.every_key,
                self.dtype,
                self.tokens,
                **found[path.name],
            )
            for path in paths
        ]

    def _warm(self, path: AttentionPath) -> dict[str, Any]:
        """The first call: measures memory, and compares rows with the definition."""
        if path.refusal is not None:
            status, why = path.refusal
            error = None if math.isnan(path.error) else path.error
            return {
                "status": status,
                "reason": why,
                "error": error,
                "gradient_error": path.gradient_error,
            }
        reason = self._too_much(path, "forward", "peak_bytes")
        if reason is not None:
            return {"status": "skipped", "reason": reason}
        try:
            with torch.no_grad():
                output, peak = peak_memory(lambda: path.run(self.q, self.k, self.v), self.q.device)
        except (RuntimeError, LinearizeError) as failure:
            return {"status": "skipped", "reason": f"cannot run: {short(failure)}"}
        beyond = peak - output.nbytes
        path.known["peak_bytes"] = self.tokens, beyond
        off = max(path.error, self._sample_error(path, output))
        if off > BOUNDS[DTYPES[self.dtype]]:
            text = f"output off by {off:.2g} of its size"
            return {"status": "differs", "reason": text, "error": off}
        inputs = self.q.nbytes + self.k.nbytes + self.v.nbytes
        found: dict[str, Any] = {
            "status": "ok",
            "error": off,
            "gradient_error": path.gradient_error,
            "peak_bytes": beyond,
            "total_bytes": inputs + peak,
        }
        if self.backward:
            reason = self._too_much(path, "step", "backward_peak_bytes")
            if reason is None:
                found["backward_peak_bytes"] = self._step_memory(path)
            else:
                found["reason"] = f"no backward: {reason}"
        return found

    def _step_memory(self, path: AttentionPath) -> int:
        results: list[Tensor] = []

        def step() -> None:
            output, leaves = self._with_gradients(path)
            output.backward(torch.ones_like(output))
            results.extend([output, *(x.grad for x in leaves if x.grad is not None)])

        _, peak = peak_memory(step, self.q.device)
        beyond = peak - sum(x.nbytes for x in results)
        path.known["backward_peak_bytes"] = self.tokens, beyond
        self._forget_gradients(path)
        return beyond

    def _too_much(self, path: AttentionPath, time_of: str, memory_of: str) -> str | None:
        """Why a path is not even tried: what shorter lengths or its score matrix predict."""
        pairs = path.score_bytes * path.oracle.shape.query_heads * self.tokens**2
        grows = 2 if path.score_bytes else 1
        needed = max(pairs, path.predicted(memory_of, self.tokens, grows))
        if needed > self.limit:
            return f"would need {needed / 1e9:.1f} GB of memory; the limit is {self.limit / 1e9:.1f} GB"
        seconds = path.predicted(time_of, self.tokens, 2 if path.quadratic else 1)
        if 2 * seconds > self.budget:
            return f"would take {seconds:.3g} s a call; the budget is {self.budget:.3g} s"
        return None

    def _sample_error(self, path: AttentionPath, output: Tensor) -> float:
        generator = torch.Generator().manual_seed(self.tokens)
        at = torch.randperm(self.tokens, generator=generator)[:ROWS]
        at[0] = self.tokens - 1
        at = at.sort().values.to(output.device)
        with torch.no_grad():
            wanted = expected(path.oracle, self.q[:, :, at], self.k, self.v, at)
        return deviation(output[:, :, at], wanted)

    def _forward(self, path: AttentionPath) -> Callable[[], dict[str, list[float]]]:
        def call() -> dict[str, list[float]]:
            with torch.no_grad():
                started = clock(self.q.device)
                path.run(self.q, self.k, self.v)
                return {"forward": [clock(self.q.device) - started]}

        return call

    def _step(self, path: AttentionPath) -> Callable[[], dict[str, list[float]]]:
        def call() -> dict[str, list[float]]:
            started = clock(self.q.device)
            output, _ = self._with_gradients(path)
            middle = clock(self.q.device)
            output.backward(torch.ones_like(output))
            seconds = {
                "forward_with_gradients": [middle - started],
                "backward": [clock(self.q.device) - middle],
            }
            self._forget_gradients(path)
            return seconds

        return call

    def _with_gradients(self, path: AttentionPath) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        parameters = [] if path.layer is None else list(path.layer.parameters())
        return path.run(q, k, v), leaves + parameters

    def _forget_gradients(self, path: AttentionPath) -> None:
        if path.layer is not None:
            path.layer.zero_grad(set_to_none=True)


def _chosen(kernels: Sequence[str] | None, plan: Plan) -> list[str]:
    """The kernels to run; with a state rank those that have one."""
    if kernels is None:
        every = [catalogue.get(name) for name in catalogue.available()]
        return [
            kernel.name
            for kernel in every
            if not kernel.exact and (plan.state_rank is None or kernel.projects)
        ]
    for name in kernels:
        catalogue.get(name)
    return list(kernels)


def _fastest_softmax(rows: list[OperatorRow]) -> dict[int, float]:
    """Seconds of the fastest softmax that was timed, by length."""
    fastest: dict[int, float] = {}
    for row in rows:
        if row.reference and row.forward is not None:
            best = fastest.get(row.tokens, math.inf)
            fastest[row.tokens] = min(best, row.forward.median)
    return fastest


def _with_speedup(row: OperatorRow, fastest: dict[int, float]) -> OperatorRow:
    if row.forward is None or row.tokens not in fastest:
        return row
    return replace(row, speedup=fastest[row.tokens] / row.forward.median)


def _crossovers(rows: list[OperatorRow], fastest: dict[int, float], dtype: str) -> list[Crossover]:
    """For every kernel, against the fastest softmax that was timed at each length."""
    found = []
    for path in dict.fromkeys(row.path for row in rows if not row.reference):
        times = {
            row.tokens: row.forward.median
            for row in rows
            if row.path == path and row.forward is not None and row.tokens in fastest
        }
        if not times:
            continue
        lengths = sorted(times)
        at = crossover(lengths, [times[n] for n in lengths], [fastest[n] for n in lengths])
        first, last = lengths[0], lengths[-1]
        note = (
            f"faster from {first:,} tokens on, the shortest measured"
            if at == 0
            else f"not faster up to {last:,} tokens"
            if at == math.inf
            else f"faster from about {at:,.0f} tokens on"
        )
        inside = at if 0 < at < math.inf else None
        found.append(Crossover(path, dtype, inside, first, last, note))
    return found
