"""The authors' coefficient file: what is written reads back as the same model."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linearize import Plan, convert
from linearize.coefficients import export_coefficients, import_coefficients
from linearize.converted import converted_layers
from linearize.errors import CheckpointError
from linearize.models import Loaded

IDS = torch.randint(0, 99, (1, 20), generator=torch.Generator().manual_seed(5))


def llama(head_dim: int = 8) -> Loaded:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    return Loaded(LlamaForCausalLM(config).eval(), None)


def converted(**changes: object) -> tuple[Loaded, Loaded]:
    original = llama()
    base = copy.deepcopy(original)
    tokens = torch.randint(0, 99, (400,), generator=torch.Generator().manual_seed(2))
    plan = Plan(layers="1-2", block=32, prompts=4, prompt_length=16, alpha=0.5, gamma=0.0, tau=1.05)
    plan = plan.model_copy(update=changes)
    return convert(base, tokens, plan).loaded, original


def test_export_then_import_gives_equal_logits(tmp_path: Path) -> None:
    made, original = converted()
    export_coefficients(made, tmp_path / "c.json")
    again = import_coefficients(original, tmp_path / "c.json")
    with torch.no_grad():
        torch.testing.assert_close(
            again.model(IDS).logits, made.model(IDS).logits, rtol=1e-5, atol=1e-5
        )


def test_the_file_has_the_authors_fields_and_their_matrix_is_the_kernel(tmp_path: Path) -> None:
    made, _ = converted()
    export_coefficients(made, tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["layer_ids_zero_based"] == [1, 2] and content["head_dim"] == 8
    kernel = converted_layers(made.model)[2].kernel
    head = content["layers"]["2"]["heads"]["3"]
    bulk, *rest = head["groups"]
    special = sorted(dim for group in rest for dim in group)
    assert sorted([*bulk, *special]) == list(range(8))
    assert head["special_dims"] == special
    q, k = torch.randn(8), torch.randn(8)
    score = torch.tensor(
        [1.0, *(float((q * k)[g].sum()) * kernel.shape.scale for g in head["groups"])]
    )
    matrix = torch.tensor(head["expanded_quadratic_matrix"])[: len(score), : len(score)]
    by_file = content["epsilon"] + score @ matrix @ score
    by_kernel = kernel.weights(q.expand(1, 6, 1, 8), k.expand(1, 2, 1, 8)).values[0, 3, 0, 0]
    torch.testing.assert_close(by_file, by_kernel, rtol=1e-4, atol=1e-6)


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    made, original = converted()
    file = tmp_path / "c.json"
    export_coefficients(made, file)
    with pytest.raises(CheckpointError, match="head_dim 8"):
        import_coefficients(llama(head_dim=16), file)
    content = json.loads(file.read_text())
    del content["layers"]["1"]["heads"]["5"]
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="layer 1"):
        import_coefficients(original, file)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"c\.json"):
        import_coefficients(original, file)


def test_what_the_file_cannot_say_is_not_written(tmp_path: Path) -> None:
    made, _ = converted(window=4)
    with pytest.raises(CheckpointError, match="exact keys"):
        export_coefficients(made, tmp_path / "c.json")
    assert not (tmp_path / "c.json").exists()
