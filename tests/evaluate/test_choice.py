"""Multiple choice by hand: what is scored, from which context, and what decides between options."""

import math
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import tiny
from linearize import Loaded
from linearize.errors import ModelError, TextError
from linearize.evaluate import Question, choice, get_task
from linearize.evaluate.choice import Continuation, continuation_likelihoods, encode
from linearize.evaluate.tasks import PER_CHARACTER, PER_TOKEN, SUM, Task

each_variant = pytest.mark.parametrize("variant", ["unconverted", *tiny.variants()])
QUESTIONS = [
    Question("Question: how?\nAnswer:", ("by hand", "with a very long spoon indeed"), 1),
    Question("Question: what is the colour of the sky at noon?\nAnswer:", ("blue", "red", "bl"), 0),
    Question("Someone: walks.", ("a", "b", "then runs"), 2),
    Question("Question: how?\nAnswer:", ("not", "by hand or foot"), 0),
]


def of(variant: str) -> Loaded:
    base = tiny.loaded() if variant == "unconverted" else tiny.shared(variant)
    return Loaded(base.model, tiny.tokenizer(), base.plan)


def ids(text: str) -> list[int]:
    """The tokens of the tiny tokenizer: one a character."""
    return [97 if c == "\n" else 2 + ord(c) - 32 for c in text]


def by_hand(model: PreTrainedModel, context: str, option: str) -> list[float]:
    """``log p`` of a space and every character of an option, one pass for each."""
    result = []
    read = ids(context)
    for token in ids(" " + option):
        scores = tiny.logits(model, torch.tensor([read]))[0, -1].double()
        result.append(float((scores - scores.logsumexp(0))[token]))
        read.append(token)
    return result


def task(normalisation: str) -> Task:
    return Task("own", "Own", normalisation, (), lambda record: QUESTIONS[0])


@pytest.mark.parametrize("variant", ["unconverted", "oal"])
@pytest.mark.parametrize("normalisation", [PER_TOKEN, PER_CHARACTER, SUM])
def test_the_answer_is_the_best_by_hand(variant: str, normalisation: str) -> None:
    """Sums over the added space and the option, divided by tokens with it or characters without."""
    loaded = of(variant)
    wanted = []
    for question in QUESTIONS:
        scores = []
        for option in question.options:
            likelihoods = by_hand(loaded.model, question.context, option)
            sizes = {PER_TOKEN: len(option) + 1, PER_CHARACTER: len(option), SUM: 1}
            scores.append(sum(likelihoods) / sizes[normalisation])
        wanted.append(scores.index(max(scores)))
    result = choice(loaded, task(normalisation), QUESTIONS)
    right = [q.gold == w for q, w in zip(QUESTIONS, wanted, strict=True)]
    assert result.chosen == wanted
    assert result.accuracy == sum(right) / 4 == result.accuracies[normalisation]
    assert result.normalisation == normalisation
    assert result.scored_tokens == sum(len(o) + 1 for q in QUESTIONS for o in q.options)


@pytest.mark.parametrize("variant", ["unconverted", "oal", "oal+hybrid"])
def test_likelihoods_equal_those_by_hand(variant: str) -> None:
    loaded = of(variant)
    pairs = [(q.context, option) for q in QUESTIONS for option in q.options]
    encoded = [encode(tiny.tokenizer(), context, f" {option}") for context, option in pairs]
    found = continuation_likelihoods(loaded.model, encoded, 4)
    for (context, option), likelihood in zip(pairs, found, strict=True):
        wanted = by_hand(loaded.model, context, option)
        assert likelihood.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@each_variant
def test_the_batch_size_changes_nothing(variant: str) -> None:
    """Contexts and options of many lengths: nothing of the padding is read or counted."""
    loaded = of(variant)
    encoded = [
        encode(tiny.tokenizer(), q.context, f" {option}") for q in QUESTIONS for option in q.options
    ]
    one, two, eight = (continuation_likelihoods(loaded.model, encoded, n) for n in (1, 2, 8))
    for a, b, c in zip(one, two, eight, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=2e-5)


def _unigram(model: PreTrainedModel, chances: dict[str, float]) -> None:
    """Let a model give every token a fixed probability; the rest share what is left."""
    rest = (1 - sum(chances.values())) / (tiny.VOCAB - len(chances))
    scores = torch.full((tiny.VOCAB,), rest).log()
    for character, chance in chances.items():
        scores[ids(character)] = math.log(chance)

    def answer(module: object, args: object, output: Tensor) -> Tensor:
        return scores.expand_as(output).clone()

    model.lm_head.register_forward_hook(answer)


def test_each_normalisation_can_answer_differently() -> None:
    """p(space) = 1/2, p(a) = 1/4, p(b) = 1/16, in bits:

    ``b``: 1 + 4 = 5, per token 2.5, per character 5; ``aa``: 5, 1.67, 2.5; ``a``: 3, 1.5, 3;
    ``aaaaaaaaa``: 19, 1.9, 2.11.
    """
    loaded = of("unconverted")
    _unigram(loaded.model, {" ": 1 / 2, "a": 1 / 4, "b": 1 / 16})
    question = Question("Question: which?\nAnswer:", ("b", "aa", "a", "aaaaaaaaa"), 3)
    answers = {
        normalisation: choice(loaded, task(normalisation), [question]).chosen
        for normalisation in (SUM, PER_TOKEN, PER_CHARACTER)
    }
    assert answers == {SUM: [2], PER_TOKEN: [2], PER_CHARACTER: [3]}
    shorter = Question("Question: which?\nAnswer:", ("b", " aaaa"), 1)  # 5 bits; 10, 1.67 a token
    assert choice(loaded, task(SUM), [shorter]).chosen == [0]
    result = choice(loaded, task(PER_TOKEN), [shorter])
    assert result.chosen == [1]
    assert result.accuracies == {PER_TOKEN: 1.0, PER_CHARACTER: 1.0, SUM: 0.0}


