"""Overlap of attention maps with the true positions, against sets and by hand."""

import pytest
import torch

from linearize.probe.catalogue import Architecture
from linearize.probe.iou import THRESHOLD, attention_overlap, overlap
from linearize.probe.mixers import KernelMixer
from linearize.probe.model import RecallModel
from linearize.probe.mqar import RecallTask

TASK = RecallTask(length=16, pairs=3, queries=2, vocabulary=20)


def test_a_perfect_map_has_overlap_one() -> None:
    sources = torch.tensor([3, 0, 7])
    hard, soft, weight = overlap(torch.eye(9)[sources], sources)
    assert hard.tolist() == soft.tolist() == weight.tolist() == [1.0, 1.0, 1.0]


def test_a_map_that_looks_elsewhere_has_overlap_zero() -> None:
    hard, soft, weight = overlap(torch.eye(9)[[4]], torch.tensor([3]))
    assert (hard.item(), soft.item(), weight.item()) == (0.0, 0.0, 0.0)


def test_a_flat_map_over_m_positions_has_one_mth() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0]])
    hard, soft, weight = overlap(weights, torch.tensor([2]))
    assert hard.item() == pytest.approx(1 / 4)  # four attended, one of them true
    assert soft.item() == pytest.approx(0.25 / (2 - 0.25))
    assert weight.item() == 0.25


def test_the_threshold_is_a_share_of_the_largest_weight() -> None:
    """0.2 is half of 0.4 and counts, 0.19 does not."""
    weights = torch.tensor([[0.4, 0.2, 0.19, 0.21]])
    assert overlap(weights, torch.tensor([0]))[0].item() == pytest.approx(1 / 3)
    assert overlap(weights, torch.tensor([2]))[0].item() == 0


def test_measures_follow_their_definitions() -> None:
    weights = torch.rand(50, 12).softmax(-1)
    weights[:, 3] *= 3
    weights /= weights.sum(1, keepdim=True)
    sources = torch.randint(12, (50,))
    hard, soft, _ = overlap(weights, sources)
    for row, true, found, found_soft in zip(
        weights.tolist(), sources.tolist(), hard.tolist(), soft.tolist(), strict=True
    ):
        attended = {at for at, w in enumerate(row) if w >= THRESHOLD * max(row)}
        assert found == pytest.approx(len(attended & {true}) / len(attended | {true}))
        target = [float(at == true) for at in range(12)]
        smaller = sum(min(w, t) for w, t in zip(row, target, strict=True))
        larger = sum(max(w, t) for w, t in zip(row, target, strict=True))
        assert found_soft == pytest.approx(smaller / larger, rel=1e-5)


def trained_by_hand() -> RecallModel:
    """A softmax model whose attention is a lookup: values are found by the key before them.

    Width 64: the token is a one-hot in the first half; in place of the convolution, a shift writes
    the token before into the second half. Keys are made of the second half, queries of the first.
    """
    model = RecallModel("softmax", Architecture(), vocabulary=20, length=16, width=64, seed=0)
    attention = model.mixers[1]
    assert isinstance(attention, KernelMixer)
    eye, half = torch.eye(32), slice(32, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.tokens.weight[:, :20] = 10 * torch.eye(20)
        for norm in (*model.norms, model.last_norm):
            norm.weight.fill_(1)
        attention.inputs.weight[:32, :32] = 3 * eye  # queries: this token
        attention.inputs.weight[64:96, half] = eye  # keys: the token before
    model.mixers[0] = _Shift()
    return model


class _Shift(torch.nn.Module):
    """Writes 10 times the one-hot of the token before into the second half of the channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one_hot = 10 * torch.nn.functional.one_hot(x[..., :20].argmax(-1), 32).to(x.dtype)
        before = torch.nn.functional.pad(one_hot[:, :-1], (0, 0, 1, 0))
        return torch.cat([torch.zeros_like(before), before], dim=-1)


def test_a_model_that_looks_up_has_overlap_one() -> None:
    examples = TASK.draw(40, torch.Generator().manual_seed(0))
    model = trained_by_hand()
    found = attention_overlap(model, examples)
    assert found is not None
    assert found.iou == 1 and found.soft > 0.99 and found.weight > 0.99


def test_the_overlap_of_a_model_is_the_mean_over_its_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Architecture(heads=2, feature_dim=8)
    model = RecallModel("based", shape, vocabulary=20, length=16, width=16, seed=0)
    examples = TASK.draw(10, torch.Generator().manual_seed(0))
    monkeypatch.setattr("linearize.probe.iou.PASS_NUMBERS", 3 * 16**2)  # three at a time
    found = attention_overlap(model, examples)
    assert found is not None
    maps = model.attention_maps(examples.tokens)
    assert len(maps) == 1 and maps[0].shape == (10, 2, 16, 16)
    total = 0.0
    for row in range(10):
        for at, source in enumerate(examples.sources[row].tolist()):
            if source >= 0:
                total += float(maps[0][row, :, at, source].mean())
    assert found.weight == pytest.approx(total / 20, rel=1e-5)


def test_models_without_attention_have_none() -> None:
    model = RecallModel("rwkv", Architecture(), vocabulary=20, length=16, width=16, seed=0)
    assert attention_overlap(model, TASK.draw(2, torch.Generator().manual_seed(0))) is None
