"""An adaptation trains LoRA and kernels and nothing else, and does the same whenever it is repeated."""

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adaptation
import linearize
import tiny
from adaptation import adapt, curves, model, settings, trained
from linearize import AdaptSettings, Loaded
from linearize.adapt.checkpoint import FILE, CheckpointFile
from linearize.converted import converted_layers, original_attention
from linearize.errors import (
    CheckpointError,
    LinearizeError,
    ModelError,
    OutputError,
    PlanError,
    TextError,
)
from linearize.lora import lora_layers, lora_tensors, without_lora
from tolerances import assert_close

IDS = tiny.prompt(2, 13)


def backbone(of: Loaded) -> dict[str, Tensor]:
    """Everything but LoRA and kernels."""
    with without_lora(of.model):
        found = of.model.state_dict()
        return {k: v.clone() for k, v in found.items() if ".linear_attention." not in k}


def last(folder: Path) -> Any:
    """The state in the checkpoint of a folder."""
    return torch.load(folder / FILE, weights_only=True)["state"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(value, b[name]) for name, value in a.items())


def test_lora_and_kernels_move_groups_and_backbone_stay() -> None:
    loaded = tiny.filled(
        tiny.loaded(), tiny.plan(kernel="oal", sinks=1, window=3, center=True), seed=5
    )
    before, kernels = backbone(loaded), tiny.kernel_tensors(loaded.model)
    result = linearize.adapt(loaded, tiny.text(), settings(eval_every=1, steps=3))
    assert result.report.best_step > 0
    assert same(before, backbone(result.loaded))
    after = tiny.kernel_tensors(result.loaded.model)
    for name, value in kernels.items():
        moved = not torch.equal(value, after[name])
        assert moved == name.endswith(("factor", "gain", "center")), name
    assert all(bool(value.any()) for value in lora_tensors(loaded.model).values())
    layers = lora_layers(loaded.model)
    assert len(layers) == 4 * tiny.LAYERS
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("kind", adaptation.KINDS)
def test_the_validation_falls_and_the_best_weights_are_kept(kind: str) -> None:
    """A long and too fast run gets worse in the end; what is kept is the best it was."""
    result = adapt(kind, steps=14, lr=0.05, dropout=0.0, distill=0.5)
    report = result.report
    assert report.best_nll == min(report.curves.nll) < report.start_nll
    assert report.best_step == report.curves.validated[report.curves.nll.index(report.best_nll)]
    kept = torch.stack(list(tiny.text()[: 25 * 32].view(-1, 32)[-3:]))
    logits = tiny.logits(result.loaded.model, kept)
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), kept[:, 1:].flatten())
    assert float(nll) == pytest.approx(report.best_nll, rel=1e-2)  # validated under bf16
    assert (report.plan is None) == (kind == "softmax")
    assert (report.kernel_numbers == 0) == (kind == "softmax")
    assert report.tokens == 14 * 2 * 32
    assert not result.loaded.model.training


def test_repeated_it_is_bitwise_the_same_and_the_callers_randomness_is_untouched() -> None:
    torch.manual_seed(1)
    first = adapt()
    drawn = torch.rand(3)
    torch.manual_seed(99)
    again = adapt()
    assert curves(first) == curves(again)
    assert same(trained(first.loaded), trained(again.loaded))
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    other = adapt(seed=43)
    assert curves(other)["loss"] != curves(first)["loss"]


def test_a_learning_rate_of_its_own_and_none_for_the_kernels(tmp_path: Path) -> None:
    start = trained(model())
    frozen = adapt(train_kernels=False, options={"folder": tmp_path / "frozen"})
    assert frozen.report.kernel_numbers == 0
    for name, value in tiny.kernel_tensors(frozen.loaded.model).items():
        assert torch.equal(value, start[name]), name
    moved = {}
    for lr in (0.02, 0.002):
        adapt(kernel_lr=lr, steps=1, clip=1e9, weight_decay=0.0, options={"folder": tmp_path})
        weights = last(tmp_path)["weights"]
        moved[lr] = float((weights["1.kernel.factor"] - start["1.kernel.factor"]).abs().max())
    assert moved[0.02] == pytest.approx(10 * moved[0.002], rel=1e-3)  # Adam's first step is lr


