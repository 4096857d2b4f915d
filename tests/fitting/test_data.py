"""The fitting target, the sampled positions and the seeds of one layer's calibration."""

from dataclasses import replace

import pytest
import torch

from fitting.synthetic import SCALE, activations, calibration
from linearize.fitting import softmax_outputs
from linearize.fitting.data import sample_positions
from linearize.plan import Plan
from ops import definition
from tolerances import assert_close


@pytest.mark.parametrize("at", [None, [0], [0, 3, 11], list(range(12))])
def test_the_target_is_causal_softmax(at: list[int] | None) -> None:
    data = activations(2, 12)
    wanted = definition.attention(None, data.q, data.k, data.v, scale=SCALE)
    for block in range(2):
        query_at = None if at is None else torch.tensor(at)
        found = softmax_outputs(data, SCALE, block, query_at)
        expected = wanted[block] if at is None else wanted[block][:, at]
        assert_close(found, expected, torch.float32, "output")


@pytest.mark.parametrize(("tokens", "count"), [(10, 4), (10, 10), (3, 50)])
def test_sampled_positions_are_distinct_ascending_and_seeded(tokens: int, count: int) -> None:
    first = sample_positions(tokens, count, torch.Generator().manual_seed(1)).tolist()
    assert first == sorted(set(first))
    assert len(first) == min(tokens, count)
    assert all(0 <= at < tokens for at in first)
    assert sample_positions(tokens, count, torch.Generator().manual_seed(1)).tolist() == first
    drawn = {
        tuple(sample_positions(tokens, count, torch.Generator().manual_seed(s)).tolist())
        for s in range(20)
    }
    assert (len(drawn) > 1) == (count < tokens)


def test_positions_cover_the_sequence_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(8)
    for _ in range(400):
        seen[sample_positions(8, 2, generator)] += 1
    assert float(seen.min()) > 70  # 100 expected each; 3.5 standard deviations below
    assert float(seen.max()) < 130


def test_seeds_depend_on_plan_layer_and_purpose_alone() -> None:
    def draw(seed: int, layer: int, purpose: int) -> int:
        data = replace(calibration(Plan(seed=seed)), layer=layer)
        return int(torch.randint(2**62, (), generator=data.generator(purpose)))

    first = draw(1, 2, 3)
    torch.manual_seed(77)
    assert draw(1, 2, 3) == first
    others = {draw(1, 2, 4), draw(1, 3, 3), draw(2, 2, 3)}
    assert len(others | {first}) == 4
