"""What is saved is what is loaded, in any process; what does not fit or is damaged is refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import linearize
import tiny
from linearize import Loaded
from linearize.checkpoint import ADAPTER, KERNELS, REPORT
from linearize.converted import converted_layers
from linearize.errors import CheckpointError, LinearizeError, OutputError
from tolerances import assert_close

each_variant = pytest.mark.parametrize("variant", [*tiny.variants(), *tiny.MIXED])
IDS = tiny.prompt(2, 13)


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert torch.equal(value, b[name]), name


@each_variant
@pytest.mark.parametrize("adapter_only", [False, True])
def test_saved_and_loaded_is_bitwise_the_same(
    variant: str, adapter_only: bool, tmp_path: Path
) -> None:
    fresh = tiny.converted(variant)
    linearize.save(fresh, tmp_path / "out", adapter_only)
    torch.manual_seed(4321)
    again = linearize.load(tmp_path / "out", base=tiny.loaded() if adapter_only else None)
    same_tensors(tiny.kernel_tensors(fresh.model), tiny.kernel_tensors(again.model))
    same_tensors(fresh.model.state_dict(), again.model.state_dict())
    assert again.plan == fresh.plan
    assert again.model.config.linearize == fresh.model.config.linearize
    assert not again.model.training
    assert torch.equal(tiny.logits(again.model, IDS), tiny.logits(fresh.model, IDS))


IN_ANOTHER_PROCESS = """
import sys, torch, linearize
torch.manual_seed(987654)
torch.set_num_threads(int(sys.argv[1]))
ids = torch.load(sys.argv[2])
results = {}
for folder in sys.argv[4:]:
    model = linearize.load(folder).model
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    results[folder] = (logits, tokens)
torch.save(results, sys.argv[3])
"""


TWICE = ("oal+hybrid", "performer")  # those with most to store, also as adapters


def test_a_new_process_under_another_seed_gives_equal_logits(tmp_path: Path) -> None:
    """Every kernel as a whole folder, some also as an adapter that names its base."""
    base = tmp_path / "base"
    tiny.model().save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    models, folders = {}, []
    for variant in tiny.variants():
        for kind in ("whole", "adapter") if variant in TWICE else ("whole",):
            folder = str(tmp_path / f"{variant} {kind}")
            loaded = tiny.filled(linearize.load(base), tiny.variant_plan(variant))
            loaded.model.config.linearize["base"] = str(base)
            linearize.save(loaded, folder, kind == "adapter")
            models[folder] = loaded.model
            folders.append(folder)
    torch.save(IDS, tmp_path / "ids.pt")
    source = Path(linearize.__file__).parents[1]
    subprocess.run(
        [
            sys.executable,
            "-c",
            IN_ANOTHER_PROCESS,
            str(torch.get_num_threads()),
            tmp_path / "ids.pt",
            tmp_path / "results.pt",
            *folders,
        ],
        check=True,
        env=os.environ | {"PYTHONPATH": str(source), "PYTHONHASHSEED": "77"},
        timeout=300,
    )
    results = torch.load(tmp_path / "results.pt")
    assert results.keys() == models.keys()
    for folder, (logits, tokens) in results.items():
        model = models[folder]
        assert_close(logits, tiny.logits(model, IDS), torch.float32, "output", folder)
        wanted = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(tokens, wanted), folder


@pytest.mark.parametrize("name", tiny.CONVERTIBLE)
def test_every_architecture_survives(name: str, tmp_path: Path) -> None:
    fresh = tiny.filled(tiny.loaded(name), tiny.plan(layers="0,2", window=2))
    linearize.save(fresh, tmp_path / "out")
    again = linearize.load(tmp_path / "out")
    assert list(converted_layers(again.model)) == [0, 2]
    assert type(again.model).__name__ == type(fresh.model).__name__
    assert torch.equal(tiny.logits(again.model, IDS), tiny.logits(fresh.model, IDS))


@pytest.mark.parametrize("tie", [True, False])
def test_tied_embeddings_survive(tie: bool, tmp_path: Path) -> None:
    fresh = tiny.filled(tiny.loaded(tie_word_embeddings=tie), tiny.plan())
    linearize.save(fresh, tmp_path / "out")
    again = linearize.load(tmp_path / "out").model
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie
    assert torch.equal(tiny.logits(again, IDS), tiny.logits(fresh.model, IDS))


def half_base(folder: Path, dtype: torch.dtype) -> Loaded:
    """The tiny Llama loaded in half precision (its rotary frequencies stay in full)."""
    if not folder.is_dir():
        tiny.model().save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    return linearize.load(folder, dtype=dtype)


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapter_only", [False, True])
def test_half_weights_keep_full_kernels(
    variant: str, dtype: torch.dtype, adapter_only: bool, tmp_path: Path
) -> None:
    """Parameters, fp64 projections and integer groups alike."""
    fresh = tiny.filled(half_base(tmp_path / "base", dtype), tiny.variant_plan(variant))
    kernels = tiny.kernel_tensors(fresh.model)
    assert not {torch.bfloat16, torch.float16} & {t.dtype for t in kernels.values()}
    linearize.save(fresh, tmp_path / "out", adapter_only)
    base = half_base(tmp_path / "base", dtype) if adapter_only else None
    again = linearize.load(tmp_path / "out", base=base).model
    same_tensors(tiny.kernel_tensors(again), kernels)
    assert again.lm_head.weight.dtype == dtype
    assert torch.equal(tiny.logits(again, IDS), tiny.logits(fresh.model, IDS))


def test_the_dtype_of_loading_leaves_kernels_in_full(tmp_path: Path) -> None:
    fresh = tiny.converted("oal+window")
    for kind in ("whole", "adapter"):
        linearize.save(fresh, tmp_path / kind, kind == "adapter")
    whole = linearize.load(tmp_path / "whole", dtype=torch.bfloat16, device="cpu").model
    assert whole.lm_head.weight.dtype == torch.bfloat16
    same_tensors(tiny.kernel_tensors(whole), tiny.kernel_tensors(fresh.model))
    base = half_base(tmp_path / "base", torch.bfloat16)
    adapted = linearize.load(tmp_path / "adapter", base=base).model
    assert torch.equal(tiny.logits(whole, IDS), tiny.logits(adapted, IDS))


@each_variant
@pytest.mark.parametrize("adapter_only", [False, True])
def test_trained_kernels_are_saved(variant: str, adapter_only: bool, tmp_path: Path) -> None:
    """One optimizer step on the kernels alone: changed from their start, bitwise equal on disk."""
    fresh = tiny.converted(variant)
    start = tiny.kernel_tensors(fresh.model)
    trainable = [p for n, p in fresh.model.named_parameters() if "linear_attention" in n]
    if not trainable:
        assert variant in ("softmax", "softmax+sinks+window", "performer", "based")
        return
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    fresh.model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    trained = tiny.kernel_tensors(fresh.model)
    assert any(not torch.equal(trained[name], start[name]) for name in start)
    linearize.save(fresh, tmp_path / "out", adapter_only)
    again = linearize.load(tmp_path / "out", base=tiny.loaded() if adapter_only else None)
    same_tensors(tiny.kernel_tensors(again.model), trained)


def test_saving_again_changes_nothing(tmp_path: Path) -> None:
    linearize.save(tiny.converted("oal+window"), tmp_path / "a")
    linearize.save(linearize.load(tmp_path / "a"), tmp_path / "b")
    same_tensors(
        load_file(tmp_path / "a" / "model.safetensors"),
        load_file(tmp_path / "b" / "model.safetensors"),
    )
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in "ab"]
    assert configs[0] == configs[1]


def test_the_folder_is_an_ordinary_one(tmp_path: Path) -> None:
    """transformers itself reads it, and sees the softmax model that was converted."""
    linearize.save(tiny.converted("oal"), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["LlamaForCausalLM"]
    section = config.linearize
    assert section["plan"]["kernel"] == "oal"
    assert section["plan"]["seed"] == 42
    assert section["versions"]["torch"] == torch.__version__
    assert sorted(section["layers"]) == ["0", "1", "2"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(tiny.logits(plain, IDS), tiny.logits(tiny.model(), IDS), torch.float32, "output")


def test_an_adapter_holds_the_kernels_and_nothing_else(tmp_path: Path) -> None:
    fresh = tiny.converted("oal")
    linearize.save(fresh, tmp_path / "out", adapter_only=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([ADAPTER, KERNELS])
    same_tensors(load_file(tmp_path / "out" / KERNELS), tiny.kernel_tensors(fresh.model))


def test_report_and_tokenizer_are_stored_beside_the_weights(tmp_path: Path) -> None:
    loaded = Loaded(tiny.model(), tiny.tokenizer(bos=True))
    conversion = linearize.convert(loaded, tiny.text(), tiny.plan(layers="1"))
    linearize.save(conversion.loaded, tmp_path / "out", report=conversion.report)
    stored = json.loads((tmp_path / "out" / REPORT).read_text())
    assert stored == json.loads(json.dumps(conversion.report.as_dict()))
    again = linearize.load(tmp_path / "out")
    assert again.tokenizer("ab")["input_ids"] == [1, 67, 68]
    linearize.save(tiny.converted("oal"), tmp_path / "bare")
    assert linearize.load(tmp_path / "bare").tokenizer is None


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """A Llama as llama.cpp writes it: fp32, with the rows of q and k (and of no other) permuted."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(tiny.HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<pad>", "<s>", *(chr(33 + i) for i in range(94)), "Ġ", "Ċ", "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 97)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for full_name, tensor in model.state_dict().items():
        array, name = tensor.numpy(), full_name.removesuffix(".weight")
        if name in names:
            target = names[name]
        else:
            _, _, index, part = name.split(".", 3)
            target = f"blk.{index}.{parts[part]}"
            if parts[part] in heads:
                halves = array.reshape(heads[parts[part]], 2, tiny.HEAD_DIM // 2, -1)
                array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{target}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_gguf_and_safetensors_give_equal_logits_before_and_after(
    kv_heads: int, tmp_path: Path
) -> None:
    original = tiny.model(num_key_value_heads=kv_heads)
    original.save_pretrained(tmp_path / "folder")
    tiny.tokenizer().save_pretrained(tmp_path / "folder")
    write_gguf(original, tmp_path / "model.gguf")
    loaded = [linearize.load(tmp_path / name) for name in ("model.gguf", "folder")]
    wanted = tiny.logits(original, IDS)
    for one in loaded:
        assert {p.dtype for p in one.model.parameters()} == {torch.float32}
        assert_close(tiny.logits(one.model, IDS), wanted, torch.float32, "output")
    converted = [linearize.convert(one, tiny.text(), tiny.plan()).loaded for one in loaded]
    after = [tiny.logits(one.model, IDS) for one in converted]
    assert_close(after[0], after[1], torch.float32, "output")
    assert float((after[0] - wanted).abs().max()) > 0.01
    linearize.save(converted[0], tmp_path / "saved")
    again = linearize.load(tmp_path / "saved").model
    assert torch.equal(tiny.logits(again, IDS), after[0])
    linearize.save(converted[0], tmp_path / "adapter", adapter_only=True)
    assert torch.equal(tiny.logits(linearize.load(tmp_path / "adapter").model, IDS), after[0])


# Refusals


def adapter(folder: Path, variant: str = "oal", **changes: Any) -> Path:
    linearize.save(tiny.converted(variant, **changes), folder, adapter_only=True)
    return folder


@pytest.mark.parametrize(
    ("changes", "mentions"),
    [
        ({"num_key_value_heads": 6}, "kv_heads=6"),
        ({"num_attention_heads": 12, "head_dim": 8}, "query_heads=12"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"num_hidden_layers": 2}, "layer 2"),
    ],
)
def test_another_base_is_refused(changes: dict[str, Any], mentions: str, tmp_path: Path) -> None:
    folder, base = adapter(tmp_path / "out"), tiny.loaded(**changes)
    before = tiny.logits(base.model, IDS)
    with pytest.raises(CheckpointError) as raised:
        linearize.load(folder, base=base)
    assert str(folder) in str(raised.value)
    assert mentions in str(raised.value)
    assert converted_layers(base.model) == {}
    assert torch.equal(tiny.logits(base.model, IDS), before)


