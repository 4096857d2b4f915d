"""Generation as transformers users know it, from a fresh, a loaded and an adapted model."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, pipeline

import linearize
import tiny
from linearize import Loaded
from linearize.cache import LinearCacheLayer
from linearize.errors import LinearizeError

each_variant = pytest.mark.parametrize("variant", [*tiny.variants(), *tiny.MIXED])
each_form = pytest.mark.parametrize("form", tiny.FORMS)


def batch() -> dict[str, torch.Tensor]:
    """Prompts of 5 and 12 tokens, left-padded, as a tokenizer gives them."""
    inputs = tiny.left_padded([tiny.text(5, seed=4), tiny.text(12, seed=5)])
    del inputs["position_ids"]
    return inputs


def generate(model: PreTrainedModel, inputs: dict[str, Any], **changes: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | changes
    torch.manual_seed(11)
    return model.generate(**inputs, **settings)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "sampled sequences": {"do_sample": True, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@each_variant
@each_form
@pytest.mark.parametrize("mode", MODES)
def test_the_cache_changes_nothing(variant: str, form: str, mode: str) -> None:
    model = tiny.shared(variant, form).model
    with_cache = generate(model, batch(), use_cache=True, **MODES[mode])
    without = generate(model, batch(), use_cache=False, **MODES[mode])
    assert torch.equal(with_cache, without)
    assert with_cache.shape[1] == 22
    assert len({tuple(row.tolist()) for row in with_cache}) == len(with_cache)


@each_variant
def test_greedy_tokens_are_the_most_likely_ones(variant: str) -> None:
    """Each prompt of the padded batch gets what repeated whole passes over it alone give."""
    model = tiny.shared(variant).model
    found = generate(model, batch(), max_new_tokens=6)
    for row, tokens in enumerate((tiny.text(5, seed=4), tiny.text(12, seed=5))):
        for _ in range(6):
            best = tiny.logits(model, tokens[None])[0, -1].argmax()
            tokens = torch.cat([tokens, best[None]])
        assert found[row, -len(tokens) :].tolist() == tokens.tolist()


@each_variant
@each_form
def test_continuing_from_a_cache_equals_one_conversation(variant: str, form: str) -> None:
    """Two turns, the second from the cache of the first, against one pass over everything."""
    model = tiny.shared(variant, form).model
    first = tiny.prompt(1, 7)
    cache = DynamicCache()
    answer = generate(model, {"input_ids": first}, past_key_values=cache, max_new_tokens=5)
    question = torch.cat([answer, tiny.prompt(1, 4, seed=8)], 1)
    continued = generate(model, {"input_ids": question}, past_key_values=cache, max_new_tokens=6)
    assert torch.equal(continued, generate(model, {"input_ids": question}, max_new_tokens=6))
    assert cache.get_seq_length() == continued.shape[1] - 1


def test_the_returned_cache_is_the_constant_size_one() -> None:
    output = generate(tiny.shared().model, batch(), return_dict_in_generate=True)
    cache = output.past_key_values if "past_key_values" in output else output.cache
    assert all(isinstance(layer, LinearCacheLayer) for layer in cache.layers)
    assert {layer.state.sums.shape for layer in cache.layers} == {(2, 2, 45, 9)}


def test_scores_are_the_logits_of_whole_passes() -> None:
    model = tiny.shared().model
    output = generate(
        model,
        {"input_ids": tiny.prompt(1, 6)},
        return_dict_in_generate=True,
        output_logits=True,
    )
    whole = tiny.logits(model, output.sequences)
    for step, logits in enumerate(output.logits):
        torch.testing.assert_close(logits[0], whole[0, 5 + step], rtol=1e-4, atol=1e-4)


@each_form
def test_the_text_generation_pipeline(form: str) -> None:
    tokenizer = tiny.tokenizer()
    model = tiny.shared("oal", form).model
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["hello", "the quick brown"]
    settings = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    together = generator(prompts, batch_size=2, **settings)
    for prompt, result in zip(prompts, together, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        tokens = generate(model, {"input_ids": ids}, max_new_tokens=6)[0, ids.shape[1] :]
        wanted = tokenizer.decode(tokens, skip_special_tokens=True)
        assert result[0]["generated_text"] == wanted
        assert generator(prompt, **settings)[0]["generated_text"] == wanted


def test_the_loaded_folder_serves_the_pipeline_with_its_own_tokenizer(tmp_path: Any) -> None:
    fresh = tiny.converted("oal")
    linearize.save(Loaded(fresh.model, tiny.tokenizer(), fresh.plan), tmp_path / "out")
    loaded = linearize.load(tmp_path / "out")
    generator = pipeline(
        "text-generation", model=loaded.model, tokenizer=loaded.tokenizer, device="cpu"
    )
    settings = {"max_new_tokens": 6, "do_sample": False}
    text = generator("hello", **settings)[0]["generated_text"]
    assert text.startswith("hello")
    assert len(text) > len("hello")


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 3}, {"assistant": True}])
def test_generation_that_takes_tokens_back_is_refused(settings: dict[str, Any]) -> None:
    """Assisted generation crops the cache: refused, never silently wrong."""
    model = tiny.converted("oal").model
    if settings.pop("assistant", None):
        settings = {"assistant_model": tiny.model(seed=9)}
    ids = tiny.prompt(1, 4).repeat(1, 4)
    wanted = generate(model, {"input_ids": ids}, max_new_tokens=12)
    try:
        found = generate(model, {"input_ids": ids}, max_new_tokens=12, **settings)
    except (LinearizeError, ValueError) as error:
        assert "crop" in str(error).lower() or "linear" in str(error).lower()
    else:
        assert torch.equal(found, wanted)


def test_generation_after_training_mode_and_back() -> None:
    model = tiny.converted("oal").model
    wanted = generate(model, batch())
    model.train()
    model(input_ids=tiny.prompt(1, 9), labels=tiny.prompt(1, 9)).loss.backward()
    model.eval()
    assert torch.equal(generate(model, batch()), wanted)
