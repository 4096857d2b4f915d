"""Output matching by gradient steps: the paper's recipe, for any kernel with parameters.

Adam on the error of the normalised outputs at random causal query positions of one sequence per
step, best validation kept (OAL paper, appendix C; SPEC section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from linearize.errors import ModelError
from linearize.fitting.data import Calibration, FitResult, sample_positions, softmax_outputs
from linearize.ops.features import KernelMap
from linearize.ops.pairwise import attend
from linearize.schedule import cosine

__all__ = ["Objective", "match_outputs"]

Objective = Callable[[KernelMap, int, Tensor], Tensor]
"""Another loss to descend: (kernel map, fitting block, query positions) -> ``[Hq]``."""

STEPS = 1000
LEARNING_RATE = 0.02
POSITIONS = 32
VALIDATE_EVERY = 100
PATIENCE = 400
CLIP = 10.0
CHECKED = 512  # positions per block on which checkpoints are compared
GAINS = tuple(range(-12, 25, 3))  # where the gain beside exact keys may start
GAIN_POSITIONS = 128
GAIN_BLOCKS = 2


class Trainable(Protocol):
    """A kernel or a converted layer: a module that gives its kernel map."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""
        ...

    def map(self) -> KernelMap:
        """The kernel map for the current parameters."""
        ...


def match_outputs(
    kernel: Trainable,
    calibration: Calibration,
    *,
    steps: int = STEPS,
    learning_rate: float | Callable[[nn.Parameter], float] = LEARNING_RATE,
    decay: bool = False,
    positions: int = POSITIONS,
    validate_every: int = VALIDATE_EVERY,
    patience: int = PATIENCE,
    clip: float = CLIP,
    head_wise: bool = True,
    start: str = "initial",
    objective: Objective | None = None,
) -> tuple[FitResult, Tensor]:
    """Train the kernel's parameters in place and leave the checkpoint that validates best.

    Beside exact keys the size of a kernel's weights matters, and most kernels leave it open. Their
    gain starts, head by head, at the best of a coarse grid; steps alone would not get it there.

    Args:
        kernel: owner of the parameters; ``map()`` gives the kernel map for their current values.
        calibration: frozen activations of one layer.
        head_wise: every parameter leads with the query head or the KV head, so the best checkpoint
            is kept for each of these on its own; otherwise one checkpoint is kept for all.
        steps, learning_rate, positions, validate_every, patience, clip: the recipe's numbers; a
            function gives every parameter a rate of its own.
        decay: let the rates rise for a twentieth of the steps and fall to zero along a cosine.
        objective: descend this loss instead of the output error, which still selects the
            checkpoint; the result's curve is then that of the objective.

    Returns:
        the result and the best validation error of every head, ``[Hq]``.

    Raises:
        ModelError: the loss is not finite.
    """
    plan = calibration.plan
    generator = calibration.generator(1)
    parameters = [p for p in kernel.parameters() if p.requires_grad]
    parameters += calibration.parameters
    rate = learning_rate if callable(learning_rate) else lambda _: learning_rate
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate(p)} for p in parameters])
    schedule = LambdaLR(optimizer, lambda done: _share(done, steps) if decay else 1.0)
    units = min(len(p) for p in parameters) if head_wise else 1
    data, blocks = calibration.fit, len(calibration.fit)
    tokens = data.q.shape[2]
    check_at = sample_positions(tokens, CHECKED, calibration.generator(2))

    def errors(validation: bool, block: int, at: Tensor) -> Tensor:
        source = calibration.validation if validation else data
        seen = calibration.kernel_validation if validation else calibration.kernel_fit
        target = softmax_outputs(source, calibration.scale, block, at)
        output = attend_at(
            calibration.view(kernel.map()), source.k, seen.k, source.q, source.v, block, at
        )
        return (output - target).square().mean((1, 2))

    def attend_at(
        current: KernelMap,
        k: Tensor,
        kernel_k: Tensor,
        q: Tensor,
        v: Tensor,
        block: int,
        at: Tensor,
    ) -> Tensor:
        return attend(
            current,
            q[block : block + 1, :, at],
            k[block : block + 1],
            v[block : block + 1],
            scale=calibration.scale,
            sinks=plan.sinks,
            window=plan.window,
            saturation=plan.saturation,
            query_at=at,
            kernel_k=kernel_k[block : block + 1],
        )[0]

    def validate() -> Tensor:
        with torch.no_grad():
            each = [errors(True, b, check_at) for b in range(len(calibration.validation))]
        return torch.stack(each).mean(0)

    @torch.no_grad()
    def start_gains() -> None:
        at = sample_positions(tokens, GAIN_POSITIONS, calibration.generator(3))
        for gain in calibration.parameters:
            found = []
            for value in GAINS:
                gain.fill_(value)
                each = [errors(False, b, at) for b in range(min(GAIN_BLOCKS, blocks))]
                found.append(torch.stack(each).mean(0))
            gain.copy_(torch.tensor(GAINS, device=gain.device)[torch.stack(found).argmin(0)])

    start_gains()
    best = validate()
    kept = [p.detach().clone() for p in parameters]
    curve, last_gain = [], 0
    for step in range(1, steps + 1):
        block = int(torch.randint(blocks, (), generator=generator))
        at = sample_positions(tokens, positions, generator)
        if objective is None:
            each = errors(False, block, at)
        else:
            each = objective(calibration.view(kernel.map()), block, at)
        loss = each.sum() if head_wise else each.mean()
        if not bool(loss.isfinite()):
            raise ModelError(
                f"fitting layer {calibration.layer}",
                f"a loss of {float(loss.detach())} at step {step}",
                "Check the model's activations for NaN, or lower the learning rate.",
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        schedule.step()
        curve.append(float(each.detach().mean()))
        if step % validate_every and step != steps:
            continue
        now = validate()
        better = _units(now, units) < _units(best, units)
        if bool(better.any()):
            last_gain = step
        best = torch.where(better.repeat_interleave(len(now) // units), now, best)
        for keep, parameter in zip(kept, parameters, strict=True):
            taken = better.repeat_interleave(len(keep) // units) if head_wise else better
            shape = (-1,) + (1,) * (keep.ndim - 1)
            keep.copy_(torch.where(taken.view(shape), parameter.detach(), keep))
        if step - last_gain >= patience:
            break
    with torch.no_grad():
        for keep, parameter in zip(kept, parameters, strict=True):
            parameter.copy_(keep)
        kept_error = torch.stack([errors(False, b, check_at) for b in range(blocks)]).mean(0)
    return FitResult(kept_error.tolist(), [start] * len(best), curve), best


def _units(errors: Tensor, units: int) -> Tensor:
    """Errors of the query heads ``[Hq]`` as those of ``units`` that share parameters."""
    return errors.unflatten(0, (units, -1)).mean(1)


def _share(done: int, steps: int) -> float:
    """Share of the peak learning rate after so many steps."""
    return min(1.0, 20 * (done + 1) / steps) * cosine(done, steps)
