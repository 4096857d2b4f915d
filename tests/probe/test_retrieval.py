"""The retrieval probe: every answer stands in its context, and accuracies are those of the logits."""

import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import tiny
from linearize import Loaded
from linearize.errors import LinearizeError, PlanError, TextError
from linearize.probe import retrieval
from linearize.probe.retrieval_data import AFTER, BETWEEN, Contexts, make_contexts, ordinary_words
from linearize.report.retrieval_figure import retrieval_chart

TOKENIZER = tiny.tokenizer()
WORDS = ordinary_words(TOKENIZER)
FILLER = torch.randint(
    13, 23, (500,), generator=torch.Generator().manual_seed(5)
)  # signs and digits
SMALL = {"pairs": (3, 6), "distances": (0, 20), "examples": 4}


def drawn(**changes: int) -> Contexts:
    given = {"pairs": 5, "distance": 30, "questions": 3, "examples": 7, "seed": 1}
    return make_contexts(TOKENIZER, WORDS, FILLER, **given | changes)


def test_every_answer_is_found_by_reading_the_context() -> None:
    """Lines of the list are read by their colons; what a line says first leads to what it says next."""
    between, after = (TOKENIZER(part)["input_ids"][0] for part in (BETWEEN, AFTER))
    contexts = drawn()
    for row, asked, values, gold in zip(
        contexts.ids.tolist(),
        contexts.asked.tolist(),
        contexts.values.tolist(),
        contexts.gold.tolist(),
        strict=True,
    ):
        listed = {}
        for at in range(1, len(row) - 1):
            if row[at] == between and row[at + 2] == after and len(listed) < 5:
                listed[row[at - 1]] = row[at + 1]
        assert list(listed.values()) == values
        assert len(set(listed) | set(values)) == 10, "a word in two pairs"
        assert len(set(gold)) == 3, "a pair asked for twice"
        for at, which in zip(asked, gold, strict=True):
            assert row[at] == between
            assert listed[row[at - 1]] == values[which] == row[at + 1]


def test_the_distance_is_a_piece_of_the_text() -> None:
    near, far = drawn(distance=0), drawn(distance=30)
    assert far.ids.shape[1] == near.ids.shape[1] + 30
    pieces = {tuple(piece) for piece in FILLER.unfold(0, 30, 1).tolist()}
    for row in far.ids.tolist():
        found = [at for at in range(len(row) - 30) if tuple(row[at : at + 30]) in pieces]
        assert len(found) == 1, "the text lies between once, unbroken"


def test_gaps_lead_from_the_question_to_the_pair() -> None:
    contexts = drawn()
    for row, asked, gaps in zip(
        contexts.ids.tolist(), contexts.asked.tolist(), contexts.gaps.tolist(), strict=True
    ):
        for at, gap in zip(asked, gaps, strict=True):
            assert gap > 30
            assert row[at + 1] == row[at + 1 - gap]


def test_a_seed_gives_the_same_contexts_again() -> None:
    assert torch.equal(drawn().ids, drawn().ids)
    assert not torch.equal(drawn().ids, drawn(seed=2).ids)
    assert torch.equal(drawn(examples=9).ids[:7], drawn().ids), "more contexts begin with the same"


def test_words_are_taken_from_the_vocabulary() -> None:
    """Of a vocabulary like GPT-2's, only whole lower-case words behind a space; of letters, all."""
    words = [f"Ġ{a}{b}x" for a in "abcdefgh" for b in "ijklmnop"]
    others = ["<s>", "river", "Ġa", "ĠThe", "Ġ12", "Ġabcdefghijk", "Ġa-b", ":", "<unk>"]
    vocabulary = {piece: at for at, piece in enumerate([*others, *words])}
    like_gpt = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")), bos_token="<s>"
    )
    assert ordinary_words(like_gpt) == list(range(len(others), len(vocabulary)))
    assert {TOKENIZER.decode([word]) for word in WORDS} == {
        *"abcdefghijklmnopqrstuvwxyz",
        *"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    }


class Reader(torch.nn.Module):
    """A model that knows where to look: the right word comes ``rank`` places below the best."""

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=4096)

    def __init__(self, rank: int = 0, blind: bool = False) -> None:
        super().__init__()
        self.rank, self.blind = rank, blind

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, tiny.VOCAB)
        for row, ids in enumerate(input_ids.tolist()):
            for at in range(2, len(ids)):
                said = [b + 2 for b in range(at - 2) if ids[b : b + 2] == ids[at - 1 : at + 1]]
                if said and not self.blind:
                    logits[row, at, ids[said[0]]] = 1.0
                logits[row, at, : self.rank] = 2.0  # pad, BOS, space: no values
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize(("rank", "exact"), [(0, 1.0), (1, 0.0), (3, 0.0)])
def test_a_model_that_looks_up_is_right(rank: int, exact: float) -> None:
    result = retrieval(Loaded(Reader(rank), TOKENIZER), "0123 " * 99, questions=2, **SMALL)
    assert [(cell.pairs, cell.distance) for cell in result.cells] == [
        (3, 0),
        (3, 20),
        (6, 0),
        (6, 20),
    ]
    for cell in result.cells:
        assert (cell.exact, cell.choice, cell.chance) == (exact, 1.0, 1 / cell.pairs)
        assert (cell.exact_error, cell.choice_error, cell.answers) == (0.0, 0.0, 8)


