"""`linearize fidelity`: every kernel beside softmax on a model's own activations."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from linearize.cli.common import (
    DEFAULTS,
    BlockOption,
    CenterOption,
    EvaluationBlocksOption,
    FitBlocksOption,
    JsonOption,
    OverwriteOption,
    SeedOption,
    SinksOption,
    TextOption,
    ValidationBlocksOption,
    WindowOption,
    check_texts,
    load_model,
    note,
    parts_folder,
    progress,
    results,
    say,
    store_json,
    table,
)
from linearize.cli.evaluation import DEFAULT_TEXT
from linearize.errors import PlanError
from linearize.evaluate import Errors, Fidelity
from linearize.evaluate import fidelity as measure
from linearize.kernels import available, get
from linearize.output import write_text
from linearize.plan import Plan
from linearize.processes import Processes, complete_launch
from linearize.report.drawing import byte_text
from linearize.report.fidelity_figure import fidelity_chart
from linearize.text import Source, default_text

__all__ = ["fidelity", "show"]

LAYERS_A_TABLE = 8


def fidelity(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An unconverted model: Hugging Face id, folder, .gguf file, or smollm2-135m.",
            show_default=False,
        ),
    ],
    layers: Annotated[
        str,
        Option(
            "--layers", help='Zero-based layers: "4,12,20", "3-26" or "all".', show_default=False
        ),
    ],
    text: TextOption = None,
    kernels: Annotated[
        str,
        Option("--kernels", metavar="A,B|all", help="Names of kernels; see `linearize kernels`."),
    ] = "all",
    block: BlockOption = DEFAULTS.block,
    evaluation_blocks: EvaluationBlocksOption = DEFAULTS.skip_blocks,
    fit_blocks: FitBlocksOption = DEFAULTS.fit_blocks,
    validation_blocks: ValidationBlocksOption = DEFAULTS.validation_blocks,
    window: WindowOption = DEFAULTS.window,
    sinks: SinksOption = DEFAULTS.sinks,
    center: CenterOption = DEFAULTS.center,
    solver: Annotated[
        str,
        Option("--solver", metavar="moments|adam", help="Of oal and global; adam is the paper's."),
    ] = DEFAULTS.solver,
    seed: SeedOption = DEFAULTS.seed,
    seeds: Annotated[
        str | None,
        Option("--seeds", metavar="0,1,2", help="Average kernels that draw at random over these."),
    ] = None,
    out: Annotated[
        Path | None,
        Option("--out", metavar="DIR", help="Folder of result, chart and finished parts."),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on where an interrupted run stopped.")
    ] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = None,
) -> None:
    """Compare kernels with softmax attention, before they enter a model.

    Every kernel is fitted to the layers chosen with queries, keys and values frozen, then compared
    with softmax on held-out text: mean square error (MSE) and square error relative to the softmax
    output (RelMSE), before and after the output projection. All kernels see the same text.

    Finished parts are kept in DIR/parts (with --json FILE alone: beside it, in FILE.parts) and
    taken up again by --resume. The chart is DIR/fidelity.svg, or beside FILE.

    Examples:

    \b
      linearize fidelity smollm2-135m --text train.txt --layers 5,15,25 --json out/fidelity.json
      linearize fidelity my/model --text train.txt --layers 4 --kernels oal,global --out out/f
      linearize fidelity my/model --layers all --sinks 4 --window 64 --seeds 0,1,2 --out out/f
    """
    complete_launch()
    plan = Plan(
        layers=layers,
        window=window,
        sinks=sinks,
        center=center,
        block=block,
        skip_blocks=evaluation_blocks,
        fit_blocks=fit_blocks,
        validation_blocks=validation_blocks,
        solver=solver,
        seed=seed,
    )
    chosen = _names(kernels)
    drawn = _seeds(seeds)
    parts = parts_folder(out, json, resume, overwrite)
    paths = check_texts(text)
    if paths is None:
        note(f"no --text: using {DEFAULT_TEXT}")
    source: Source = paths or default_text()
    if parts is None:
        note("no --out and no --json: nothing will be kept")

    loaded = load_model(model)
    processes = Processes.join()
    if parts is not None and not resume and processes.main:
        shutil.rmtree(parts, ignore_errors=True)
    processes.wait()
    with progress("fidelity") as advance:
        result = measure(
            loaded,
            source,
            layers,
            chosen,
            plan,
            seeds=drawn,
            progress=_with_time_left(advance),
            store=parts,
        )
    processes.leave()
    if not processes.main:
        return
    show(result)
    chart = out / "fidelity.svg" if out else json.with_suffix(".svg") if json else None
    if chart is not None:
        write_text(chart, fidelity_chart(result))
        note(f"wrote {chart}")
    names = [str(path) for path in paths] if paths else [DEFAULT_TEXT]
    for path in (out / "fidelity.json" if out else None, json):
        store_json(path, {"text": names, **result.as_dict()})


def show(result: Fidelity) -> None:
    """Print the kernels by their error, pooled and per layer."""
    ranked = sorted(result.kernels, key=lambda one: one.errors.relative)
    made = table(
        *("kernel", "features", "state", "size", "trained", "fit s"),
        *("MSE", "RelMSE", "MSE Wo", "RelMSE Wo"),
    )
    for one in ranked:
        state = ["-", "grows", "grows"]
        if not one.exact:
            size = byte_text(one.state_bytes)
            state = [f"{one.features:,}", f"{one.state_numbers:,.0f}", size]
        made.add_row(
            one.kernel,
            *state,
            f"{one.trainable:,.0f}",
            f"{one.fit_seconds:.1f}",
            *(f"{value:.3g}" for value in _values(one.errors)),
        )
    made.columns[0].no_wrap = True
    results.print(made)
    averaged = [one for one in ranked if one.spread]
    if averaged:
        seeds = ", ".join(map(str, averaged[0].seeds))
        made = table(f"deviation over seeds {seeds}", "MSE", "RelMSE", "MSE Wo", "RelMSE Wo")
        for one in averaged:
            assert one.spread is not None
            made.add_row(one.kernel, *(f"±{value:.2g}" for value in _values(one.spread)))
        results.print(made)
    for start in range(0, len(result.layers), LAYERS_A_TABLE):
        part = range(start, min(start + LAYERS_A_TABLE, len(result.layers)))
        made = table("RelMSE, RelMSE Wo", *(f"layer {result.layers[at]}" for at in part))
        for one in ranked:
            made.add_row(one.kernel, *(_pair(one.layers[at].errors) for at in part))
        results.print(made)
    say(
        f"layers {', '.join(map(str, result.layers))} pooled, {len(result.evaluation_blocks)} held-out "
        f"blocks of {result.plan['block']:,} tokens, fitted on {len(result.fit_blocks)} and validated "
        f"on {len(result.validation_blocks)}; Wo: after the output projection; state, size, trained, "
        f"fit s: per layer; {result.seconds:.0f} s"
    )


def _values(errors: Errors) -> tuple[float, float, float, float]:
    return errors.mse, errors.relative, errors.mse_after, errors.relative_after


def _pair(errors: Errors) -> str:
    return f"{errors.relative:.3g}, {errors.relative_after:.3g}"


def _names(text: str) -> list[str]:
    """The kernels named, or all; an unknown one is refused with a list of the known."""
    names = available() if text == "all" else [part.strip() for part in text.split(",")]
    for name in names:
        get(name)
    return names


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(f"seeds {text!r}", "no list of integers", "Write --seeds 0,1,2.") from None


def _with_time_left(advance: Callable[[int, int, str], None]) -> Callable[[int, int, str], None]:
    """Add to the messages how long the rest will take if it goes on as it went.

    A run may take minutes, longer than the bar's own estimate looks back.
    """
    started, before = time.perf_counter(), -1

    def call(done: int, total: int, message: str) -> None:
        nonlocal before
        before = done if before < 0 else before
        if done > before:
            left = (time.perf_counter() - started) / (done - before) * (total - done)
            message += f"; about {left / 60:.0f} min left"
        advance(done, total, message)

    return call
