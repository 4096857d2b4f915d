"""How the benchmarks measure: interleaved timing, peak memory, the machine's ceiling and crossovers."""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from linearize.versions import versions

__all__ = [
    "Progress",
    "Timing",
    "available_memory",
    "clock",
    "crossover",
    "interleave",
    "machine",
    "matmul_ceiling",
    "memory_limit",
    "peak_memory",
    "silent",
]

T = TypeVar("T")
Progress = Callable[[int, int, str], None]  # steps done, steps in all, what was done
CEILING_SIZE = 2048  # rows of the square matrices that show the ceiling; four times that on a GPU
CEILING_RUNS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, quartiles and all samples in the order they were taken."""

    median: float
    low: float
    high: float
    samples: list[float]

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """Summarise at least one sample; the quartiles of fewer than four are their extremes."""
        if len(samples) < 4:
            low, high = min(samples), max(samples)
        else:
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(statistics.median(samples), low, high, list(samples))


def silent(done: int, total: int, message: str) -> None:
    """Progress nobody watches."""


def clock(device: torch.device) -> float:
    """Seconds, once everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def interleave(
    candidates: dict[str, Callable[[], dict[str, list[float]]]], *, repeats: int, budget: float
) -> dict[str, dict[str, Timing]]:
    """Run all candidates in turn, round after round, so that a noisy moment meets them alike.

    The order rotates from round to round. Candidates are warm already.

    Args:
        candidates: each runs once and returns its durations in seconds by name.
        repeats: rounds.
        budget: seconds one candidate may take in all; it sits out further rounds, but has one.

    Returns:
        a :class:`Timing` for every candidate and duration.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in candidates}
    spent, runs = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0)
    names = list(candidates)
    for turn in range(repeats):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            if runs[name] and spent[name] * (1 + 1 / runs[name]) > budget:
                continue
            started = time.perf_counter()
            for key, values in candidates[name]().items():
                samples[name].setdefault(key, []).extend(values)
            spent[name] += time.perf_counter() - started
            runs[name] += 1
    return {
        name: {key: Timing.of(values) for key, values in found.items()}
        for name, found in samples.items()
    }


def peak_memory(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """The result of a call, and the most bytes that were allocated at once while it ran.

    Counted allocation by allocation: tensors that lived before do not count, results do. On the CPU
    that is every tensor of torch; scratch space that a matrix library keeps for itself is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start otherwise
    collecting = gc.isenabled()
    gc.disable()  # nothing older is to be freed meanwhile
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = call()
    finally:
        if collecting:
            gc.enable()
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    alive = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        peak = max(peak, alive)
    return result, peak


def matmul_ceiling(dtype: torch.dtype, device: torch.device) -> float:
    """GFLOP/s of large square matrix products: the best of a few."""
    size = CEILING_SIZE * (4 if device.type == "cuda" else 1)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(1 + CEILING_RUNS):
        started = clock(device)
        a @ b
        best = min(best, clock(device) - started)
    return 2 * size**3 / best / 1e9


def crossover(lengths: Sequence[int], times: Sequence[float], reference: Sequence[float]) -> float:
    """The length from which ``times`` stay below ``reference``, as all later points confirm.

    Between two lengths the logarithm of the ratio is taken as linear in the logarithm of the length.

    Returns:
        the length; 0 if already the first is faster, ``inf`` if the last is not.
    """
    gaps = [math.log(t / r) for t, r in zip(times, reference, strict=True)]
    if gaps[-1] >= 0:
        return math.inf
    slower = [at for at, gap in enumerate(gaps) if gap >= 0]
    if not slower:
        return 0.0
    at = slower[-1]
    share = gaps[at] / (gaps[at] - gaps[at + 1])
    low, high = math.log(lengths[at]), math.log(lengths[at + 1])
    return math.exp(low + share * (high - low))


def memory_limit(asked: int | None, device: torch.device) -> int:
    """Bytes a benchmark may use: those asked for, or 60 % of what could still be allocated."""
    return asked or int(0.6 * available_memory(device))


def available_memory(device: torch.device) -> int:
    """Bytes that could still be allocated."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def machine(device: torch.device) -> dict[str, Any]:
    """What a time depends on: processor or GPU, cores, threads, versions."""
    described: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
    return described | {"versions": versions()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
