"""Training and sweeping recall models: reproducible, resumable, and able to learn."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from linearize.errors import CheckpointError, PlanError
from linearize.probe.catalogue import Architecture
from linearize.probe.model import RecallModel
from linearize.probe.mqar import RecallTask
from linearize.probe.summary import cells
from linearize.probe.sweep import PRESETS, Point, Row, Settings, points, run_point, sweep
from linearize.probe.training import Recipe, accuracy, train

RECIPE = Recipe(examples=64, validation=16, test=16, epochs=2, batch=16, check_every=3)
TINY = Settings(
    vocabulary=16, recipe=RECIPE, architecture=Architecture(feature_dim=4, groups=2), overlap=8
)
TASK = RecallTask(length=16, pairs=2, queries=2, vocabulary=16)


def timeless(row: Row) -> Row:
    return dataclasses.replace(row, seconds=0.0, core_seconds=0.0)


def model(mixer: str = "based", seed: int = 0) -> RecallModel:
    return RecallModel(mixer, TINY.architecture, vocabulary=16, length=16, width=16, seed=seed)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("mixer", ["softmax", "oal", "performer", "mamba"])
def test_a_seed_reproduces_a_point_and_another_does_not(mixer: str) -> None:
    point = Point(mixer, 16, 16, 1e-2, 0)
    one = run_point(point, TINY)
    torch.manual_seed(99)
    assert timeless(run_point(point, TINY)) == timeless(one)
    other = run_point(dataclasses.replace(point, seed=1), TINY)
    assert other.checks != one.checks


def test_a_row_says_what_was_trained() -> None:
    row = run_point(Point("based", 16, 16, 1e-2, 0), TINY)
    assert (row.pairs, row.queries, row.chance) == (4, 4, 1 / 8)
    assert row.state_numbers == (1 + 4 + 10) * 17
    trained = sum(p.numel() for p in model().parameters())
    assert row.parameters == trained
    assert [check[0] for check in row.checks] == [3, 6, 8] and row.steps == 8
    assert row.ended == "epochs" and row.seconds > 0
    assert row.validation == max(check[2] for check in row.checks)
    assert row.iou is not None and 0 <= row.iou <= 1
    assert row.soft_iou is not None and row.true_weight is not None
    # Jensen: the mean of w/(2 - w) is at least that of the mean weight
    assert row.soft_iou >= row.true_weight / (2 - row.true_weight) - 1e-6


def test_training_stops_when_solved_for_long_enough() -> None:
    """A threshold of zero is met by every check; patience counts them in a row."""
    data = TASK.draw(64, generator())
    recipe = dataclasses.replace(RECIPE, check_every=1, stop_at=0.0, patience=3)
    found = train(model(), data, data, recipe, 1e-3, generator())
    assert (found.ended, [check.step for check in found.checks]) == ("solved", [1, 2, 3])
    never = dataclasses.replace(recipe, stop_at=1.1)
    found = train(model(), data, data, never, 1e-3, generator())
    assert (found.ended, found.checks[-1].step) == ("epochs", recipe.steps)


def test_the_best_parameters_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TASK.draw(64, generator())
    planned, seen = iter([0.2, 0.6, 0.6, 0.1]), []

    def measured(made: RecallModel, examples: object) -> float:
        seen.append(made.tokens.weight.detach().clone())
        return next(planned)

    monkeypatch.setattr("linearize.probe.training.accuracy", measured)
    made = model()
    found = train(made, data, data, dataclasses.replace(RECIPE, check_every=2), 0.1, generator())
    assert found.best == 0.6 and len(seen) == 4
    assert torch.equal(made.tokens.weight, seen[1])  # the first of equals
    assert not torch.equal(seen[1], seen[2])


def test_training_that_diverges_ends_with_finite_parameters() -> None:
    data = TASK.draw(64, generator())
    made = model("rebased-outer-square")
    found = train(made, data, data, RECIPE, math.inf, generator())
    assert found.ended == "diverged" and found.checks == [] and found.best == 0
    assert all(bool(p.isfinite().all()) for p in made.parameters())


def test_accumulated_gradients_are_those_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TASK.draw(64, generator())
    whole, parts = model(), model()
    train(whole, data, data, RECIPE, 1e-3, generator())
    monkeypatch.setattr("linearize.probe.training.PASS_TOKENS", 5 * 16)  # five sequences a pass
    train(parts, data, data, RECIPE, 1e-3, generator())
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_accuracy_counts_queries() -> None:
    data = TASK.draw(50, generator())
    made = model()
    right = (made(data.tokens).argmax(-1) == data.labels)[data.sources >= 0]
    assert accuracy(made, data) == pytest.approx(float(right.double().mean()))


def test_points_are_all_combinations_seeds_last() -> None:
    found = points(["based", "oal"], [64], [32, 64], [1e-3], [0, 1, 0])
    assert len(found) == len(set(found)) == 8
    assert [point.seed for point in found] == [0] * 4 + [1] * 4
    assert len({point.name for point in found}) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": []}, "empty list"),
        ({"widths": [0]}, "not above 0"),
        ({"lrs": [-1e-3]}, "not above 0"),
    ],
)
def test_sweeps_over_nothing_are_refused(changes: dict[str, list[float]], message: str) -> None:
    lists = {"mixers": ["based"], "lengths": [16], "widths": [16], "lrs": [1e-3], "seeds": [0]}
    with pytest.raises(PlanError, match=message):
        points(**{**lists, **changes})  # type: ignore[arg-type]


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    chosen = points(["based", "none"], [16], [16], [1e-3], [0, 1])
    whole = sweep(chosen, TINY)
    calls: list[tuple[int, int, str]] = []

    def interrupt(done: int, total: int, message: str) -> None:
        calls.append((done, total, message))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(chosen, TINY, store=tmp_path, progress=interrupt)
    kept = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(kept) == 2
    messages: list[tuple[int, int, str]] = []
    resumed = sweep(
        chosen, TINY, store=tmp_path, progress=lambda *message: messages.append(message)
    )
    assert messages[0] == (2, 4, "taken up")
    assert [timeless(row) for row in resumed] == [timeless(row) for row in whole]
    assert len(list(tmp_path.iterdir())) == 4
    assert all(file.read_bytes() == content for file, content in kept.items())


def test_rows_of_other_settings_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    chosen = points(["none"], [16], [16], [1e-3], [0])
    sweep(chosen, TINY, store=tmp_path)
    with pytest.raises(CheckpointError, match="vocabulary"):
        sweep(chosen, dataclasses.replace(TINY, vocabulary=18), store=tmp_path)
    (file,) = tmp_path.iterdir()
    stored = json.loads(file.read_text(encoding="utf-8"))
    del stored["value"]["test"]
    file.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"stored row none-length16"):
        sweep(chosen, TINY, store=tmp_path)


def test_impossible_points_are_refused_before_any_work(tmp_path: Path) -> None:
    possible = points(["none"], [16], [16], [1e-3], [0])
    for impossible in (
        points(["nosuch"], [16], [16], [1e-3], [0]),
        points(["none"], [15], [16], [1e-3], [0]),
        points(["none"], [64], [16], [1e-3], [0]),  # 16 pairs of 7 keys
    ):
        with pytest.raises(PlanError):
            sweep([*possible, *impossible], TINY, store=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # every process imports torch anew
def test_several_processes_give_the_same_rows(tmp_path: Path) -> None:
    chosen = points(["none", "based"], [16], [16], [1e-3], [0])
    alone = sweep(chosen, TINY)
    together = sweep(chosen, TINY, jobs=2, store=tmp_path)
    assert [timeless(row) for row in together] == [timeless(row) for row in alone]
    assert len(list(tmp_path.iterdir())) == 2


def test_pairs_of_a_length() -> None:
    paper = PRESETS["paper"]
    assert [paper.settings.task(n).pairs for n in paper.lengths] == [16, 64, 128, 256, 512]
    small = PRESETS["small"]
    for length in small.lengths:
        task = small.settings.task(length)
        assert task.pairs == task.queries == length // 4
    fixed = dataclasses.replace(small.settings, pairs=5, queries=2)
    assert (fixed.task(64).pairs, fixed.task(64).queries) == (5, 2)


def test_the_published_settings() -> None:
    paper = PRESETS["paper"]
    assert (paper.lengths, paper.widths) == ((128, 256, 512, 1024, 2048), (64, 128, 256, 512))
    assert (paper.lrs[0], paper.lrs[-1], len(paper.seeds)) == (5e-4, 1e-2, 5)
    recipe, shape = paper.settings.recipe, paper.settings.architecture
    assert (recipe.epochs, recipe.batch, paper.settings.overlap) == (64, 512, 10_000)
    assert (shape.feature_dim, shape.layers, shape.convolution) == (16, 2, 3)


def row(**changes: object) -> Row:
    values: dict[str, object] = {
        field.name: 0 for field in dataclasses.fields(Row) if field.name != "checks"
    }
    values |= {"mixer": "based", "checks": [], "ended": "epochs", **changes}
    return Row(**values)  # type: ignore[arg-type]


def test_cells_take_the_best_learning_rate_by_validation_and_report_the_test() -> None:
    rows = [
        row(lr=1e-3, seed=0, validation=0.9, test=0.1, iou=0.2, soft_iou=0.1),
        row(lr=1e-3, seed=1, validation=0.7, test=0.4, iou=0.4, soft_iou=0.3, ended="solved"),
        row(lr=1e-2, seed=0, validation=0.95, test=0.9, iou=0.9, soft_iou=0.9),
        row(lr=1e-2, seed=1, validation=0.1, test=0.9, iou=0.9, soft_iou=0.9),
        row(mixer="rwkv", lr=1e-2, test=0.3, iou=None, soft_iou=None),
    ]
    based, rwkv = cells(rows)
    assert (based.lr, based.seeds, based.solved) == (1e-3, 2, 1)
    assert based.accuracy == pytest.approx(0.25)
    assert based.spread == pytest.approx(math.sqrt(2) * 0.15)
    assert based.iou == pytest.approx(0.3) and based.soft_iou == pytest.approx(0.2)
    assert (rwkv.accuracy, rwkv.spread, rwkv.iou, rwkv.soft_iou) == (0.3, 0.0, None, None)


def test_a_learning_rate_that_few_seeds_have_run_is_not_chosen() -> None:
    """The first seeds of an unfinished sweep are no mean to compare with three."""
    rows = [row(lr=1e-3, seed=seed, validation=0.5, test=0.5) for seed in range(3)]
    rows.append(row(lr=1e-2, seed=0, validation=0.9, test=0.9))
    (cell,) = cells(rows)
    assert (cell.lr, cell.seeds, cell.accuracy) == (1e-3, 3, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"examples": 8}, "fewer examples than a batch"), ({"epochs": 0}, "count below 1")],
)
def test_impossible_recipes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(RECIPE, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_attention_learns_to_look_up_and_without_mixing_nothing_does() -> None:
    """An easy point: 8 pairs in 64 tokens. Chance is 1/128."""
    small = PRESETS["small"].settings
    easy = dataclasses.replace(small, pairs=8, recipe=dataclasses.replace(small.recipe, epochs=2))
    softmax, none = (run_point(Point(name, 64, 64, 3e-3, 0), easy) for name in ("softmax", "none"))
    assert softmax.ended == "solved" and softmax.test >= 0.99
    assert softmax.iou is not None and softmax.iou >= 0.99
    assert none.ended == "epochs" and none.test < 0.02