def test_without_lora_only_the_kernels_are_trained_towards_the_original_model() -> None:
    """One training block; the loss is the divergence that it is defined to be, and falls."""
    loaded = model()
    before = backbone(loaded)
    text = tiny.text(4 * 32)
    block = text[None, :32]
    with original_attention(loaded.model):
        wanted = tiny.logits(loaded.model, block).log_softmax(-1)[0, :-1]
    found = tiny.logits(loaded.model, block).log_softmax(-1)[0, :-1]
    divergence = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    result = linearize.adapt(
        loaded, text, settings(rank=0, distill=1.0, steps=12, batch=1, warmup=0.0, dtype="fp32")
    )
    losses = result.report.curves.loss
    assert losses[0] == pytest.approx(divergence, rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]
    assert not lora_layers(loaded.model)
    assert result.report.lora_numbers == 0
    assert same(before, backbone(loaded))


def test_another_model_can_be_the_teacher(tmp_path: Path) -> None:
    """The loss is the divergence from the teacher's distribution, and the teacher stays as it is."""
    loaded, teacher = model(), tiny.loaded(seed=3)
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    text = tiny.text(4 * 32)
    block = text[None, :32]
    wanted, found = (
        tiny.logits(one.model, block).log_softmax(-1)[0, :-1] for one in (teacher, loaded)
    )
    divergence = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    chosen = settings(distill=1.0, steps=12, batch=1, warmup=0.0, dropout=0.0, dtype="fp32")
    result = linearize.adapt(loaded, text, chosen, teacher=teacher, folder=tmp_path)
    losses = result.report.curves.loss
    assert losses[0] == pytest.approx(divergence, rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]
    assert same(before, dict(teacher.model.state_dict()))
    for other in (None, tiny.loaded(seed=4)):
        with pytest.raises(CheckpointError, match="teacher"):
            linearize.adapt(model(), text, chosen, teacher=other, folder=tmp_path, resume=True)


def test_a_teacher_that_cannot_teach_is_refused() -> None:
    with pytest.raises(PlanError, match="distill=0"):
        linearize.adapt(model(), tiny.text(), settings(), teacher=tiny.loaded(seed=3))
    wide = tiny.loaded(vocab_size=tiny.VOCAB + 1)
    with pytest.raises(PlanError, match="another vocabulary"):
        linearize.adapt(model(), tiny.text(), settings(distill=0.5), teacher=wide)


def test_attention_transfer_lowers_the_error_of_the_outputs() -> None:
    loaded = model("hedgehog")
    before = backbone(loaded)
    result = linearize.adapt(
        loaded,
        tiny.text(4 * 32),  # one training block
        settings(steps=0, transfer_steps=12, transfer_lr=0.02, batch=1, eval_every=1),
    )
    losses = result.report.curves.loss
    assert 0 < losses[-1] < 0.8 * losses[0]
    assert same(before, backbone(loaded))
    assert all(not bool(b.any()) for n, b in lora_tensors(loaded.model).items() if n[-1] == "B")
    assert result.report.curves.validated == [0, 12]


@pytest.mark.parametrize("variant", ["taylorshift", "oal in some heads"])
def test_transfer_gives_the_gradients_of_the_definition(variant: str) -> None:
    """Layer by layer inside one pass, against all layers' errors on the original activations."""
    from linearize.adapt.transfer import transfer_backward

    loaded = tiny.converted(variant) if variant in tiny.MIXED else model(variant)
    ids = tiny.prompt(2, 20)
    found = transfer_backward(loaded.model, ids, 0.5)
    layers = converted_layers(loaded.model)
    got = {i: [p.grad.clone() for p in linear.parameters()] for i, linear in layers.items()}
    loaded.model.zero_grad()
    with original_attention(loaded.model):
        seen = [tiny.recorded(loaded.model, row) for row in ids]
    total = torch.zeros(())
    for index, linear in layers.items():
        q, k, v = (torch.cat([one[index][i] for one in seen]) for i in range(3))
        ratio = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(ratio, 1).transpose(2, 3) * linear.kernel.shape.scale
        scores = scores.masked_fill(torch.ones(20, 20).tril() == 0, -torch.inf)
        target = scores.softmax(-1) @ v.repeat_interleave(ratio, 1)
        served = linear.heads or range(tiny.KV_HEADS)
        target = target[:, [head * ratio + i for head in served for i in range(ratio)]]
        output = linear(*linear.served(q, k, v), backend="pairwise")[0]
        total = total + (output - target).square().sum() / target.square().sum() / len(layers)
    assert found == pytest.approx(float(total.detach()), rel=1e-4)
    (0.5 * total).backward()
    for index, linear in layers.items():
        for parameter, one in zip(linear.parameters(), got[index], strict=True):
            assert parameter.grad is not None
            assert_close(one, parameter.grad, torch.float32, "gradient")


