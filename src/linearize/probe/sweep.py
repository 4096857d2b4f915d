"""The recall probe: every mixer at every length, width, learning rate and seed, resumable."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from linearize.errors import PlanError
from linearize.parts import Parts
from linearize.probe.catalogue import Architecture
from linearize.probe.iou import attention_overlap
from linearize.probe.model import RecallModel
from linearize.probe.mqar import RecallTask
from linearize.probe.training import Recipe, accuracy, train

__all__ = [
    "PRESETS",
    "Point",
    "Row",
    "Settings",
    "check_points",
    "points",
    "run_point",
    "stored_rows",
    "sweep",
]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Settings:
    """What all points of a sweep have in common.

    Attributes:
        vocabulary: tokens, half of them keys and half values.
        pairs: pairs of a sequence; ``None`` takes ``pairs_at`` or a quarter of the length, which
            leaves a slot for every query.
        queries: keys that come back; ``None`` asks for every pair once.
        power, fill: see :class:`linearize.probe.mqar.RecallTask`.
        pairs_at: pairs at single lengths, where they are no quarter of it.
        overlap: test sequences for the attention overlap.
        architecture, recipe: the models and how they are trained.
    """

    vocabulary: int
    recipe: Recipe
    architecture: Architecture = field(default_factory=Architecture)
    pairs: int | None = None
    queries: int | None = None
    power: float = 0.01
    fill: str = "zeros"
    pairs_at: dict[int, int] = field(default_factory=dict)
    overlap: int = 512

    def task(self, length: int) -> RecallTask:
        """The task at one length.

        Raises:
            PlanError: there is none; see :class:`linearize.probe.mqar.RecallTask`.
        """
        pairs = self.pairs or self.pairs_at.get(length, max(1, length // 4))
        queries = self.queries or pairs
        return RecallTask(length, pairs, queries, self.vocabulary, self.power, self.fill)


@dataclass(frozen=True)
class Preset:
    """A sweep by name: its settings and what it runs over."""

    settings: Settings
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]


PRESETS: dict[str, Preset] = {
    # For two CPU cores. Models start so that they learn soon; see `Architecture`.
    "small": Preset(
        Settings(
            vocabulary=256,
            recipe=Recipe(
                examples=16_384,
                validation=256,
                test=1024,
                epochs=4,
                batch=32,
                check_every=100,
                patience=2,
            ),
        ),
        lengths=(64, 128),
        widths=(32, 64),
        lrs=(3e-3, 1e-2),
        seeds=(0, 1, 2),
    ),
    # As published with ReBased; a sweep for a GPU.
    "paper": Preset(
        Settings(
            vocabulary=8192,
            recipe=Recipe(examples=100_000, validation=3000, test=3000, epochs=64, batch=512),
            architecture=Architecture(heads=12, initial=0.02, gate=0.0, dropout=0.1),
            pairs_at={128: 16},
            overlap=10_000,
        ),
        lengths=(128, 256, 512, 1024, 2048),
        widths=(64, 128, 256, 512),
        lrs=(5e-4, 1e-3, 3e-3, 1e-2),
        seeds=(0, 1, 2, 3, 4),
    ),
}


@dataclass(frozen=True)
class Point:
    """One model to train."""

    mixer: str
    length: int
    width: int
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Unique among the points of a sweep, and a file name."""
        return f"{self.mixer}-length{self.length}-width{self.width}-lr{self.lr:g}-seed{self.seed}"


@dataclass(frozen=True)
class Row:
    """One point's result.

    Attributes:
        mixer, length, width, lr, seed: the point.
        pairs, queries, chance: the task.
        parameters: trained numbers; state_numbers: recurrent state of all kernel layers, ``None``
            where it grows with the sequence or for references.
        ended: why training ended; steps: after how many steps.
        validation, test: accuracy of the kept parameters.
        iou, soft_iou, true_weight: see :class:`linearize.probe.iou.Overlap`; ``None`` without
            attention.
        checks: (step, loss, validation accuracy) over training.
        seconds: wall time; core_seconds: CPU time.
    """

    mixer: str
    length: int
    width: int
    lr: float
    seed: int
    pairs: int
    queries: int
    chance: float
    parameters: int
    state_numbers: int | None
    ended: str
    steps: int
    validation: float
    test: float
    iou: float | None
    soft_iou: float | None
    true_weight: float | None
    checks: list[list[float]]
    seconds: float
    core_seconds: float


def points(
    mixers: Sequence[str],
    lengths: Sequence[int],
    widths: Sequence[int],
    lrs: Sequence[float],
    seeds: Sequence[int],
) -> list[Point]:
    """All combinations; seeds change slowest, so that an unfinished sweep is a smaller one.

    Raises:
        PlanError: a list is empty or a number is not positive.
    """
    lists: dict[str, Sequence[Any]] = {
        "mixers": mixers,
        "lengths": lengths,
        "widths": widths,
        "learning rates": lrs,
        "seeds": seeds,
    }
    for name, values in lists.items():
        if not values:
            raise PlanError(f"a sweep over {name}", "an empty list", "Name one at least.")
        if name in ("widths", "learning rates") and min(values) <= 0:
            raise PlanError(f"{name} {list(values)}", "one not above 0", "Take positive ones.")
    found = [
        Point(mixer, length, width, lr, seed)
        for seed in seeds
        for length in lengths
        for width in widths
        for lr in lrs
        for mixer in mixers
    ]
    return list(dict.fromkeys(found))


