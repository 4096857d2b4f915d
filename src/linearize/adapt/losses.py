"""Next-token loss and distillation without ever holding the logits of a whole block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

__all__ = ["ROWS", "Logits"]

ROWS = 512  # positions whose logits exist at once


class Logits:
    """The last hidden states of a model, and the way from these to logits.

    Where logits are the output projection of the base model's output and nothing else, they are
    formed for a few positions at a time; for other models the "hidden states" are the logits.

    Args:
        model: a causal language model whose output projection is not trained.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._head: Any = model.get_output_embeddings()
        self._plain = self._head is not None and self._is_plain()

    def hidden(self, ids: Tensor) -> Tensor:
        """``[B, N]`` token ids -> what :meth:`nll` and :meth:`loss` take, ``[B, N, ·]``."""
        if not self._plain:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
            return logits
        output = self._model.base_model(input_ids=ids, use_cache=False)
        states: Tensor = output.last_hidden_state
        return states

    @torch.no_grad()
    def nll(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Mean negative log-likelihood in nats of every sequence of a batch, ``[B]`` in fp64.

        The first token of a sequence has no context and is not scored.
        """
        sums = []
        for states, tokens in zip(hidden, ids, strict=True):
            total = torch.zeros((), dtype=torch.float64, device=hidden.device)
            for start in range(0, len(tokens) - 1, ROWS):
                stop = min(start + ROWS, len(tokens) - 1)
                rows = self._logits(states[start:stop])
                target = tokens[start + 1 : stop + 1]
                total += functional.cross_entropy(rows, target, reduction="sum").double()
            sums.append(total / (len(tokens) - 1))
        return torch.stack(sums)

    def loss(
        self,
        hidden: Tensor,
        ids: Tensor,
        teacher: Tensor | None,
        share: float,
        source: Logits | None = None,
    ) -> Tensor:
        """``(1 - share)`` next-token loss + ``share`` divergence from the teacher, per target.

        Args:
            hidden: of the model. ids: ``[B, N]``.
            teacher: hidden states of the teacher; needed if ``share`` is above zero. The divergence
                is that of the model's distribution from the teacher's,
                ``Σ p_teacher (log p_teacher - log p)``.
            share: between 0 and 1.
            source: what makes the teacher's logits of its states; by default the model's own head.
        """
        targets = ids[:, 1:].flatten()
        rows = hidden[:, :-1].flatten(0, 1)
        followed = None if teacher is None else teacher[:, :-1].flatten(0, 1)
        source = source or self

        def of_rows(states: Tensor, at: slice) -> Tensor:
            log = functional.log_softmax(self._logits(states), dim=-1)
            total = log.new_zeros(())
            if share < 1:
                total = (1 - share) * functional.nll_loss(log, targets[at], reduction="sum")
            if followed is not None and share > 0:
                with torch.no_grad():
                    wanted = functional.log_softmax(source._logits(followed[at]), dim=-1)
                divergence = functional.kl_div(log, wanted, reduction="sum", log_target=True)
                total = total + share * divergence
            return total

        summed: Tensor = _RowWise.apply(rows, of_rows)
        return summed / len(targets)

    def _logits(self, states: Tensor) -> Tensor:
        rows: Tensor = self._head(states) if self._plain else states
        return rows.float()

    @torch.no_grad()
    def _is_plain(self) -> bool:
        ids = torch.tensor([[0, 1]], device=self._model.device)
        training = self._model.training
        self._model.eval()
        states = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self._model(input_ids=ids, use_cache=False).logits
        self._model.train(training)
        width = getattr(self._head, "in_features", None)
        return width == states.shape[-1] and torch.equal(self._head(states), logits)


class _RowWise(torch.autograd.Function):
    """A sum over rows whose gradient is formed part by part in the forward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, of_rows: Callable[[Tensor, slice], Tensor]) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(rows) if wanted else None
        total = torch.zeros((), dtype=torch.float64, device=rows.device)
        for start in range(0, len(rows), ROWS):
            at = slice(start, start + ROWS)
            part = rows[at].detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                value = of_rows(part, at)
            if gradient is not None:
                gradient[at] = torch.autograd.grad(value, part)[0]
            total += value.detach().double()
        ctx.save_for_backward(gradient)
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = ctx.saved_tensors
        return None if gradient is None else gradient * grads[0], None
