"""`linearize bench`: speed and memory beside softmax, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from typer import Option

from linearize import bench as measure
from linearize.bench import tables
from linearize.cli.common import (
    DEFAULTS,
    JsonOption,
    OverwriteOption,
    SeedOption,
    SinksOption,
    WindowOption,
    load_model,
    progress,
    results,
    say,
    store_json,
    table,
)
from linearize.errors import PlanError
from linearize.kernels import HeadShape, get
from linearize.output import check_writable, new_folder, write_json, write_text
from linearize.plan import Plan
from linearize.report import bench_figures as figures

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Time converted attention beside softmax: one layer, decoding, or the whole model.",
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|DIR",
        help="A converted folder, or an original model, whose layers then get unfitted kernels.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None, Option("--out", metavar="DIR", help="Folder for tables, numbers and charts.")
]
ThreadsOption = Annotated[
    int | None, Option("--threads", min=1, help="Processor threads; by default torch's choice.")
]
MemoryOption = Annotated[
    float | None,
    Option("--memory", min=0, help="GB that may be used; by default 60 % of what is free."),
]
DeviceOption = Annotated[
    str | None, Option("--device", help="cpu or cuda; by default cuda where there is one.")
]
RankOption = Annotated[
    int | None, Option("--state-rank", help="Directions of the keys the kernel sees; default all.")
]
ModelWindowOption = Annotated[int | None, Option("--window", help="Latest keys kept exact.")]
ModelSinksOption = Annotated[int | None, Option("--sinks", help="First keys kept exact.")]
LayersOption = Annotated[
    str | None, Option("--layers", help='Layers to convert, like "3-26", of an original model.')
]
KernelOption = Annotated[
    str | None, Option("--kernel", help="Kernel of an original model's converted layers.")
]


@bench.command("operator")
def operator(
    lengths: Annotated[str, Option("--lengths", metavar="N,N")] = "1024,4096,16384,32768",
    dtype: Annotated[str, Option("--dtype", metavar="A,B", help="fp32, bf16, fp16.")] = "fp32,bf16",
    kernels: Annotated[str, Option("--kernels", metavar="A,B", help='Kernels, or "all".')] = "all",
    heads: Annotated[int, Option("--heads", min=1, help="Query heads.")] = 9,
    kv_heads: Annotated[int, Option("--kv-heads", min=1, help="Key and value heads.")] = 3,
    dim: Annotated[int, Option("--dim", min=1, help="Of queries, keys and values.")] = 64,
    groups: Annotated[int, Option("--groups", min=1, help="Groups of the OAL kernel.")] = 5,
    window: WindowOption = 0,
    sinks: SinksOption = 0,
    state_rank: RankOption = None,
    backward: Annotated[bool, Option("--backward", help="Also time gradients.")] = False,
    repeats: Annotated[int, Option("--repeats", min=1, help="Timed rounds after warm-up.")] = 5,
    budget: Annotated[
        float, Option("--budget", min=0, help="Seconds one path may take at one length.")
    ] = 60.0,
    memory: MemoryOption = None,
    backend: Annotated[str, Option("--backend", help="Engine of the kernels.")] = "auto",
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    seed: SeedOption = DEFAULTS.seed,
    json: JsonOption = None,
) -> None:
    """Time one attention layer on random inputs: every kernel, and SDPA flash and math.

    A path whose output is not that of the definition gets no time, only its error. What a budget
    or the memory does not allow is left out with the reason.

    Examples:

    \b
      linearize bench operator --lengths 1024,4096,16384,32768 --dtype fp32,bf16 --json op.json
      linearize bench operator --kernels oal,global --window 64 --sinks 4 --state-rank 8
      linearize bench operator --heads 14 --kv-heads 2 --lengths 1024,2048,4096 --backward
    """
    if heads % kv_heads:
        raise PlanError(
            f"{heads} query heads with {kv_heads} KV heads",
            "a number that is no multiple",
            "Every KV head serves the same number of query heads.",
        )
    _start(out, overwrite, threads)
    plan = Plan(window=window, sinks=sinks, state_rank=state_rank, seed=seed)
    with progress("operator") as advance:
        result = measure.operator_benchmark(
            HeadShape(heads, kv_heads, dim, dim, dim**-0.5),
            lengths=_numbers("--lengths", lengths),
            dtypes=_names(dtype),
            kernels=None if kernels == "all" else _names(kernels),
            plan=plan,
            groups=groups,
            backward=backward,
            repeats=repeats,
            budget=budget,
            memory=_bytes(memory),
            device=_device(device),
            backend=backend,
            progress=advance,
        )
    shown = tables.operator_tables(result)
    _finish("operator", result, shown, figures.operator_figures, out, overwrite, json)


@bench.command("decode", no_args_is_help=True)
def decode(
    model: ModelArgument,
    layers: LayersOption = None,
    contexts: Annotated[str, Option("--contexts", metavar="N,N")] = "1024,8192,32768",
    kernel: KernelOption = None,
    window: ModelWindowOption = None,
    sinks: ModelSinksOption = None,
    state_rank: RankOption = None,
    batch: Annotated[int, Option("--batch", min=1, help="Sequences side by side.")] = 1,
    tokens: Annotated[int, Option("--tokens", min=1, help="Timed tokens a turn.")] = 8,
    repeats: Annotated[int, Option("--repeats", min=1, help="Turns of each model.")] = 5,
    memory: MemoryOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = None,
) -> None:
    """Time decoding at each context length: the converted model and the same weights with softmax.

    The context is not read; caches are filled with random keys and values of its length, and
    states with what the operator makes of such. An original model gets unfitted kernels: good for
    times, not for text.

    Examples:

    \b
      linearize bench decode smollm2-135m --layers 3-26 --contexts 1024,8192,32768
      linearize bench decode out/demo --contexts 1024,32768 --json decode.json
      linearize bench decode out/demo --contexts 1024 --batch 16
    """
    plan = _plan(layers, kernel, window, sinks, state_rank)
    chosen = _numbers("--contexts", contexts)
    target = _target(model, plan, out, overwrite, threads, device)
    with progress("decode") as advance:
        result = measure.decode_benchmark(
            target,
            contexts=chosen,
            batch=batch,
            tokens=tokens,
            repeats=repeats,
            memory=_bytes(memory),
            progress=advance,
        )
    shown = tables.decode_tables(result)
    _finish("decode", result, shown, figures.decode_figures, out, overwrite, json)


@bench.command("model", no_args_is_help=True)
def whole_model(
    model: ModelArgument,
    layers: LayersOption = None,
    lengths: Annotated[str, Option("--lengths", metavar="N,N")] = "1024,4096",
    kernel: KernelOption = None,
    window: ModelWindowOption = None,
    sinks: ModelSinksOption = None,
    state_rank: RankOption = None,
    new_tokens: Annotated[int, Option("--new-tokens", min=1, help="Tokens to generate.")] = 32,
    repeats: Annotated[int, Option("--repeats", min=1, help="Timed rounds after warm-up.")] = 3,
    budget: Annotated[
        float, Option("--budget", min=0, help="Seconds one stage may take at one length.")
    ] = 120.0,
    memory: MemoryOption = None,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = None,
) -> None:
    """Time the whole model, converted and with softmax: prefill, a training step, generation.

    Examples:

    \b
      linearize bench model smollm2-135m --layers 3-26 --lengths 1024,4096
      linearize bench model out/demo --lengths 1024 --new-tokens 64 --out out/speed
    """
    plan = _plan(layers, kernel, window, sinks, state_rank)
    chosen = _numbers("--lengths", lengths)
    target = _target(model, plan, out, overwrite, threads, device)
    with progress("model") as advance:
        result = measure.model_benchmark(
            target,
            lengths=chosen,
            new_tokens=new_tokens,
            repeats=repeats,
            budget=budget,
            memory=_bytes(memory),
            progress=advance,
        )
    shown = tables.model_tables(result)
    _finish("model", result, shown, figures.model_figures, out, overwrite, json)


def _start(out: Path | None, overwrite: bool, threads: int | None) -> None:
    if out is not None:
        check_writable(out, overwrite)
    if threads is not None:
        torch.set_num_threads(threads)


def _target(
    model: str,
    plan: Plan | None,
    out: Path | None,
    overwrite: bool,
    threads: int | None,
    device: str | None,
) -> measure.Target:
    _start(out, overwrite, threads)
    place = _device(device)
    loaded = load_model(model)
    torch.nn.Module.to(loaded.model, place)
    return measure.prepare(loaded, plan)


def _plan(
    layers: str | None,
    kernel: str | None,
    window: int | None,
    sinks: int | None,
    state_rank: int | None,
) -> Plan | None:
    """The plan of the options that were given; ``None`` if none was."""
    given = {
        "layers": layers,
        "kernel": kernel,
        "window": window,
        "sinks": sinks,
        "state_rank": state_rank,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if kernel is not None:
        get(kernel)
    return Plan(**given) if given else None


def _finish(
    name: str,
    result: Any,
    shown: Any,
    draw: Callable[[Any], dict[str, str]],
    out: Path | None,
    overwrite: bool,
    json: Path | None,
) -> None:
    rows, sentence = shown
    for each in rows:
        results.print(_rich(each))
    say(sentence)
    if out is not None:
        with new_folder(out, overwrite) as folder:
            charts = draw(result)
            for file, svg in charts.items():
                write_text(folder / f"{file}.svg", svg)
            write_json(folder / f"{name}.json", asdict(result))
            write_text(folder / "index.md", _page(name, rows, sentence, list(charts)))
        say(f"wrote {out}/index.md")
    store_json(json, asdict(result))


def _page(name: str, rows: list[Any], sentence: str, charts: list[str]) -> str:
    lines = [f"# Benchmark: {name}", ""]
    for chart in charts:
        lines += [f"![{chart}]({chart}.svg)", ""]
    for each in rows:
        marks = [":--" if at < each.left else "--:" for at in range(len(each.columns))]
        lines += [f"| {' | '.join(row)} |" for row in (each.columns, marks, *each.rows)]
        lines.append("")
    lines += [f"- {line}" for line in sentence.splitlines()]
    return "\n".join([*lines, "", f"Numbers: [{name}.json]({name}.json)", ""])


def _rich(rows: Any) -> Table:
    made = table(*rows.columns, left=rows.left)
    for row in rows.rows:
        made.add_row(*row)
    return made


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str) -> list[int]:
    parts = _names(text)
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise PlanError(f"{option} {text!r}", "no list of positive numbers", "Write 1024,4096.")
    return [int(part) for part in parts]


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _device(name: str | None) -> torch.device:
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(chosen)
    except RuntimeError:
        raise PlanError(f"device {chosen!r}", "no such device", "Use cpu or cuda.") from None
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and not torch.cuda.is_available()
    ):
        raise PlanError(f"device {chosen!r}", "none here", "Use cpu.")
    return device
