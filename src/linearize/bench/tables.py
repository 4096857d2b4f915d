"""The results of the benchmarks as tables of plain text, for the terminal and for Markdown."""

from __future__ import annotations

from typing import Any

from linearize.bench.decode import DecodeBench
from linearize.bench.measure import Timing
from linearize.bench.model import STAGES, ModelBench
from linearize.bench.operator import OperatorBench, OperatorRow
from linearize.diagnose.tables import Rows, Shown

__all__ = ["decode_tables", "model_tables", "operator_tables"]


def operator_tables(result: OperatorBench) -> Shown:
    """A table a precision, lengths one after the other."""
    backward = bool(result.settings["backward"])
    shown = []
    notes: list[str] = []
    for dtype in result.settings["dtypes"]:
        columns = [dtype, "tokens", "ms", "±", "speedup"]
        columns += ["backward ms"] if backward else []
        columns += ["MiB", "GFLOP/s", "ceiling", "error"]
        rows = [row for row in result.rows if row.dtype == dtype]
        shown.append(Rows(columns, [_operator_row(row, backward) for row in rows]))
        for row in rows:
            if row.reason is not None:
                notes.append(f"{row.path}, {dtype}, {row.tokens:,} tokens: {row.reason}")
        ceiling = result.ceilings[dtype]
        notes.append(f"{dtype} ceiling: {ceiling:,.0f} GFLOP/s in square matrix products")
        for crossing in result.crossovers:
            if crossing.dtype == dtype:
                notes.append(f"{crossing.path}, {dtype}: {crossing.note}")
    shape = result.settings["shape"]
    notes.append(
        f"{shape['query_heads']} query and {shape['kv_heads']} KV heads of {shape['head_dim']}/"
        f"{shape['value_dim']} dimensions, batch 1, window {result.settings['window']}, sinks "
        f"{result.settings['sinks']}, state rank {result.settings['state_rank'] or 'full'}; normal "
        "inputs, unfitted coefficients, on which times do not depend"
    )
    notes.append(
        "±: half the distance of the quartiles, of the median; speedup: over the fastest softmax of "
        "this length; MiB: most allocated at once beyond inputs and outputs; GFLOP/s: arithmetic the "
        "method cannot do without, a second; ceiling: as a share of that of square matrix products; "
        "error: relative, against the definition in fp64"
    )
    notes.append(_machine(result.machine))
    return shown, "\n".join(notes)


def decode_tables(result: DecodeBench) -> Shown:
    """Tokens per second and memory at every context length."""
    columns = [
        *("context", "converted tokens/s", "±", "softmax tokens/s", "±"),
        *("speedup", "softmax in place", "±", "converted MB", "softmax MB"),
    ]
    rows, notes = [], []
    batch = result.settings["batch"]
    for point in result.points:
        if point.reason is not None:
            notes.append(f"{point.context:,} tokens: {point.status}, {point.reason}")
        rows.append(
            [
                f"{point.context:,}",
                *_rate(point.converted, point.status, batch),
                *_rate(point.softmax, point.status, batch),
                "-" if point.speedup is None else f"{point.speedup:.2f}",
                *_rate(point.softmax_in_place, point.status, batch),
                _megabytes(point.converted_bytes),
                _megabytes(point.softmax_bytes),
            ]
        )
    timed = [point.converted.median for point in result.points if point.converted is not None]
    if len(timed) > 1:
        notes.append(
            f"converted, longest context against shortest: {timed[0] / timed[-1]:.3f} of the speed"
        )
    measured = [point for point in result.points if point.state_bytes is not None]
    if measured:
        last = measured[-1]
        notes.append(
            f"converted heads hold {_megabytes(last.state_bytes)} MB of a sequence, as "
            f"{last.state_tokens:,.0f} cached tokens of theirs would"
        )
    if batch > 1:
        notes.append(f"{batch} sequences side by side: tokens/s and memory are of all of them")
    notes.append(
        "softmax in place: tokens/s of softmax with the cache that converted models give their softmax "
        "layers, which appends where transformers copies"
    )
    notes += [result.method, *_target(result.settings), _machine(result.machine)]
    return [Rows(columns, rows, 0)], "\n".join(notes)


def model_tables(result: ModelBench) -> Shown:
    """Every stage at every length."""
    columns = ["stage", "tokens", "converted s", "±", "softmax s", "±"]
    columns += ["time ratio", "converted tokens/s", "softmax tokens/s"]
    rows, notes = [], []
    for point in result.points:
        if point.reason is not None:
            notes.append(f"{point.stage}, {point.tokens:,} tokens: {point.status}, {point.reason}")
        made = point.new_tokens or point.tokens
        rows.append(
            [
                point.stage,
                f"{point.tokens:,}",
                *_seconds(point.converted, point.status),
                *_seconds(point.softmax, point.status),
                "-" if point.ratio is None else f"{point.ratio:.2f}",
                "-" if point.converted is None else f"{made / point.converted.median:,.1f}",
                "-" if point.softmax is None else f"{made / point.softmax.median:,.1f}",
            ]
        )
    notes += [f"{stage}: {what}" for stage, what in STAGES.items()]
    notes.append(
        f"generation: {result.settings['new_tokens']} new tokens; tokens/s counts these alone"
    )
    notes += [*_target(result.settings), _machine(result.machine)]
    return [Rows(columns, rows)], "\n".join(notes)


def _operator_row(row: OperatorRow, backward: bool) -> list[str]:
    cells = [row.path, f"{row.tokens:,}"]
    if row.forward is None:
        cells += [row.status, "-", "-", *(["-"] if backward else []), "-", "-", "-"]
    else:
        cells += [_milliseconds(row.forward.median), _spread(row.forward)]
        cells.append("-" if row.speedup is None else f"{row.speedup:.2f}")
        if backward:
            cells.append("-" if row.backward is None else _milliseconds(row.backward.median))
        assert row.peak_bytes is not None
        cells += [
            f"{row.peak_bytes / 2**20:,.1f}",
            f"{row.gflops:,.1f}",
            f"{row.ceiling_share:.1%}",
        ]
    return [*cells, "-" if row.error is None else f"{row.error:.1e}"]


def _rate(timing: Timing | None, status: str, tokens: int) -> list[str]:
    if timing is None:
        return [status, "-"]
    return [f"{tokens / timing.median:,.2f}", _spread(timing)]


def _seconds(timing: Timing | None, status: str) -> list[str]:
    return [status, "-"] if timing is None else [f"{timing.median:.3g}", _spread(timing)]


def _spread(timing: Timing) -> str:
    return f"{(timing.high - timing.low) / 2 / timing.median:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"


def _target(settings: dict[str, Any]) -> list[str]:
    plan = settings["plan"] or {}
    layers = settings["converted_layers"]
    note = (
        f"{len(layers)} of {settings['attention_layers']} layers converted with kernel "
        f"{plan.get('kernel')}, window {plan.get('window')}, sinks {plan.get('sinks')}, state rank "
        f"{plan.get('state_rank') or 'full'}, {settings['dtype']}"
    )
    fitted = (
        "" if settings["fitted"] else "; the kernels are unfitted, on which times do not depend"
    )
    return [note + fitted]


def _machine(machine: dict[str, Any]) -> str:
    processor = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    return (
        f"{processor}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['versions']['torch']}"
    )