def test_gradient_checkpointing_changes_nothing_but_memory() -> None:
    plain, saving = adapt(dtype="fp32"), adapt(dtype="fp32", gradient_checkpointing=True)
    assert curves(plain)["loss"] == pytest.approx(curves(saving)["loss"], rel=1e-6)
    assert not saving.loaded.model.is_activation_checkpointing


def test_autocast_leaves_kernels_and_state_in_fp32() -> None:
    loaded = model()
    linear = converted_layers(loaded.model)[1]
    seen: list[Any] = []
    linear.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        loaded.model(input_ids=IDS, use_cache=True)
    (_, _, v), (output, state) = seen[0]
    assert v.dtype == output.dtype == torch.bfloat16
    assert state.sums.dtype == torch.float32
    result = adapt(dtype="bf16")
    assert {value.dtype for value in lora_tensors(result.loaded.model).values()} == {torch.float32}
    assert all(
        p.dtype == torch.float32
        for linear in converted_layers(result.loaded.model).values()
        for p in linear.parameters()
    )
    exact = adapt(dtype="fp32")
    assert curves(result)["loss"] == pytest.approx(curves(exact)["loss"], rel=2e-2)


def test_a_half_precision_base_is_trained_in_full_precision() -> None:
    loaded = tiny.loaded()
    half = Loaded(loaded.model.to(torch.bfloat16), None)
    result = linearize.adapt(half, tiny.text(), settings(eval_every=1))
    assert {value.dtype for value in lora_tensors(half.model).values()} == {torch.float32}
    assert {p.dtype for n, p in half.model.named_parameters() if "lora_" not in n} == {
        torch.bfloat16
    }
    assert result.report.best_step > 0


# Interruptions


MOMENTS = [("update", 1), ("update", 4), ("write", 3), ("renamed", 2), ("write", 0)]
LONG: dict[str, Any] = {"transfer_steps": 2, "steps": 4, "accumulate": 2}


@pytest.fixture(scope="module")
def whole() -> linearize.Adaptation:
    """Two updates of transfer and four of the rest, with dropout, in one go."""
    return adapt(**LONG)


@pytest.mark.parametrize(("moment", "step"), MOMENTS)
def test_killed_and_resumed_it_ends_bitwise_as_if_nothing_had_happened(
    moment: str, step: int, tmp_path: Path, whole: linearize.Adaptation
) -> None:
    """In the forward pass of an update, with a checkpoint half written, and just after a write."""
    process = adaptation.start(adaptation.killed, tmp_path, moment, step, LONG)
    process.join(120)
    assert process.exitcode == -9
    result = adapt(options={"folder": tmp_path, "resume": True}, **LONG)
    assert curves(result) == curves(whole)
    assert same(trained(result.loaded), trained(whole.loaded))


def test_a_finished_run_resumed_only_takes_its_best_weights(tmp_path: Path) -> None:
    first = adapt(options={"folder": tmp_path})
    again = adapt(options={"folder": tmp_path, "resume": True})
    assert curves(first) == curves(again)
    assert same(trained(first.loaded), trained(again.loaded))


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    adapt(options={"folder": tmp_path}, steps=2)
    options = {"folder": tmp_path, "resume": True}
    for changes, name in (
        ({"lr": 0.01}, "lr="),
        ({"steps": 5}, "steps="),
        ({"seed": 1}, "seed="),
        ({"kind": "global"}, "model="),
        ({"kind": "softmax"}, "model="),
    ):
        with pytest.raises(CheckpointError, match=name):
            adapt(options=options, **{"steps": 2} | changes)
    with pytest.raises(CheckpointError, match="text="):
        linearize.adapt(model(), tiny.text(seed=9), settings(steps=2), folder=tmp_path, resume=True)
    other = tiny.filled(tiny.loaded(), tiny.plan(kernel="oal", tau=1.7))
    with pytest.raises(CheckpointError, match=r"plan=.*tau"):
        linearize.adapt(other, tiny.text(), settings(steps=2), folder=tmp_path, resume=True)
    adapt(options=options, steps=2, checkpoint_seconds=5)  # this one may change


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    adapt(options={"folder": tmp_path}, steps=1)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=FILE):
        adapt(options={"folder": tmp_path, "resume": True}, steps=1)


