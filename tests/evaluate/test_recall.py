"""The recall split: which tokens it counts as recallable, and what their perplexity is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from linearize.errors import TextError
from linearize.evaluate import perplexity, recall_split
from linearize.evaluate.perplexity import token_nll
from linearize.evaluate.recall import occurred


def looked_up(tokens: list[int]) -> list[bool]:
    """The slow definition: a dictionary of the bigrams read so far."""
    known: dict[tuple[int, int], int] = {}
    result = []
    for at in range(1, len(tokens)):
        bigram = (tokens[at - 1], tokens[at])
        result.append(bigram in known)
        known.setdefault(bigram, at)
    return result


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_bigrams_equal_a_dictionary_lookup(tokens: list[int]) -> None:
    assert occurred(torch.tensor(tokens)).tolist() == looked_up(tokens)


@pytest.mark.parametrize("vocabulary", [7, 40, 100_000])
def test_bigrams_of_long_blocks_and_large_vocabularies(vocabulary: int) -> None:
    """Ids near the end of a large vocabulary: pairs of them need more than 32 bits."""
    generator = torch.Generator().manual_seed(vocabulary)
    few = torch.randint(vocabulary - 7, vocabulary, (1500,), generator=generator)
    tokens = torch.where(few % 3 == 0, few, few.flip(0))
    found = occurred(tokens)
    assert found.tolist() == looked_up(tokens.tolist())
    assert 0 < int(found.sum()) < len(found)


def test_by_hand() -> None:
    """``a b a b c a a a``: ``a b`` and, from the third a in a row on, ``a a`` were there before."""
    tokens = torch.tensor([1, 2, 1, 2, 3, 1, 1, 1])
    assert occurred(tokens).tolist() == [False, False, True, False, False, False, True]


@pytest.mark.parametrize("variant", ["unconverted", "oal"])
@pytest.mark.parametrize("batch", [1, 2])
def test_both_classes_have_the_perplexity_of_their_tokens(variant: str, batch: int) -> None:
    loaded = tiny.loaded() if variant == "unconverted" else tiny.shared(variant)
    ids = tiny.text(95, seed=4) % 5 + 2  # five kinds of token: many bigrams return
    result = recall_split(loaded, ids, block=30, batch=batch)
    yes, no = [], []
    for block in ids[:90].split(30):
        for nll, again in zip(
            token_nll(loaded.model, [block])[0].tolist(), looked_up(block.tolist()), strict=True
        ):
            (yes if again else no).append(nll)
    assert yes and no
    for found, nlls in ((result.recalled, yes), (result.rest, no)):
        mean = sum(nlls) / len(nlls)
        assert found.targets == len(nlls)
        assert found.share == pytest.approx(len(nlls) / 87)
        assert found.nll == pytest.approx(mean, rel=1e-5)
        assert found.value == pytest.approx(math.exp(mean), rel=1e-4)
    assert result.both == perplexity(loaded, ids, block=30, batch=batch)


def test_bigrams_are_not_carried_from_block_to_block() -> None:
    ids = torch.tensor([3, 4, 5, 6, 3, 4, 5, 6])
    apart = recall_split(tiny.loaded(), ids, block=4)
    assert (apart.recalled.targets, apart.rest.targets) == (0, 6)
    assert math.isnan(apart.recalled.value) and apart.recalled.share == 0
    assert recall_split(tiny.loaded(), ids, block=8).recalled.targets == 3


def test_too_short_a_text_is_an_error() -> None:
    with pytest.raises(TextError, match="20 tokens"):
        recall_split(tiny.loaded(), tiny.text(20), block=30)
