"""Post-RoPE queries, keys and values of a model, layer by layer, in bounded memory.

Every block runs through the model in a thread of its own that stops at each chosen attention layer.
When all blocks have arrived, the layer's activations are handed out; when the consumer asks for the
next layer, the forward passes go on. So each block passes through the model once, only one layer's
activations exist at a time, and no knowledge of the architecture is needed. One thread runs at a time.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.errors import LinearizeError, ModelError
from linearize.fitting import Activations
from linearize.interface import recording, use_interface

__all__ = ["LayerCapture", "capture"]


class LayerCapture:
    """One layer's activations of all blocks, waiting for the consumer.

    Attributes:
        index: zero-based layer.
        activations: ``q, k, v`` per group of equally long blocks, in the given order.
    """

    def __init__(self, index: int, passes: list[_Pass]) -> None:
        self.index = index
        self._passes = passes

    def activations(self, start: int, stop: int) -> Activations:
        """Blocks ``start … stop-1`` (of one length) as one batch, in fp32 on the CPU."""
        parts = [p.arrived for p in self._passes[start:stop]]
        q, k, v = (torch.cat([part[i] for part in parts]).float().cpu() for i in range(3))
        return Activations(q, k, v)

    @torch.no_grad()
    def replace(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Let all blocks go on with the output of ``attention(q, k, v)``, ``[1, Hq, N, dv]``."""
        for each in self._passes:
            each.replacement = attention(*each.arrived)


def capture(
    model: PreTrainedModel, blocks: Sequence[Tensor], layers: Sequence[int]
) -> Iterator[LayerCapture]:
    """Stream the activations of ``layers`` (ascending) over all ``blocks``.

    Args:
        model: any supported model; its own attention stays in place.
        blocks: token ids ``[n]`` each; lengths may differ.
        layers: zero-based layer indices.

    Raises:
        ModelError: an activation is NaN or infinite, or the model fails.
    """
    training = model.training
    model.eval()
    with use_interface(model):
        passes = [_Pass(model, block, frozenset(layers)) for block in blocks]
        try:
            for index in sorted(layers):
                for number, each in enumerate(passes):
                    each.advance()
                    if not all(bool(x.isfinite().all()) for x in each.arrived):
                        raise ModelError(
                            f"activations of layer {index} on block {number}",
                            "NaN or infinite queries, keys or values",
                            "Check the weights, or load the model in a wider dtype.",
                        )
                _give_memory_back()
                yield LayerCapture(index, passes)
        finally:
            for each in passes:
                each.abandon()
            model.train(training)


def _give_memory_back() -> None:
    """Return freed memory to the system, where the C library hoards it per thread (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class _Abandoned(BaseException):
    """Ends a forward pass that nobody waits for any more."""


class _Pass:
    """One forward pass that stops at chosen layers."""

    def __init__(self, model: PreTrainedModel, block: Tensor, layers: frozenset[int]) -> None:
        self.arrived: tuple[Tensor, Tensor, Tensor]
        self.replacement: Tensor | None = None
        self._model, self._block, self._layers = model, block, layers
        self._go: SimpleQueue[bool] = SimpleQueue()
        self._report: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = False

    def advance(self) -> None:
        """Run to the next chosen layer."""
        if not self._started:
            self._started = True
            self._thread.start()
        else:
            self._go.put(True)
        problem = self._report.get()
        if isinstance(problem, Exception) and not isinstance(problem, LinearizeError):
            raise ModelError(
                f"running the model on {len(self._block)} tokens",
                f"{type(problem).__name__}: {problem}",
                "Check that the token ids belong to this model, and that it runs on them by itself.",
            ) from problem
        if problem is not None:
            raise problem

    def abandon(self) -> None:
        """Stop wherever it waits."""
        if self._started and self._thread.is_alive():
            self._go.put(False)
            self._thread.join()
        self.__dict__.pop("arrived", None)

    def _run(self) -> None:
        try:
            with torch.no_grad(), recording(self._stop_at):
                ids = self._block[None].to(self._model.device)
                self._model.base_model(input_ids=ids, use_cache=False)
        except _Abandoned:
            return
        except BaseException as error:
            self._report.put(error)

    def _stop_at(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        if getattr(module, "layer_idx", None) not in self._layers:
            return None
        self.arrived = (q, k, v)
        self._report.put(None)
        if not self._go.get():
            raise _Abandoned
        replacement, self.replacement = self.replacement, None
        del self.arrived
        return replacement
