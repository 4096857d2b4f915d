"""Perplexity by hand: which tokens are scored, from which context, and how they are averaged."""

import math
import sys

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tiny
from linearize import Loaded
from linearize.errors import LinearizeError, ModelError, TextError
from linearize.evaluate import perplexity, sequence_nll

each_variant = pytest.mark.parametrize("variant", ["unconverted", *tiny.variants()])
DOCUMENTS = [tiny.text(n, seed=n) for n in (3, 17, 40)]
SENTENCE = "the quick brown fox jumps over the lazy dog"


def of(variant: str) -> Loaded:
    return tiny.loaded() if variant == "unconverted" else tiny.shared(variant)


def by_hand(model: PreTrainedModel, tokens: list[int]) -> list[float]:
    """``-log p(token | tokens before it)`` of every token but the first, one pass for each."""
    result = []
    for at in range(1, len(tokens)):
        scores = tiny.logits(model, torch.tensor([tokens[:at]]))[0, -1].double()
        result.append(float(-(scores - scores.logsumexp(0))[tokens[at]]))
    return result


@pytest.mark.parametrize("variant", ["unconverted", "oal"])
def test_equals_the_sum_by_hand(variant: str) -> None:
    """Blocks of 6 of 20 tokens: three blocks, five targets each, two tokens dropped."""
    loaded, ids = of(variant), tiny.text(20)
    wanted = [by_hand(loaded.model, ids[at : at + 6].tolist()) for at in (0, 6, 12)]
    result = perplexity(loaded, ids, block=6)
    flat = [x for block in wanted for x in block]
    assert (result.targets, result.blocks, result.block) == (15, 3, 6)
    assert result.nll == pytest.approx(sum(flat) / 15, rel=1e-5)
    assert result.value == pytest.approx(math.exp(sum(flat) / 15), rel=1e-4)
    assert result.per_block == pytest.approx([sum(b) / 5 for b in wanted], rel=1e-5)


def test_the_incomplete_last_block_is_dropped() -> None:
    loaded, ids = tiny.loaded(), tiny.text(23)
    whole = perplexity(loaded, ids[:18], block=6)
    assert perplexity(loaded, ids, block=6) == whole
    changed = ids.clone()
    changed[18:] = 5
    assert perplexity(loaded, changed, block=6) == whole


def test_only_the_first_blocks_if_asked() -> None:
    loaded, ids = tiny.loaded(), tiny.text(40)
    first = perplexity(loaded, ids, block=8, blocks=2)
    assert (first.blocks, first.targets) == (2, 14)
    assert first.per_block == perplexity(loaded, ids, block=8).per_block[:2]
    assert first == perplexity(loaded, ids[:16], block=8)


@each_variant
def test_the_batch_size_changes_nothing(variant: str) -> None:
    loaded, ids = of(variant), tiny.text(7 * 12)
    results = [perplexity(loaded, ids, block=12, batch=batch) for batch in (1, 2, 8)]
    for result in results[1:]:
        assert result.per_block == pytest.approx(results[0].per_block, rel=1e-5)
        assert (result.blocks, result.targets) == (7, 77)


@each_variant
def test_documents_of_any_length_score_the_same_at_any_batch_size(variant: str) -> None:
    """3, 17 and 40 tokens: nothing of the padding is read or counted."""
    model = of(variant).model
    results = {batch: sequence_nll(model, DOCUMENTS, batch) for batch in (1, 2, 8)}
    for found in results.values():
        assert [count for _, count in found] == [2, 16, 39]
        for (nll, _), (wanted, _) in zip(found, results[1], strict=True):
            assert nll == pytest.approx(wanted, rel=1e-5)
    wanted = by_hand(model, DOCUMENTS[1].tolist())
    assert results[8][1][0] == pytest.approx(sum(wanted), rel=1e-4)