def test_accuracy_chance_and_standard_error() -> None:
    """3 of 5 right; the standard deviation of 1, 1, 1, 0, 0 over the root of 5."""
    loaded = of("unconverted")
    _unigram(loaded.model, {" ": 1 / 2, "a": 1 / 4, "b": 1 / 16})
    options = [("a", "b"), ("b", "a", "bb"), ("a", "b", "b", "b"), ("a", "b"), ("b", "a")]
    golds = [0, 1, 0, 1, 0]
    questions = [Question("Q:", o, gold) for o, gold in zip(options, golds, strict=True)]
    result = choice(loaded, task(SUM), questions)
    assert result.chosen == [0, 1, 0, 0, 1]
    assert result.accuracy == 0.6 and result.count == 5
    spread = torch.tensor([1.0, 1, 1, 0, 0], dtype=torch.float64).std().item()
    assert result.standard_error == pytest.approx(spread / math.sqrt(5), rel=1e-12)
    assert result.chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 2 + 1 / 2) / 5)
    assert math.isnan(choice(loaded, task(SUM), questions[:1]).standard_error)


def test_what_is_read_for_one_is_not_read_again_for_another() -> None:
    """One-token options need the context alone, which every longer option begins with."""
    calls: list[tuple[int, int, str]] = []
    made = [
        Continuation((5, 6, 7, 8), 3),  # reads 5 6 7
        Continuation((5, 6, 7, 9), 3),  # the same
        Continuation((5, 6, 7, 9, 4), 3),  # reads 5 6 7 9, which begins with 5 6 7
        Continuation((5, 6, 8), 2),  # reads 5 6, which it begins with, too
        Continuation((6, 7, 8), 1),  # reads 6 7
    ]
    model = tiny.model()
    found = continuation_likelihoods(model, made, 1, lambda *call: calls.append(call))
    assert [call[:2] for call in calls] == [(1, 2), (2, 2)]
    for one, likelihood in zip(made, found, strict=True):
        (alone,) = continuation_likelihoods(model, [one])
        torch.testing.assert_close(likelihood, alone, rtol=1e-5, atol=1e-5)
        assert len(likelihood) == len(one.ids) - one.start


@pytest.mark.parametrize("bos", [False, True])
def test_no_token_is_added_by_any_tokenizer(bos: bool) -> None:
    encoded = encode(tiny.tokenizer(bos=bos), "a b", " cd")
    assert encoded == Continuation(tuple(ids("a b cd")), 3)


def merging(merges: Sequence[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A tokenizer of characters and some merges of them, across spaces too."""
    pieces = [*"abc: ", *(a + b for a, b in merges)]
    backend = Tokenizer(BPE({piece: at for at, piece in enumerate(pieces)}, list(merges)))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_seam_is_where_the_tokens_of_both_leave_those_of_the_context() -> None:
    """``" b"`` is one token, as in running text; tokenizing the option alone would not see it."""
    assert encode(merging([(" ", "b")]), "a:", " bc") == Continuation((0, 3, 5, 2), 2)


def test_a_token_across_the_seam_belongs_to_the_continuation() -> None:
    """With ``": "`` one token the context's last token is no longer there: it is scored."""
    assert encode(merging([(":", " ")]), "a:", " bc") == Continuation((0, 5, 1, 2), 1)


def test_both_sides_need_a_token() -> None:
    with pytest.raises(TextError, match="0 tokens of context"):
        encode(tiny.tokenizer(), "", " ab")
    with pytest.raises(TextError, match="2 tokens of context in 2"):
        encode(tiny.tokenizer(), "ab", "")


def test_a_question_longer_than_the_positions_is_an_error() -> None:
    model = tiny.model("gpt2")  # 256 positions
    fits = [Continuation(tuple(tiny.text(256).tolist()), 200)]
    assert len(continuation_likelihoods(model, fits)[0]) == 56
    with pytest.raises(TextError, match="257 tokens for 256 positions"):
        continuation_likelihoods(model, [Continuation((*fits[0].ids, 5), 200)])


def test_a_model_without_room_for_fewer_logits_scores_the_same() -> None:
    """A wrapper hides the argument that keeps only the last logits."""
    loaded = of("unconverted")
    wanted = choice(loaded, task(SUM), QUESTIONS)
    plain = loaded.model.forward
    loaded.model.forward = lambda input_ids, **rest: plain(input_ids=input_ids, **rest)
    found = choice(loaded, task(SUM), QUESTIONS)
    assert found.chosen == wanted.chosen and found.scored_tokens == wanted.scored_tokens


def test_nan_logits_and_a_missing_tokenizer_are_errors() -> None:
    loaded = of("unconverted")
    loaded.model.lm_head.weight.data[3, 3] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        choice(loaded, task(SUM), QUESTIONS)
    with pytest.raises(ModelError, match="without tokenizer"):
        choice(tiny.loaded(), task(SUM), QUESTIONS)


def test_the_normalisation_of_every_task() -> None:
    assert get_task("piqa").normalisation == "mean log-likelihood per token"
    assert get_task("hellaswag").normalisation == "mean log-likelihood per token"
    assert get_task("arc_easy").normalisation == "log-likelihood per character of the option"