def test_a_model_that_does_not_look_is_at_chance() -> None:
    """All logits equal: the first value of every context is chosen, a random pair is right."""
    result = retrieval(
        Loaded(Reader(blind=True), TOKENIZER), "0 " * 9, pairs=[4], distances=[0], examples=200
    )
    (cell,) = result.cells
    assert cell.answers == 800 and cell.exact == 0.0
    # every pair is asked for once, so each context has one of four right
    assert (cell.choice, cell.choice_error) == (0.25, 0.0)
    few = retrieval(
        Loaded(Reader(blind=True), TOKENIZER),
        "0 " * 9,
        pairs=[4],
        distances=[0],
        questions=1,
        examples=400,
    )
    share = few.cells[0].choice
    assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 400))
    assert few.cells[0].choice_error == pytest.approx(math.sqrt(share * (1 - share) / 399))


@pytest.mark.parametrize("variant", ["unconverted", "oal", "oal+window"])
def test_accuracies_are_those_of_single_passes(variant: str) -> None:
    base = tiny.loaded() if variant == "unconverted" else tiny.shared(variant)
    loaded = Loaded(base.model, TOKENIZER)
    text = "0123456789 " * 30
    given = {"pairs": [6], "distances": [20], "questions": 5, "examples": 6, "seed": 3}
    results = [retrieval(loaded, text, batch=batch, **given) for batch in (1, 4)]
    assert results[0] == results[1]
    contexts = make_contexts(
        TOKENIZER,
        WORDS,
        torch.tensor(TOKENIZER(text)["input_ids"]),
        pairs=6,
        distance=20,
        questions=5,
        examples=6,
        seed=3,
    )
    exact, choice = [], []
    for row, asked, values, gold, _ in zip(*vars(contexts).values(), strict=True):
        for at, which in zip(asked.tolist(), gold.tolist(), strict=True):
            scores = tiny.logits(base.model, row[None, : at + 1])[0, -1]
            exact.append(int(scores.argmax()) == int(values[which]))
            choice.append(int(scores[values].argmax()) == which)
    assert results[0].cells[0].exact == pytest.approx(sum(exact) / 30)
    assert results[0].cells[0].choice == pytest.approx(sum(choice) / 30)
    assert results[0].cells[0].gap == pytest.approx(float(contexts.gaps.double().mean()))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"pairs": [27]}, r"2 · 27 > 52 words"),
        ({"pairs": [4, 1]}, r"1 < 2"),
        ({"pairs": []}, r"0 < 2"),
        ({"distances": [0, -5]}, r"-5 < 0"),
        ({"distances": []}, r"0 < 2"),
        ({"questions": 0}, r"0 < 1"),
        ({"examples": 0}, r"0 < 1"),
        ({"batch": 0}, r"0 < 1"),
        ({"distances": [4097]}, r"= \d+ tokens > 4096 positions"),
    ],
)
def test_the_inequality_that_fails_is_named(given: dict[str, object], found: str) -> None:
    with pytest.raises(PlanError, match=found):
        retrieval(Loaded(Reader(), TOKENIZER), "0123 " * 999, **SMALL | given)


def test_the_length_in_the_message_is_that_of_a_context() -> None:
    length = drawn().ids.shape[1]
    assert make_contexts(
        TOKENIZER, WORDS, FILLER, pairs=5, distance=30, questions=3, examples=1, seed=1,
        positions=length,
    ).ids.shape == (1, length)  # fmt: skip
    with pytest.raises(PlanError, match=rf"= {length} tokens > {length - 1} positions"):
        make_contexts(
            TOKENIZER, WORDS, FILLER, pairs=5, distance=30, questions=3, examples=1, seed=1,
            positions=length - 1,
        )  # fmt: skip


def test_other_bad_input() -> None:
    with pytest.raises(TextError, match="501 > 500 tokens of text"):
        drawn(distance=501)
    with pytest.raises(PlanError, match="not 1 ≤ 6 ≤ 5"):
        drawn(questions=6)
    with pytest.raises(LinearizeError, match="without tokenizer"):
        retrieval(tiny.loaded())


def test_the_chart_shows_every_number_of_pairs_and_the_reference() -> None:
    result = retrieval(Loaded(Reader(), TOKENIZER), "0123 " * 99, questions=2, **SMALL)
    alone, beside = retrieval_chart(result), retrieval_chart(result, result)
    for svg in (alone, beside):
        assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
        assert "3 pairs" in svg and "6 pairs" in svg and "chance" in svg
    assert "softmax" in beside and "softmax" not in alone
    assert beside.count("stroke-dasharray") > alone.count("stroke-dasharray")