def test_a_converted_base_is_refused(tmp_path: Path) -> None:
    folder, base = adapter(tmp_path / "out"), tiny.converted("global")
    before = tiny.logits(base.model, IDS)
    with pytest.raises(CheckpointError, match="converted already"):
        linearize.load(folder, base=base)
    assert torch.equal(tiny.logits(base.model, IDS), before)


def test_kernels_of_other_group_settings_are_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "two", groups=2)
    other = adapter(tmp_path / "four", groups=4)
    shutil.copy(other / KERNELS, folder / KERNELS)
    with pytest.raises(CheckpointError) as raised:
        linearize.load(folder, base=tiny.loaded())
    assert "0.kernel.factor" in str(raised.value)
    assert "(6, 3, 3)" in str(raised.value)
    assert "(6, 5, 5)" in str(raised.value)


def test_kernels_of_another_kind_are_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "plain")
    other = adapter(tmp_path / "window", "oal+hybrid")
    shutil.copy(other / KERNELS, folder / KERNELS)
    with pytest.raises(CheckpointError, match=r"0\.(center|gain)"):
        linearize.load(folder, base=tiny.loaded())


@pytest.mark.parametrize("missing", [True, False])
def test_missing_and_unknown_tensors_are_named(missing: bool, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "out")
    tensors = load_file(folder / KERNELS)
    if missing:
        del tensors["1.kernel.groups"]
    else:
        tensors["9.kernel.groups"] = torch.zeros(1)
    save_file(tensors, folder / KERNELS)
    base = tiny.loaded()
    with pytest.raises(CheckpointError, match=r"1\.kernel\.groups" if missing else "9.kernel"):
        linearize.load(folder, base=base)
    assert converted_layers(base.model) == {}