def test_long_sequences_are_scored_in_parts_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    whole = sequence_nll(model, DOCUMENTS, 2)
    # the package exports a function of the module's name
    monkeypatch.setattr(sys.modules["linearize.evaluate.perplexity"], "HEAD_ROWS", 7)
    parts = sequence_nll(model, DOCUMENTS, 2)
    for (a, count), (b, same) in zip(whole, parts, strict=True):
        assert count == same
        assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("block", [7, 10])
def test_no_token_is_added_by_any_tokenizer(bos: bool, block: int) -> None:
    """Two windows: the loss is that of the text's own tokens, and so is the count."""
    model, tokenizer = tiny.model(), tiny.tokenizer(bos=bos)
    ids = [2 + ord(c) - 32 for c in SENTENCE]
    result = perplexity(Loaded(model, tokenizer), SENTENCE, block=block, blocks=2)
    wanted = [x for at in (0, block) for x in by_hand(model, ids[at : at + block])]
    assert result.targets == len(wanted) == 2 * (block - 1)
    assert result.nll == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)


def test_entries_are_joined_by_two_newlines() -> None:
    loaded = Loaded(tiny.model(), tiny.tokenizer())
    joined = perplexity(loaded, "first entry\n\nsecond entry", block=8)
    assert perplexity(loaded, ["first entry", "second entry"], block=8) == joined


def test_one_token_has_nothing_to_score() -> None:
    assert sequence_nll(tiny.model(), [tiny.text(1), tiny.text(4)], 2)[0] == (0.0, 0)


def test_a_certain_model_has_perplexity_one() -> None:
    """Logits of +1000 for the right token: no overflow, no rounding up."""
    loaded = tiny.loaded()
    ids = torch.full((12,), 7)
    loaded.model.lm_head.weight.data.zero_()
    _answer_always(loaded.model, 7, 1000.0)
    assert perplexity(loaded, ids, block=6).value == 1.0
    _answer_always(loaded.model, 8, 1000.0)
    assert perplexity(loaded, ids, block=6).value == math.inf


def _answer_always(model: PreTrainedModel, token: int, score: float) -> None:
    def answer(module: object, args: object, output: Tensor) -> Tensor:
        return torch.zeros_like(output).index_fill(-1, torch.tensor([token]), score)

    model.lm_head._forward_hooks.clear()
    model.lm_head.register_forward_hook(answer)


def test_an_ignorant_model_has_the_size_of_the_vocabulary() -> None:
    loaded = tiny.loaded()
    loaded.model.lm_head.weight.data.zero_()
    assert perplexity(loaded, tiny.text(50), block=10).value == pytest.approx(tiny.VOCAB, rel=1e-5)


def test_progress_is_reported_per_batch() -> None:
    calls: list[tuple[int, int, str]] = []
    perplexity(
        tiny.loaded(),
        tiny.text(50),
        block=10,
        batch=2,
        progress=lambda *call: calls.append(call),
    )
    assert [call[:2] for call in calls] == [(2, 5), (4, 5), (5, 5)]


def test_nan_logits_are_an_error() -> None:
    loaded = tiny.loaded()
    loaded.model.lm_head.weight.data[3, 3] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        perplexity(loaded, tiny.text(50), block=10)
    with pytest.raises(ModelError, match="NaN"):
        sequence_nll(loaded.model, DOCUMENTS)


@pytest.mark.parametrize(
    "settings", [{"block": 51}, {"block": 10, "blocks": 6}, {"block": 4096, "blocks": 1}]
)
def test_too_short_a_text_is_an_error(settings: dict[str, int]) -> None:
    with pytest.raises(TextError, match="50 tokens"):
        perplexity(tiny.loaded(), tiny.text(50), **settings)


@pytest.mark.parametrize(
    "settings",
    [{"block": 1}, {"block": 0}, {"block": 10, "blocks": 0}, {"block": 10, "batch": 0}],
)
def test_settings_that_score_nothing_are_an_error(settings: dict[str, int]) -> None:
    with pytest.raises(LinearizeError):
        perplexity(tiny.loaded(), tiny.text(50), **settings)