def check_points(chosen: Sequence[Point], settings: Settings) -> None:
    """Refuse tasks and models that are not possible, before any work.

    Raises:
        PlanError: one of them is not.
    """
    for point in {(p.mixer, p.length, p.width): p for p in chosen}.values():
        settings.task(point.length)
        _model(point, settings)


def run_point(
    point: Point,
    settings: Settings,
    device: str = "cpu",
    progress: Progress = lambda done, total, message: None,
) -> Row:
    """Train and measure one model, with one thread: more do not help at these sizes.

    The seed decides the parameters, the examples and their order.

    Raises:
        PlanError: the task or the model is not possible.
    """
    started, before = time.perf_counter(), time.process_time()
    task, recipe = settings.task(point.length), settings.recipe
    model = _model(point, settings).to(device)
    streams = [torch.Generator().manual_seed(4 * point.seed + stream) for stream in range(4)]
    with _one_thread():
        counts = (recipe.examples, recipe.validation, max(recipe.test, settings.overlap))
        training, validation, held_out = (
            task.draw(count, stream).to(device)
            for count, stream in zip(counts, streams[:3], strict=True)
        )
        torch.manual_seed(point.seed)  # dropout
        trained = train(model, training, validation, recipe, point.lr, streams[3], progress)
        tested = accuracy(model, held_out.part(slice(recipe.test)))
        found = attention_overlap(model, held_out.part(slice(settings.overlap)))
    return Row(
        **asdict(point),
        pairs=task.pairs,
        queries=task.queries,
        chance=task.chance,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        state_numbers=model.state_numbers,
        ended=trained.ended,
        steps=trained.checks[-1].step if trained.checks else 0,
        validation=trained.best,
        test=tested,
        iou=found and found.iou,
        soft_iou=found and found.soft,
        true_weight=found and found.weight,
        checks=[list(check) for check in trained.checks],
        seconds=time.perf_counter() - started,
        core_seconds=time.process_time() - before,
    )


def sweep(
    chosen: Sequence[Point],
    settings: Settings,
    *,
    store: str | Path | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Progress = lambda done, total, message: None,
) -> list[Row]:
    """Run points, taking up those already in ``store``.

    Args:
        chosen: see :func:`points`.
        settings: what they have in common; stored with every row, and a row made with others is
            refused.
        store: folder of one file per finished point; ``None`` keeps nothing.
        jobs: processes that work on points at the same time.
        progress: called with (points done, in all, message).

    Returns:
        the rows in the order of ``chosen``.

    Raises:
        PlanError: a task or model is not possible, found before any work.
        CheckpointError: a stored row is damaged or was made with other settings.
    """
    check_points(chosen, settings)
    parts = Parts(store, _as_json(settings))
    rows = {
        point: row for point in chosen if (row := parts.read(point.name, Row, "row")) is not None
    }
    missing = [point for point in chosen if point not in rows]
    if rows:
        progress(len(rows), len(chosen), "taken up")
    for point, row in _run(missing, settings, jobs, device, progress, len(rows), len(chosen)):
        parts.put(point.name, asdict(row))
        rows[point] = row
        progress(
            len(rows),
            len(chosen),
            f"{point.name}: {row.test:.3f} after {row.steps} steps, {row.core_seconds:.0f} s",
        )
    return [rows[point] for point in chosen]


def stored_rows(store: str | Path, settings: Settings) -> list[Row]:
    """Every finished row in a folder, by name; sweeps over other points may share it.

    Raises:
        CheckpointError: one is damaged or was made with other settings.
    """
    parts = Parts(store, _as_json(settings))
    rows = (parts.read(file.stem, Row, "row") for file in sorted(Path(store).glob("*.json")))
    return [row for row in rows if row is not None]


def _run(
    missing: list[Point],
    settings: Settings,
    jobs: int,
    device: str,
    progress: Progress,
    before: int,
    total: int,
) -> Iterator[tuple[Point, Row]]:
    """Finished points, as they come."""
    if jobs == 1:
        for at, point in enumerate(missing):

            def inside(step: int, steps: int, message: str, at: int = at, p: Point = point) -> None:
                progress(before + at, total, f"{p.name}: step {step}/{steps}, {message}")

            yield point, run_point(point, settings, device, inside)
        return
    with _workers(jobs) as pool:
        futures: dict[Future[Row], Point] = {
            pool.submit(run_point, point, settings, device): point for point in missing
        }
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield futures[future], future.result()


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that leave an interruption to this one, and are ended with it."""
    others = set(multiprocessing.active_children())
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=ignore)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    pool.shutdown()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _model(point: Point, settings: Settings) -> RecallModel:
    return RecallModel(
        point.mixer,
        settings.architecture,
        vocabulary=settings.vocabulary,
        length=point.length,
        width=point.width,
        seed=point.seed,
    )


def _as_json(settings: Settings) -> dict[str, Any]:
    """The settings as they come back from a file."""
    value = asdict(settings)
    value["pairs_at"] = {str(length): pairs for length, pairs in settings.pairs_at.items()}
    return value
