"""Adaptation: LoRA and kernel parameters trained together, resumable, in one process or many."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.adapt.checkpoint import CheckpointFile, RunState
from linearize.adapt.data import block_order, divide_blocks
from linearize.adapt.losses import Logits
from linearize.adapt.result import Adaptation, AdaptationReport
from linearize.adapt.scalars import Scalars
from linearize.adapt.settings import AdaptSettings
from linearize.adapt.transfer import transfer_backward
from linearize.converted import converted_layers, original_attention
from linearize.errors import ModelError, PlanError
from linearize.lora import (
    LoraSettings,
    add_lora,
    lora_layers,
    lora_tensors,
    projections,
)
from linearize.models import Loaded, vocabulary_and_width
from linearize.parts import model_identity, text_identity
from linearize.processes import Processes
from linearize.text import Source, tokenize

__all__ = ["adapt"]

Report = Callable[[int, int, str], None]  # updates done, updates in all, message
BETAS, EPS = (0.9, 0.999), 1e-8


def adapt(
    loaded: Loaded,
    text: Source,
    settings: AdaptSettings | None = None,
    *,
    validation: Source | None = None,
    teacher: Loaded | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    progress: Report | None = None,
    names: tuple[list[str], list[str]] = ([], []),
) -> Adaptation:
    """Train LoRA and kernel parameters of a model together, in place; keep the best weights.

    The backbone, the groups and all other buffers stay as they are. A model that is not converted
    is trained by the same code: the softmax reference.

    Args:
        loaded: a converted or ordinary model without LoRA.
        text: what to train on; see :func:`linearize.text.tokenize`.
        settings: the paper's by default.
        validation: what the best weights are chosen on; by default the last blocks of ``text``.
        teacher: whose distribution is followed with the share ``settings.distill`` of the loss; by
            default the model before conversion and adaptation.
        folder: where the checkpoint of the run under way is kept; ``None`` keeps none.
        resume: continue from the checkpoint in ``folder``, if there is one.
        tensorboard: write the curves to ``folder/tensorboard``, if TensorBoard is installed.
        progress: called with (updates done, updates in all, message).
        names: what training and validation text are called in the report.

    Returns:
        the adapted model and the account of the run.

    Raises:
        PlanError: nothing to train, the model has LoRA already, or the teacher has no share of the
            loss or another vocabulary. TextError: too few blocks.
        CheckpointError: the checkpoint belongs to another run. OutputError: it cannot be written.
        ModelError: a loss is not finite. BackendError: peft is needed and not installed.
    """
    settings = settings or AdaptSettings()
    model = loaded.model
    if lora_layers(model):
        raise PlanError(
            "adapting a model",
            "one that has LoRA already",
            "Fold it into the weights first: linearize merge DIR --out OTHER.",
        )
    if teacher is not None:
        _check_teacher(loaded, teacher, settings)
    tokens = tokenize(text, loaded.tokenizer)
    held = None if validation is None else tokenize(validation, loaded.tokenizer)
    train, kept = divide_blocks(tokens, held, settings)
    processes = Processes.join()
    identity = settings.identity() | {
        "model": model_identity(model),
        "teacher": None if teacher is None else model_identity(teacher.model),
        "plan": None if loaded.plan is None else loaded.plan.model_dump(mode="json"),
        "text": text_identity(torch.cat(train)),
        "validation text": text_identity(torch.cat(kept)),
        "processes": processes.count,
    }
    file = CheckpointFile(folder, identity)
    state = (file.read() if resume else None) or RunState()
    with _own_randomness(model):
        run = _Run(model, teacher, train, kept, settings, processes, file, state)
        scalars = Scalars(
            Path(folder) / "tensorboard" if tensorboard and folder and processes.main else None,
            state.step,
        )
        run.go(scalars, progress)
        scalars.close()
    curves, best = state.curves, state.curves.best
    assert best is not None
    report = AdaptationReport(
        settings=settings.model_dump(mode="json"),
        plan=identity["plan"],
        base=loaded.ref,
        text=names[0],
        validation_text=names[1],
        train_blocks=len(train),
        validation_blocks=len(kept),
        tokens=settings.total * run.tokens_per_update,
        curves=curves,
        best_step=curves.validated[best],
        best_nll=curves.nll[best],
        start_nll=curves.nll[0],
        lora_numbers=sum(p.numel() for p in run.lora.values()),
        kernel_numbers=_kernel_numbers(model) if run.kernels else 0,
        seconds=state.seconds,
        peak_memory=_peak_memory(),
        processes=processes.count,
        teacher=None if teacher is None else teacher.ref,
    )
    return Adaptation(Loaded(model.eval(), loaded.tokenizer, loaded.plan, loaded.ref), report)


class _Run:
    """One adaptation from its state to its end."""

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: Loaded | None,
        train: list[Tensor],
        kept: list[Tensor],
        settings: AdaptSettings,
        processes: Processes,
        file: CheckpointFile,
        state: RunState,
    ) -> None:
        self.model, self.settings, self.processes = model, settings, processes
        self._train, self._kept, self._file, self.state = train, kept, file, state
        self.lora, self.kernels = _prepare(model, settings)
        self._named = self.lora | self.kernels
        self._passes = settings.accumulate * processes.count  # forward passes of an update
        self.tokens_per_update = self._passes * settings.batch * settings.block
        self._order = block_order(
            len(train), settings.seed, settings.total * self._passes * settings.batch
        )
        self._logits = Logits(model)
        self._teacher = None
        if teacher is not None:
            self._teacher = Logits(nn.Module.to(teacher.model, model.device).eval())
        if state.step or state.curves.nll:
            _put(self._named, state.weights)
        self._stage = -1
        self._optimizer: torch.optim.AdamW | None = None
        self._saved = time.monotonic()
        self._clock = time.monotonic()

    def go(self, scalars: Scalars, progress: Report | None) -> None:
        """Run to the end; the model then has the best weights."""
        state, total = self.state, self.settings.total
        while True:
            if self._due(state.step):
                nll = self._validate()
                state.curves.validated.append(state.step)
                state.curves.nll.append(nll)
                if state.curves.best == len(state.curves.nll) - 1:
                    state.best = _copy(self._named)
                scalars.write(state.step, validation_nll=nll)
                self._save()
                if progress is not None and self.processes.main:
                    progress(state.step, total, f"validation perplexity {_perplexity(nll)}")
            if state.step == total:
                break
            self._update()
            state.step += 1
            curves = state.curves
            scalars.write(
                state.step,
                loss=curves.loss[-1],
                learning_rate=curves.lr[-1],
                gradient_norm=curves.gradient_norm[-1],
                tokens_per_second=curves.tokens_per_second[-1],
            )
            if progress is not None and self.processes.main:
                progress(state.step, total, self._message())
            if time.monotonic() - self._saved >= self.settings.checkpoint_seconds:
                self._save()
        _put(self._named, state.best)

    def _due(self, step: int) -> bool:
        """Whether a validation is missing at this step."""
        if step in self.state.curves.validated:
            return False
        own = step - self.settings.transfer_steps
        regular = own >= 0 and own % self.settings.eval_every == 0
        return step in (0, self.settings.total) or regular

    def _update(self) -> None:
        """One optimizer step: the mean gradient over the passes of all processes."""
        started = time.monotonic()
        settings, step = self.settings, self.state.step
        transfer = step < settings.transfer_steps
        optimizer = self._optimizer_of(0 if transfer else 1)
        factor = settings.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.zero_grad(set_to_none=True)
        self.model.train()
        loss = torch.zeros(())
        first = step * self._passes
        for number in self.processes.share(range(first, first + self._passes)):
            ids = self._batch(number)
            torch.manual_seed(settings.seed * 1_000_003 + number)  # dropout
            with self._autocast():
                if transfer:
                    loss += transfer_backward(self.model, ids, 1 / self._passes)
                else:
                    value = self._loss(ids)
                    loss += float(value.detach())
            if not transfer:
                (value / self._passes).backward()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.add_up([*(p.grad for p in trained if p.grad is not None), loss])
        norm = float(nn.utils.clip_grad_norm_(trained, settings.clip))
        mean = float(loss) / self._passes
        self._check(mean, norm)
        optimizer.step()
        curves = self.state.curves
        curves.loss.append(mean)
        curves.lr.append(float(optimizer.param_groups[0]["lr"]))
        curves.gradient_norm.append(norm)
        curves.tokens_per_second.append(self.tokens_per_update / (time.monotonic() - started))

    def _loss(self, ids: Tensor) -> Tensor:
        share = self.settings.distill
        followed = self._followed(ids) if share > 0 else None
        hidden = self._logits.hidden(ids)
        return self._logits.loss(hidden, ids, followed, share, self._teacher)

    @torch.no_grad()
    def _followed(self, ids: Tensor) -> Tensor:
        """Hidden states of the teacher: a model of its own, or this one as it was."""
        if self._teacher is not None:
            return self._teacher.hidden(ids)
        self.model.eval()
        with original_attention(self.model):
            found = self._logits.hidden(ids)
        self.model.train()
        return found

    def _batch(self, number: int) -> Tensor:
        """The blocks of a forward pass, counted over the whole run and all processes."""
        size = self.settings.batch
        chosen = self._order[number * size : (number + 1) * size]
        return torch.stack([self._train[block] for block in chosen]).to(self.model.device)

    def _validate(self) -> float:
        """Mean negative log-likelihood in nats over the validation blocks."""
        self.model.eval()
        found = []
        with torch.no_grad(), self._autocast():
            for block in self.processes.share(self._kept):
                ids = block[None].to(self.model.device)
                found.append(float(self._logits.nll(self._logits.hidden(ids), ids)))
        values = self.processes.gather(found)
        nll = sum(values) / len(values)
        if not math.isfinite(nll):
            raise self._not_finite(f"a validation likelihood of {nll} after", self.state.step)
        return nll

    def _optimizer_of(self, stage: int) -> torch.optim.AdamW:
        """AdamW of a stage (0 transfer, 1 joint), new at the stage's first update."""
        if self._optimizer is not None and self._stage == stage:
            return self._optimizer
        settings, step = self.settings, self.state.step
        kernel_lr = settings.transfer_lr if stage == 0 else settings.kernel_lr or settings.lr
        groups: list[dict[str, Any]] = [
            {"params": list(self.kernels.values()), "peak": kernel_lr},
        ]
        if stage == 1:
            groups.insert(0, {"params": list(self.lora.values()), "peak": settings.lr})
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=BETAS,
            eps=EPS,
            weight_decay=settings.weight_decay,
        )
        first = 0 if stage == 0 else settings.transfer_steps
        if step > first:
            optimizer.load_state_dict(self.state.optimizer)
        self._stage, self._optimizer = stage, optimizer
        return optimizer

    def _save(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self._clock
        self._clock = self._saved = now
        self.state.weights = _copy(self._named)
        if self._optimizer is not None:
            self.state.optimizer = self._optimizer.state_dict()
        if self.processes.main:
            self._file.write(self.state)

    def _check(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            wrong = f"a loss of {loss}" if not math.isfinite(loss) else f"a gradient norm of {norm}"
            raise self._not_finite(f"{wrong} in", self.state.step + 1)

    def _not_finite(self, what: str, step: int) -> ModelError:
        path = self._file.path
        kept = f"The last good checkpoint is kept in {path}; " if path and path.is_file() else ""
        return ModelError(
            "a finite loss",
            f"{what} update {step} of {self.settings.total}",
            f"{kept}use a lower --lr, --kernel-lr or --clip, or --dtype fp32.",
        )

    def _message(self) -> str:
        curves = self.state.curves
        return f"loss {curves.loss[-1]:.4f}, {curves.tokens_per_second[-1]:.0f} tokens/s"

    def _autocast(self) -> torch.autocast:
        device = self.model.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.settings.dtype == "bf16")


def _check_teacher(loaded: Loaded, teacher: Loaded, settings: AdaptSettings) -> None:
    """Refuse a teacher that would not be asked, or speaks of other tokens.

    Raises:
        PlanError: see there.
    """
    if not settings.distill:
        raise PlanError(
            f"the teacher {teacher.ref}",
            "distill=0, by which it would have no share of the loss",
            "Give it one, for example distill=0.5.",
        )
    both = loaded, teacher
    ours, theirs = (vocabulary_and_width(one.model)[0] for one in both)
    words = [one.tokenizer.get_vocab() for one in both if one.tokenizer is not None]
    if ours != theirs or words[1:] != words[:-1]:
        raise PlanError(
            f"the teacher {teacher.ref} for {loaded.ref}",
            f"another vocabulary (of {theirs:,} and {ours:,} tokens)",
            "Choose a teacher with the same tokenizer.",
        )


def _prepare(
    model: PreTrainedModel, settings: AdaptSettings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add LoRA, freeze everything, and free what is trained: LoRA and kernel tensors by name.

    Raises:
        PlanError: nothing would be trained.
    """
    layers = converted_layers(model)
    kernels: dict[str, Tensor] = {
        f"{index}.{name}": tensor
        for index, linear in sorted(layers.items())
        for name, tensor in linear.named_parameters()
        if settings.train_kernels
    }
    if settings.transfer_steps and not kernels:
        raise PlanError(
            f"{settings.transfer_steps} updates of attention transfer",
            "no kernel parameter to train",
            "Convert the model with a kernel that has parameters, or leave --transfer-steps out.",
        )
    if not kernels and not settings.rank:
        raise PlanError(
            "an adaptation with rank 0",
            "no kernel parameter to train",
            "Choose a rank above zero, or a converted model whose kernel has parameters.",
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if settings.rank:
        torch.manual_seed(settings.seed)
        targets = tuple(projections(model))
        add_lora(model, LoraSettings(settings.rank, settings.alpha, settings.dropout, targets))
    for tensor in kernels.values():
        tensor.requires_grad_(True)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return lora_tensors(model), kernels


@contextmanager
def _own_randomness(model: PreTrainedModel) -> Iterator[None]:
    """Leave the caller's random state as it was, and the model without checkpointing."""
    devices = [model.device] if model.device.type == "cuda" else []
    checkpointing = model.is_activation_checkpointing
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            if not checkpointing and model.is_activation_checkpointing:
                model.activation_checkpointing_disable()


def _kernel_numbers(model: PreTrainedModel) -> int:
    """Numbers of all converted layers that are trained, the padding of kernels left out."""
    count = 0
    for linear in converted_layers(model).values():
        others = (p for name, p in linear.named_parameters() if not name.startswith("kernel."))
        count += linear.kernel.trainable_numbers + sum(p.numel() for p in others)
    return count


@torch.no_grad()
def _put(there: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in there.items():
        tensor.copy_(values[name])


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _perplexity(nll: float) -> str:
    return f"{math.exp(min(nll, 700.0)):.3f}"