def test_an_adapter_without_a_named_base_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="base="):
        linearize.load(adapter(tmp_path / "out"))


def test_an_adapter_whose_base_is_gone_names_it(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "out")
    section = json.loads((folder / ADAPTER).read_text())
    (folder / ADAPTER).write_text(json.dumps(section | {"base": "/no/such/base"}))
    with pytest.raises(LinearizeError, match="/no/such/base"):
        linearize.load(folder)


@pytest.mark.parametrize("tensor", ["factor", "groups"])
@pytest.mark.parametrize("kind", ["missing", "unknown", "another shape"])
def test_a_whole_folder_with_other_kernels_is_refused(
    tensor: str, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    linearize.save(tiny.converted("oal"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.self_attn.linear_attention.kernel.{tensor}"
    if kind == "missing":
        del tensors[name]
    elif kind == "unknown":
        tensors[name + "_too"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:5].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as raised:
        linearize.load(folder)
    assert name in str(raised.value)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _gone(path: Path) -> None:
    path.unlink()


def _list(path: Path) -> None:
    path.write_text("[1, 2]")


@pytest.mark.parametrize("damage", [_truncated, _noise, _empty, _gone, _list])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_damaged_folder_is_refused(
    damage: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    if damage is _gone and file == "tokenizer_config.json":
        damage = _list  # a folder without it has no tokenizer, which is allowed
    fresh = tiny.converted("oal")
    linearize.save(Loaded(fresh.model, tiny.tokenizer(), fresh.plan), tmp_path / "out")
    damage(tmp_path / "out" / file)
    with pytest.raises(LinearizeError) as raised:
        linearize.load(tmp_path / "out")
    assert str(tmp_path / "out") in str(raised.value)


@pytest.mark.parametrize("damage", [_truncated, _noise, _empty, _gone, _list])
@pytest.mark.parametrize("file", [ADAPTER, KERNELS])
def test_a_damaged_adapter_is_refused(
    damage: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    folder, base = adapter(tmp_path / "out"), tiny.loaded()
    damage(folder / file)
    with pytest.raises(LinearizeError) as raised:
        linearize.load(folder, base=base)
    assert str(folder) in str(raised.value)
    assert converted_layers(base.model) == {}


def _without(*path: str) -> Callable[[dict[str, Any]], Any]:
    def change(section: dict[str, Any]) -> Any:
        place = section
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        return section

    return change


def _with(value: Any, *path: str) -> Callable[[dict[str, Any]], Any]:
    def change(section: dict[str, Any]) -> Any:
        place = section
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return section

    return change


@pytest.mark.parametrize(
    "change",
    [
        _without("plan"),
        _without("layers"),
        _without("layers", "1", "name"),
        _without("layers", "1", "shape"),
        _without("layers", "1", "shape", "scale"),
        _without("layers", "1", "kernel"),
        _with("oak", "plan", "kernel"),
        _with(3, "plan", "from_the_future"),
        _with([1], "layers"),
        _with("x", "layers"),
        _with({"x": {}}, "layers"),
        _with(3, "layers", "1"),
        _with(7, "layers", "1", "kernel", "unknown"),
        lambda section: [section],
        lambda section: "converted",
    ],
)
@pytest.mark.parametrize("adapter_only", [False, True])
def test_a_linearize_section_that_cannot_be_read_is_refused(
    change: Callable[[dict[str, Any]], Any], adapter_only: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    linearize.save(tiny.converted("oal"), folder, adapter_only)
    file = folder / (ADAPTER if adapter_only else "config.json")
    content = json.loads(file.read_text())
    changed = change(content if adapter_only else content["linearize"])
    file.write_text(json.dumps(changed if adapter_only else content | {"linearize": changed}))
    with pytest.raises(CheckpointError) as raised:
        linearize.load(folder, base=tiny.loaded() if adapter_only else None)
    assert str(folder) in str(raised.value)


def test_a_layer_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    linearize.save(tiny.converted("oal"), folder)
    content = json.loads((folder / "config.json").read_text())
    content["linearize"]["layers"]["1"]["name"] = "model.layers.7.self_attn"
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as raised:
        linearize.load(folder)
    assert str(folder) in str(raised.value)


def test_an_unconverted_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Convert it first"):
        linearize.save(tiny.loaded(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# The output folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def occupied(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "precious.txt").write_text("keep me")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("adapter_only", [False, True])
def test_an_occupied_folder_is_left_alone(adapter_only: bool, occupied: Path) -> None:
    before = contents(occupied.parent)
    with pytest.raises(OutputError) as raised:
        linearize.save(tiny.shared(), occupied, adapter_only)
    assert str(occupied) in str(raised.value)
    assert "--overwrite" in str(raised.value)
    assert contents(occupied.parent) == before


@pytest.mark.parametrize("adapter_only", [False, True])
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_halfway_leaves_the_old_folder(
    adapter_only: bool, problem: BaseException, occupied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny.converted("oal")

    def fail(*args: Any, **kwargs: Any) -> None:
        target = args[1] if adapter_only else args[0]
        (Path(target) if not adapter_only else Path(target).parent).joinpath("half").touch()
        raise problem

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    monkeypatch.setattr(loaded.model, "save_pretrained", fail)
    before = contents(occupied.parent)
    error = OutputError if isinstance(problem, OSError) else KeyboardInterrupt
    with pytest.raises(error):
        linearize.save(loaded, occupied, adapter_only, overwrite=True)
    assert contents(occupied.parent) == before
    assert [p.name for p in occupied.parent.iterdir()] == ["out"]


def test_overwriting_replaces_the_whole_folder(occupied: Path) -> None:
    loaded = tiny.shared()
    linearize.save(loaded, occupied, overwrite=True)
    assert not (occupied / "deep").exists()
    assert [p.name for p in occupied.parent.iterdir()] == ["out"]
    again = linearize.load(occupied).model
    assert torch.equal(tiny.logits(again, IDS), tiny.logits(loaded.model, IDS))


def test_an_empty_folder_and_a_new_path_are_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        linearize.save(tiny.shared(), folder, adapter_only=True)
        assert (folder / KERNELS).is_file()


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match="a file of that name"):
        linearize.save(tiny.shared(), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_text() == "a file"
