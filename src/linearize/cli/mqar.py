"""`linearize probe mqar`: small models trained from scratch to look things up, one for each mixer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Option

from linearize.cli.common import (
    JsonOption,
    OverwriteOption,
    note,
    notes,
    parts_folder,
    progress,
    results,
    say,
    store_json,
    table,
)
from linearize.errors import PlanError
from linearize.output import write_text
from linearize.probe.catalogue import DEFAULT, ladder, mixer_names, mixer_title
from linearize.probe.mqar import FILLS
from linearize.probe.summary import Cell, cells
from linearize.probe.sweep import PRESETS, Settings, check_points, points, stored_rows, sweep
from linearize.report.recall_figures import recall_figures
from linearize.versions import versions

__all__ = ["mqar"]

Number = TypeVar("Number", int, float)


def mqar(
    preset: Annotated[
        str,
        Option(
            "--preset",
            metavar="|".join(PRESETS),
            help="Where options are not given: small is for two CPU cores, paper as published.",
        ),
    ] = "small",
    mixers: Annotated[
        str | None,
        Option("--mixers", metavar="A,B|all", help="Kernels, mamba, rwkv or none (no mixing)."),
    ] = None,
    with_ladder: Annotated[
        bool, Option("--ladder", help="Add the rungs of ReBased: square, norm, affine.")
    ] = False,
    lengths: Annotated[
        str | None, Option("--lengths", metavar="A,B", help="Tokens of a sequence.")
    ] = None,
    widths: Annotated[
        str | None, Option("--widths", metavar="A,B", help="Channels of the models.")
    ] = None,
    lrs: Annotated[str | None, Option("--lrs", metavar="A,B", help="Learning rates.")] = None,
    seeds: Annotated[
        str | None, Option("--seeds", metavar="A,B", help="Of parameters and examples.")
    ] = None,
    vocabulary: Annotated[
        int | None, Option("--vocabulary", help="Tokens, half keys and half values.")
    ] = None,
    pairs: Annotated[
        int | None, Option("--pairs", help="Pairs in a sequence; else a quarter of the length.")
    ] = None,
    queries: Annotated[
        int | None, Option("--queries", help="Keys that come back; else every one once.")
    ] = None,
    fill: Annotated[
        str | None,
        Option("--fill", metavar="|".join(FILLS), help="What stands between the queries."),
    ] = None,
    examples: Annotated[
        int | None, Option("--examples", help="Training sequences of a point.")
    ] = None,
    epochs: Annotated[int | None, Option("--epochs", help="Passes over them.")] = None,
    batch: Annotated[int | None, Option("--batch", help="Sequences per step.")] = None,
    heads: Annotated[int | None, Option("--heads", help="Heads of a kernel layer.")] = None,
    feature_dim: Annotated[
        int | None, Option("--feature-dim", help="Dimensions of queries and keys of a head.")
    ] = None,
    overlap: Annotated[
        int | None, Option("--overlap", help="Test sequences for the overlap of attention.")
    ] = None,
    jobs: Annotated[int, Option("--jobs", min=1, help="Models trained at the same time.")] = 1,
    device: Annotated[str, Option("--device", help="Where to train, as torch names it.")] = "cpu",
    out: Annotated[
        Path | None,
        Option("--out", metavar="DIR", help="Folder of result, figures and finished points."),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on where an interrupted sweep stopped.")
    ] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = None,
) -> None:
    """Train small decoders on multi-query associative recall and compare what they can look up.

    Sequences write pairs of a key and a value, then ask for the values of some keys. Every mixer is
    trained at every length, width, learning rate and seed; the table has each at its best learning
    rate (by validation), averaged over seeds. IoU compares the last layer's attention with the true
    positions: of the positions with at least half of a query's largest weight, and soft, of the
    weights themselves.

    Every finished point is a file in DIR/parts (with --json FILE alone: beside it, in FILE.parts).
    --resume goes on with those, and may add others: the result covers all points of the folder.
    Figures are written to DIR.

    Examples:

    \b
      linearize probe mqar --preset small --json out/mqar.json
      linearize probe mqar --mixers softmax,based,rebased-outer --ladder --jobs 2 --out out/recall
      linearize probe mqar --lengths 256 --pairs 16 --widths 64 --lrs 3e-3 --seeds 0 --out out/one
    """
    if preset not in PRESETS:
        raise PlanError(f"preset {preset!r}", f"presets {', '.join(PRESETS)}", "Choose one.")
    base = PRESETS[preset]
    settings = _changed(
        base.settings,
        vocabulary=vocabulary,
        pairs=pairs,
        queries=queries,
        fill=fill,
        overlap=overlap,
        recipe=_changed(base.settings.recipe, examples=examples, epochs=epochs, batch=batch),
        architecture=_changed(base.settings.architecture, heads=heads, feature_dim=feature_dim),
    )
    names = _mixers(mixers)
    chosen = points(
        ladder(names) if with_ladder else names,
        _numbers("--lengths", lengths, int) or base.lengths,
        _numbers("--widths", widths, int) or base.widths,
        _numbers("--lrs", lrs, float) or base.lrs,
        _numbers("--seeds", seeds, int) or base.seeds,
    )
    check_points(chosen, settings)
    parts = parts_folder(out, json, resume, overwrite)
    if parts is None:
        note("no --out and no --json: nothing will be kept")
    elif not resume:
        shutil.rmtree(parts, ignore_errors=True)
    started = time.perf_counter()
    with progress("recall") as advance:
        rows = sweep(
            chosen,
            settings,
            store=parts,
            jobs=jobs,
            device=device,
            progress=advance if notes.is_terminal else _finished_only(advance),
        )
    if parts is not None:
        rows += [row for row in stored_rows(parts, settings) if row not in rows]
    summed = cells(rows)
    _show(summed, settings)
    seconds = time.perf_counter() - started
    say(
        f"{len(rows)} models, {sum(row.core_seconds for row in rows):,.0f} core-seconds in all, "
        f"{seconds:,.0f} s now; ± standard deviation over seeds"
    )
    if out is not None:
        for name, figure in recall_figures(rows, summed).items():
            write_text(out / f"{name}.svg", figure)
            note(f"wrote {out / name}.svg")
    result = {
        "preset": preset,
        "settings": asdict(settings),
        "cells": [asdict(cell) for cell in summed],
        "rows": [asdict(row) for row in rows],
        "seconds": seconds,
        "versions": versions(),
    }
    for path in (out / "mqar.json" if out else None, json):
        store_json(path, result)


def _show(summed: Sequence[Cell], settings: Settings) -> None:
    """Print one table for every length and width, best mixers first."""
    for length, width in sorted({(cell.length, cell.width) for cell in summed}):
        found = [cell for cell in summed if (cell.length, cell.width) == (length, width)]
        found.sort(key=lambda cell: -cell.accuracy)
        made = table(
            *("mixer", "accuracy", "±", "solved", "lr", "IoU", "soft IoU"),
            *("state", "parameters", "steps", "core s"),
        )
        for cell in found:
            made.add_row(
                mixer_title(cell.mixer),
                f"{cell.accuracy:.3f}",
                f"{cell.spread:.3f}" if cell.seeds > 1 else "-",
                f"{cell.solved}/{cell.seeds}",
                f"{cell.lr:g}",
                _optional(cell.iou),
                _optional(cell.soft_iou),
                "-" if cell.state_numbers is None else f"{cell.state_numbers:,}",
                f"{cell.parameters:,}",
                f"{cell.steps:,.0f}",
                f"{cell.core_seconds:.0f}",
            )
        made.columns[0].no_wrap = True
        results.print(made)
        task = settings.task(length)
        say(
            f"{length:,} tokens, width {width}: {task.pairs} pairs, {task.queries} queries, "
            f"vocabulary {task.vocabulary:,}; chance {task.chance:.4f}"
        )


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _finished_only(advance: Callable[[int, int, str], None]) -> Callable[[int, int, str], None]:
    """Without a terminal every message is a line; only finished points are worth one."""
    last = 0

    def call(done: int, total: int, message: str) -> None:
        nonlocal last
        if done > last:
            last = done
            advance(done, total, message)

    return call


def _mixers(given: str | None) -> list[str]:
    if given is None:
        return list(DEFAULT)
    if given == "all":
        return mixer_names()
    return [part.strip() for part in given.split(",")]


def _numbers(option: str, given: str | None, kind: type[Number]) -> list[Number]:
    """``"32,64"`` -> ``[32, 64]``; empty if nothing was given.

    Raises:
        PlanError: something else is written there.
    """
    try:
        return [] if given is None else [kind(part) for part in given.split(",")]
    except ValueError:
        what = "integers" if kind is int else "numbers"
        raise PlanError(
            f"{option} {given}", f"no list of {what}", "Write it like 64,128."
        ) from None


def _changed(settings: Any, **given: Any) -> Any:
    """A dataclass with the values that were given."""
    return replace(settings, **{name: value for name, value in given.items() if value is not None})
