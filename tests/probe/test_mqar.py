"""The recall task: every answer is in its context, draws follow their laws, impossible ones say why."""

import pytest
import torch

from linearize.errors import PlanError
from linearize.probe.mqar import FILLER, IGNORED, Examples, RecallTask

TASKS = [
    RecallTask(length=4, pairs=1, queries=1, vocabulary=4),
    RecallTask(length=64, pairs=16, queries=16, vocabulary=34),
    RecallTask(length=64, pairs=8, queries=1, vocabulary=100, fill="random"),
    RecallTask(length=48, pairs=8, queries=5, vocabulary=101, power=1.0),
    RecallTask(length=64, pairs=3, queries=20, vocabulary=12, fill="random"),
]


def drawn(task: RecallTask, count: int = 20, seed: int = 0) -> Examples:
    return task.draw(count, torch.Generator().manual_seed(seed))


def look_up(tokens: list[int], at: int) -> tuple[int, int]:
    """The token after the first appearance of the token at ``at``, and where it stands."""
    first = tokens.index(tokens[at])
    assert first < at
    return tokens[first + 1], first + 1


@pytest.mark.parametrize("task", TASKS)
def test_every_label_can_be_looked_up(task: RecallTask) -> None:
    examples = drawn(task)
    assert examples.tokens.shape == (20, task.length)
    for tokens, labels, sources in zip(*(x.tolist() for x in examples), strict=True):
        asked = [at for at, label in enumerate(labels) if label != IGNORED]
        assert len(asked) == task.queries
        assert [at for at, source in enumerate(sources) if source >= 0] == asked
        for at in asked:
            assert (labels[at], sources[at]) == look_up(tokens, at)


@pytest.mark.parametrize("task", TASKS)
def test_pairs_come_first_with_keys_and_values_of_their_own(task: RecallTask) -> None:
    written, half = 2 * task.pairs, task.vocabulary // 2
    for tokens, labels in zip(*(x.tolist() for x in drawn(task)[:2]), strict=True):
        keys, values = tokens[0:written:2], tokens[1:written:2]
        assert len(set(keys)) == len(set(values)) == task.pairs
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < task.vocabulary for value in values)
        asked = [at for at, label in enumerate(labels) if label != IGNORED]
        assert all(at >= written and at % 2 == 0 for at in asked)
        counts = [sum(tokens[at] == key for at in asked) for key in keys]
        assert max(counts) - min(counts) <= 1  # no pair twice before every pair once


@pytest.mark.parametrize("task", TASKS)
def test_fillers_contradict_no_pair(task: RecallTask) -> None:
    examples = drawn(task)
    written = 2 * task.pairs
    others = set()
    for tokens, labels in zip(*(x.tolist() for x in examples[:2]), strict=True):
        keys = tokens[0:written:2]
        for token, label in zip(tokens[written:], labels[written:], strict=True):
            if label == IGNORED:
                assert token not in keys
                others.add(token)
    if task.fill == "zeros":
        assert others == {FILLER}
    elif task.vocabulary <= 12:  # small enough that every token turns up
        assert others == set(range(task.vocabulary))


def test_random_fillers_are_uniform_over_what_is_allowed() -> None:
    task = RecallTask(length=40, pairs=2, queries=1, vocabulary=10, fill="random")
    examples = drawn(task, 4000)
    keys = examples.tokens[:, 0:4:2]
    fillers = examples.tokens[:, 4:][examples.labels[:, 4:] == IGNORED].view(4000, -1)
    for token in range(10):
        allowed = (keys != token).all(1)
        share = float((fillers[allowed] == token).double().mean())
        assert share == pytest.approx(1 / 8, abs=0.004)  # five standard deviations


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_the_first_query_follows_the_power_law(power: float) -> None:
    """Slots of single queries; their shares against p ∝ (g + 1)^(a − 1)."""
    task = RecallTask(length=24, pairs=2, queries=1, vocabulary=20, power=power)
    at = (drawn(task, 20_000).sources >= 0).double().argmax(1)
    shares = torch.bincount((at - 4) // 2, minlength=10) / 20_000
    law = torch.arange(1, 11) ** (power - 1.0)
    assert torch.allclose(shares, law / law.sum(), atol=0.015)


def test_queries_without_replacement_are_drawn_one_by_one() -> None:
    """Two of three slots: the pair of slots has the probability of successive draws."""
    task = RecallTask(length=10, pairs=2, queries=2, vocabulary=20, power=0.01)
    asked = drawn(task, 20_000).sources[:, 4::2] >= 0
    p = torch.arange(1, 4) ** -0.99
    p = (p / p.sum()).tolist()
    for left_out in range(3):
        a, b = (slot for slot in range(3) if slot != left_out)
        expected = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        share = float((~asked[:, left_out]).double().mean())
        assert share == pytest.approx(expected, abs=0.015)


def test_any_key_can_be_asked_for_and_any_value_written() -> None:
    task = RecallTask(length=16, pairs=3, queries=1, vocabulary=12)
    examples = drawn(task, 500)
    assert set(examples.tokens[:, 0:6:2].flatten().tolist()) == set(range(1, 6))
    assert set(examples.tokens[:, 1:6:2].flatten().tolist()) == set(range(6, 12))
    assert set(examples.sources[examples.sources >= 0].tolist()) == {1, 3, 5}


def test_a_seed_gives_the_same_examples_and_another_others() -> None:
    task = RecallTask(length=64, pairs=8, queries=8, vocabulary=64, fill="random")
    one, same, other = drawn(task), drawn(task), drawn(task, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.tokens, other.tokens)


def test_large_draws_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    task = RecallTask(length=16, pairs=3, queries=3, vocabulary=40)
    monkeypatch.setattr("linearize.probe.mqar.SLICE", 40 * 7)
    examples = drawn(task, 20)
    assert examples.tokens.shape == (20, 16)
    assert len({tuple(row) for row in examples.tokens.tolist()}) == 20
    assert drawn(task, 0).tokens.shape == (0, 16)


@pytest.mark.parametrize(
    ("changes", "inequality"),
    [
        ({"length": 31}, "even length"),
        ({"pairs": 0}, "pairs ≥ 1"),
        ({"queries": 0}, "queries ≥ 1"),
        ({"pairs": 9}, r"2·pairs \+ 2·queries ≤ length, and 34 > 32"),
        ({"queries": 13}, r"2·pairs \+ 2·queries ≤ length, and 34 > 32"),
        ({"vocabulary": 8}, "pairs ≤ vocabulary/2 - 1, and 4 > 3"),
        ({"power": 0.0}, "power > 0"),
        ({"fill": "noise"}, "fill in zeros, random"),
    ],
)
def test_impossible_tasks_say_which_inequality_fails(
    changes: dict[str, object], inequality: str
) -> None:
    possible: dict[str, object] = {"length": 32, "pairs": 4, "queries": 8, "vocabulary": 10}
    RecallTask(**possible)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=inequality):
        RecallTask(**{**possible, **changes})  # type: ignore[arg-type]


def test_chance_is_one_over_the_values() -> None:
    assert RecallTask(8, 1, 1, 10).chance == pytest.approx(1 / 5)
    assert RecallTask(8, 1, 1, 11).chance == pytest.approx(1 / 6)  # values 5 … 10
