"""`linearize generate`: tokens as the library gives them, and an honest account of the cache."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import linearize
from linearize.converted import original_attention
from linearize.report import SAMPLES

PROMPT = "The with statement"
NEW = 6


def greedy(loaded: linearize.Loaded) -> str:
    """The library's own greedy continuation."""
    ids = torch.tensor([loaded.tokenizer(PROMPT)["input_ids"]])
    made = loaded.model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return loaded.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_greedy_tokens_and_cache_bytes(
    run, conversion: tuple[Path, Result], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = run(
        "generate", conversion[0], "--prompt", PROMPT, "--max-new-tokens", NEW, "--json", out
    )
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    loaded = linearize.load(conversion[0])
    assert written["text"] == greedy(loaded)
    assert written["attention"] == "converted"
    assert written["prompt_tokens"] == len(PROMPT) and written["new_tokens"] == NEW
    assert result.stdout.startswith(PROMPT)
    assert "".join(written["text"].split()) in "".join(result.stdout.split())

    ids = torch.tensor([loaded.tokenizer(PROMPT)["input_ids"]])
    made = loaded.model.generate(
        ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, return_dict_in_generate=True
    )
    softmax, *linear = made.past_key_values.layers
    assert softmax.nbytes > softmax.keys.nbytes + softmax.values.nbytes  # room to grow
    assert written["cache_bytes"] == softmax.nbytes + sum(x.state.nbytes for x in linear)


def test_original_is_the_model_before_conversion(
    run, conversion: tuple[Path, Result], base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    given = ["--prompt", PROMPT, "--max-new-tokens", NEW, "--original", "--json", out]
    assert run("generate", conversion[0], *given).exit_code == 0
    written = json.loads(out.read_text())
    assert written["attention"] == "softmax"
    assert written["text"] == greedy(linearize.load(base))


def test_compare_shows_both_and_keeps_them_for_the_report(run, converted: Path) -> None:
    given = ["--prompt", PROMPT, "--max-new-tokens", NEW, "--compare"]
    result = run("generate", converted, *given)
    assert result.exit_code == 0, result.output
    (pair,) = json.loads((converted / SAMPLES).read_text())
    loaded = linearize.load(converted)
    assert pair["prompt"] == PROMPT
    assert pair["converted"]["text"] == greedy(loaded)
    with original_attention(loaded.model):
        assert pair["softmax"]["text"] == greedy(loaded)
    assert pair["softmax"]["text"] in result.stdout and pair["converted"]["text"] in result.stdout


@pytest.mark.parametrize(
    "settings", [["--temperature", 1.5], ["--top-p", 0.9], ["--sample"], ["--beams", 3]]
)
def test_seed_decides_sampling_and_beams_run(
    run, conversion: tuple[Path, Result], tmp_path: Path, settings: list[object]
) -> None:
    texts = []
    for seed in (1, 1, 2):
        out = tmp_path / "out.json"
        given = ["--prompt", PROMPT, "--max-new-tokens", 12, "--seed", seed, "--json", out]
        assert run("generate", conversion[0], *given, *settings).exit_code == 0
        texts.append(json.loads(out.read_text())["text"])
    assert texts[0] == texts[1]
    assert (texts[0] == texts[2]) == ("--beams" in settings)


def test_the_original_of_an_unconverted_model_is_refused(run, tmp_path: Path) -> None:
    result = run("generate", "smollm2-135m", "--prompt", "x", "--compare")
    assert result.exit_code == 2
    assert "asked for the original attention of smollm2-135m" in result.stderr


def test_an_empty_prompt_is_refused(run, conversion: tuple[Path, Result]) -> None:
    result = run("generate", conversion[0], "--prompt", "")
    assert result.exit_code == 2 and "no token in it" in result.stderr