def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, sync = CheckpointFile.write, os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def later(file: CheckpointFile, state: Any) -> None:
        monkeypatch.setattr(os, "fsync", full if state.step == 3 else sync)
        write(file, state)

    monkeypatch.setattr(CheckpointFile, "write", later)
    with pytest.raises(OutputError, match=r"No space left.*last good checkpoint is kept"):
        adapt(options={"folder": tmp_path})
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    result = adapt(options={"folder": tmp_path, "resume": True})
    assert curves(result) == curves(adapt())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="checkpoint"):
        adapt(options={"folder": tmp_path / "file" / "run"})


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_with_the_step(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = linearize.adapt.__globals__["_Run"]
    inner = run._loss

    def broken(self: Any, ids: Tensor) -> Tensor:
        value: Tensor = inner(self, ids)
        if self.state.step < 3:
            return value
        return value * math.nan if where == "loss" else value + (value - value.detach()) * math.inf

    monkeypatch.setattr(run, "_loss", broken)
    with pytest.raises(ModelError, match=r"nan in update 4 of 6.*last good checkpoint is kept"):
        adapt(options={"folder": tmp_path})
    monkeypatch.undo()
    assert last(tmp_path)["step"] == 3
    assert all(bool(value.isfinite().all()) for value in last(tmp_path)["weights"].values())
    assert curves(adapt(options={"folder": tmp_path, "resume": True})) == curves(adapt())


# What cannot be done


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0"):
        adapt("softmax", rank=0)
    with pytest.raises(PlanError, match="rank 0"):
        adapt("performer", rank=0)
    with pytest.raises(PlanError, match="rank 0"):
        adapt("oal", rank=0, train_kernels=False)
    with pytest.raises(PlanError, match="transfer"):
        adapt("softmax", transfer_steps=2)


def test_an_adapted_model_is_not_adapted_twice() -> None:
    once = adapt(steps=1).loaded
    with pytest.raises(PlanError, match=r"LoRA already.*linearize merge"):
        linearize.adapt(once, tiny.text(), settings())


def test_too_little_text_is_counted() -> None:
    with pytest.raises(TextError, match=r"3 kept for validation; found 3 blocks"):
        linearize.adapt(model(), tiny.text(3 * 32), settings())
    with pytest.raises(TextError, match=r"20 skipped.*found 10 blocks"):
        linearize.adapt(model(), tiny.text(10 * 32), settings(skip_blocks=20))
    with pytest.raises(TextError, match=r"3 blocks of 32 tokens"):
        linearize.adapt(model(), tiny.text(), settings(), validation=tiny.text(70))


def test_settings_are_validated_by_name() -> None:
    for changes in ({"lr": -1}, {"dropout": 1.0}, {"distill": 1.5}, {"dtype": "fp8"}, {"lrr": 1}):
        with pytest.raises(PlanError, match=next(iter(changes))):
            AdaptSettings(**changes)
    with pytest.raises(PlanError, match=r"preset 'large'.*paper, small"):
        AdaptSettings.preset("large")


def test_every_error_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LinearizeError):
        adapt("softmax", rank=0, options={"folder": tmp_path / "run"})
    assert not (tmp_path / "run").exists()


# Several processes


def test_two_processes_do_what_one_does_with_twice_the_accumulation(tmp_path: Path) -> None:
    changes = {"steps": 4, "transfer_steps": 2, "dtype": "fp32"}
    both = adaptation.many(adaptation.shared_adaptation, 2, tmp_path, changes | {"accumulate": 2})
    alone = adapt(**changes, accumulate=4)
    wanted, weights = curves(alone), trained(alone.loaded)
    for found, tensors, count in both:
        assert count == 2
        assert found["validated"] == wanted["validated"]
        for name in ("loss", "lr", "gradient_norm", "nll"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
        for name, value in weights.items():
            assert_close(tensors[name], value, torch.float32, "gradient", name)
