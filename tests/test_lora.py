"""LoRA beside converted layers: stored exactly, folded in with equal logits, refused elsewhere."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import linearize
import tiny
from linearize import Loaded
from linearize.converted import converted_layers, original_attention
from linearize.errors import CheckpointError, PlanError
from linearize.lora import (
    LORA,
    WEIGHTS,
    LoraSettings,
    add_lora,
    lora_disabled,
    lora_layers,
    lora_settings,
    lora_tensors,
    projections,
)
from tolerances import assert_close

IDS = tiny.prompt(2, 13)


def adapted(loaded: Loaded, *, rank: int = 3, seed: int = 7) -> Loaded:
    """LoRA with random numbers in A and B."""
    add_lora(loaded.model, LoraSettings(rank, 6.0, 0.1, tuple(projections(loaded.model))))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in lora_tensors(loaded.model).values():
            value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return loaded


def base(kind: str, name: str = "llama", **changes: bool) -> Loaded:
    loaded = tiny.loaded(name, **changes)
    return loaded if kind == "softmax" else tiny.filled(loaded, tiny.plan(kernel=kind))


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
def test_the_projections_of_every_layer_are_found(name: str) -> None:
    """Also with a kernel inside that has linear maps of its own."""
    per_layer = {"gpt2": 2, "gpt_neox": 2}.get(name, 4)
    for kind in ("softmax", "hedgehog"):
        loaded = base(kind, name)
        found = projections(loaded.model)
        assert len(found) == per_layer * tiny.LAYERS
        assert all("mlp" not in one and "linear_attention" not in one for one in found)
        before = tiny.logits(loaded.model, IDS)
        add_lora(loaded.model, LoraSettings(2, 4.0, 0.5, tuple(found)))
        assert sorted(lora_layers(loaded.model)) == sorted(found)
        assert torch.equal(tiny.logits(loaded.model, IDS), before)  # B is zero, dropout is off


def test_adding_it_leaves_what_requires_gradients() -> None:
    loaded = base("oal")
    flags = {name: p.requires_grad for name, p in loaded.model.named_parameters()}
    assert all(flags.values())
    adapted(loaded)
    assert all(p.requires_grad for p in loaded.model.parameters())
    frozen = base("oal")
    frozen.model.requires_grad_(False)
    adapted(frozen)
    assert {n for n, p in frozen.model.named_parameters() if p.requires_grad} == {
        n for n, _ in frozen.model.named_parameters() if "lora_" in n
    }


@pytest.mark.parametrize("kind", ["oal", "performer", "softmax"])
@pytest.mark.parametrize("form", ["whole", "adapter"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_saved_and_loaded_it_is_bitwise_the_same(
    kind: str, form: str, name: str, tmp_path: Path
) -> None:
    """As after one joint step: neither LoRA nor kernels are where they started."""
    loaded = adapted(base(kind, name))
    linearize.save(loaded, tmp_path / "out", form == "adapter")
    torch.manual_seed(3)
    again = linearize.load(tmp_path / "out", base=tiny.loaded(name) if form == "adapter" else None)
    assert not again.model.training
    assert torch.equal(tiny.logits(loaded.model, IDS), tiny.logits(again.model, IDS))
    assert lora_settings(again.model) == lora_settings(loaded.model)
    for found, wanted in (
        (lora_tensors(again.model), lora_tensors(loaded.model)),
        (tiny.kernel_tensors(again.model), tiny.kernel_tensors(loaded.model)),
    ):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[key]) for key, value in found.items())
    linearize.save(again, tmp_path / "again", form == "adapter")
    for file in (WEIGHTS, LORA):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


@pytest.mark.parametrize("kind", ["oal", "softmax"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("tie", [True, False])
def test_folded_in_it_gives_equal_logits_without_peft(
    kind: str, name: str, tie: bool, tmp_path: Path
) -> None:
    loaded = adapted(base(kind, name, tie_word_embeddings=tie))
    wanted = tiny.logits(loaded.model, IDS)
    linearize.save(loaded, tmp_path / "out", merge=True)
    assert torch.equal(tiny.logits(loaded.model, IDS), wanted)  # memory is as it was
    assert len(lora_layers(loaded.model)) > 0
    again = linearize.load(tmp_path / "out").model
    assert not lora_layers(again)
    assert_close(tiny.logits(again, IDS), wanted, torch.float32, "output")
    head, embedding = again.get_output_embeddings(), again.get_input_embeddings()
    assert isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding)
    assert (head.weight is embedding.weight) == tie
    stored = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert not {key for key in stored if "lora" in key or "base_layer" in key}


def test_in_half_precision_adapters_stay_in_full(tmp_path: Path) -> None:
    linearize.save(adapted(base("oal")), tmp_path / "out")
    again = linearize.load(tmp_path / "out", dtype=torch.bfloat16)
    assert {value.dtype for value in lora_tensors(again.model).values()} == {torch.float32}
    logits = tiny.logits(again.model, IDS)
    assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())


def test_the_reference_is_the_model_before_conversion_and_adaptation() -> None:
    wanted = tiny.logits(tiny.model(), IDS)
    loaded = adapted(base("oal"))
    with original_attention(loaded.model):
        assert torch.equal(tiny.logits(loaded.model, IDS), wanted)
    assert not torch.equal(tiny.logits(loaded.model, IDS), wanted)
    assert all(p.requires_grad for p in lora_tensors(loaded.model).values())
    converted = tiny.logits(base("oal").model, IDS)
    with lora_disabled(loaded.model):
        assert torch.equal(tiny.logits(loaded.model, IDS), converted)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    loaded = adapted(base("oal"))
    linearize.save(loaded, tmp_path / "out", adapter_only=True)
    with pytest.raises(CheckpointError, match="adapted already"):
        linearize.load(tmp_path / "out", base=adapted(tiny.loaded()))
    with pytest.raises(CheckpointError, match=r"layers.0.*shape \(3, 96\)"):
        linearize.load(tmp_path / "out", base=tiny.loaded(hidden_size=96, head_dim=8))
    with pytest.raises(PlanError, match="LoRA already"):
        adapted(loaded)

    def broken(change: str) -> None:
        tensors = load_file(tmp_path / "out" / WEIGHTS)
        settings = json.loads((tmp_path / "out" / LORA).read_text())
        name = sorted(tensors)[0]
        if change == "missing":
            del tensors[name]
        elif change == "shape":
            tensors[name] = tensors[name][:, :-1].contiguous()
        elif change == "unexpected":
            tensors["stranger.A"] = torch.zeros(1)
        elif change == "rank":
            settings["rank"] = 5
        else:
            settings["targets"].append("model.layers.9.self_attn.q_proj")
        folder = tmp_path / change
        linearize.save(loaded, folder, adapter_only=True)
        save_file(tensors, folder / WEIGHTS)
        (folder / LORA).write_text(json.dumps(settings))

    for change, message in (
        ("missing", "it missing"),
        ("shape", "shape"),
        ("unexpected", "stranger"),
        ("rank", "shape"),
        ("targets", "layers.9"),
    ):
        broken(change)
        with pytest.raises(CheckpointError, match=message):
            linearize.load(tmp_path / change, base=tiny.loaded())
    (tmp_path / "rank" / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"missing or damaged"):
        linearize.load(tmp_path / "rank", base=tiny.loaded())


def test_kernels_are_missed_where_only_lora_is_there(tmp_path: Path) -> None:
    """LoRA trained with linear attention says nothing about the softmax model it came from."""
    linearize.save(adapted(base("oal")), tmp_path / "out", adapter_only=True)
    (tmp_path / "out" / "linearize_kernels.safetensors").unlink()
    with pytest.raises(CheckpointError, match="kernels"):
        linearize.load(tmp_path / "out", base=tiny.loaded())


def test_an_adapter_cannot_be_folded_and_a_plain_model_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folded"):
        linearize.save(adapted(base("oal")), tmp_path / "out", adapter_only=True, merge=True)
    with pytest.raises(CheckpointError, match="without converted layers"):
        linearize.save(tiny.loaded(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_generation_goes_through_adapters(tmp_path: Path) -> None:
    """Cached decoding of an adapted converted model is its uncached pass."""
    loaded = adapted(base("oal"))
    logits, _ = tiny.decode(loaded.model, IDS, [5, 1, 1, 6])
    assert_close(logits, tiny.logits(loaded.model, IDS), torch.float32, "output")
    assert len(converted_layers(loaded.model)) == tiny.LAYERS
