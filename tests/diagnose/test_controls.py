"""The replicates of the randomization test: drawn as asked, and the same numbers as the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diagnose.synthetic import SEQUENCES, SHAPE, SOME, kernel, sampled, selection
from linearize.diagnose.controls import (
    Subsets,
    _by_definition,
    _definition,
    control_errors,
    draw_subsets,
    has_fast_path,
)
from linearize.diagnose.hybrid import hybrid_errors
from linearize.errors import PlanError
from linearize.kernels import available, get

INEXACT = [name for name in available() if not get(name).exact]
FAST = ("performer", "spectraformer", "dijiang", "taylorshift")


def draw(count: int, seed: int = 0) -> list[Subsets]:
    return draw_subsets(selection(*SOME), count, torch.Generator().manual_seed(seed))


def test_subsets_are_distinct_bulk_coordinates_of_the_selected_number() -> None:
    for each, row in zip(draw(200), SOME, strict=True):
        assert each.distinct.shape[1] == len(row) and each.replicate.shape == (200,)
        bulk = set(range(SHAPE.head_dim)) - set(row)
        seen = {tuple(subset) for subset in each.distinct.tolist()}
        assert len(seen) == len(each.distinct)
        for subset in seen:
            assert set(subset) <= bulk and len(set(subset)) == len(row)
    # 7 single coordinates: each is drawn about 200 / 7 times
    counts = torch.bincount(draw(200)[1].replicate, minlength=7)
    assert len(counts) == 7 and int(counts.min()) > 10 and int(counts.max()) < 60


def test_drawing_is_a_function_of_the_seed() -> None:
    first, again, other = draw(50), draw(50), draw(50, seed=1)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.distinct[a.replicate], b.distinct[b.replicate])
    assert not torch.equal(
        first[2].distinct[first[2].replicate], other[2].distinct[other[2].replicate]
    )


def test_a_selection_larger_than_the_bulk_is_refused() -> None:
    with pytest.raises(PlanError, match="random subsets of 5 coordinates in head 0"):
        draw_subsets(selection([0, 1, 2, 3, 4]), 3, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", INEXACT)
def test_every_replicate_is_the_hybrid_on_its_subsets(name: str) -> None:
    made, data, subsets = kernel(name), sampled(), draw(7)
    found = control_errors(made, data, subsets)
    assert found.shape == (7, SEQUENCES)
    for replicate in range(7):
        rows = [each.distinct[each.replicate[replicate]].tolist() for each in subsets]
        with torch.no_grad():
            expected = hybrid_errors(made, data, selection(*rows)).mean(1)
        assert found[replicate].tolist() == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-10)


def test_the_paper_s_kernels_have_a_fast_path() -> None:
    assert [name for name in available() if has_fast_path(kernel(name))] == sorted(FAST)


@torch.no_grad()
@pytest.mark.parametrize("name", FAST)
def test_segments_and_batches_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, data, subsets = kernel(name), sampled(tokens=50), draw(30)
    whole = control_errors(made, data, subsets)
    monkeypatch.setattr("linearize.diagnose.controls.SEGMENT", 7)
    monkeypatch.setattr("linearize.diagnose.controls.BATCH", 600)
    assert torch.allclose(control_errors(made, data, subsets), whole, rtol=1e-3, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("size", [60.0, 300.0])
def test_sums_beyond_fp32_are_met_by_definition(
    name: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data, subsets = kernel(name), sampled(size=size), draw(3)
    asked = []

    def counted(*arguments: Any) -> Tensor:
        asked.append(arguments)
        return _definition(*arguments)

    monkeypatch.setattr("linearize.diagnose.controls._definition", counted)
    found = control_errors(made, data, subsets)
    assert asked or (name, size) not in ((n, 300.0) for n in ("performer", "dijiang"))
    slow = _by_definition(made, data, subsets, lambda done, total: None)
    expected = torch.stack([slow[head][each.replicate] for head, each in enumerate(subsets)]).mean(
        0
    )
    assert bool(found.isfinite().all())
    assert torch.allclose(found, expected, rtol=1e-2)


def test_progress_ends_with_everything_done() -> None:
    seen: list[tuple[int, int]] = []
    control_errors(
        kernel("dijiang"), sampled(), draw(3), lambda done, total: seen.append((done, total))
    )
    total = SHAPE.query_heads * SEQUENCES
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    control_errors(kernel("dijiang"), sampled(), draw(3))
    assert torch.get_num_threads() == before
