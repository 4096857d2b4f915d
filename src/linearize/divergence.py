"""How far a model with some heads converted predicts from the original: on text, and on repeated text.

Few tokens of a text need what was read long ago, so a model that has lost the heads that look things up
is hardly further from the original on it. On text that is read a second time nearly every token can be
looked up, and the difference shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from linearize.attention import LinearAttention
from linearize.interface import use_interface
from linearize.replay import decoder_layers, replaying

__all__ = ["Divergence", "Heads", "Samples", "measuring", "remaining"]

TOKENS = 2048  # of text, from the beginnings of
BLOCKS = 4  # blocks at most
REPEATED = 1024  # tokens that are read twice, from the ends of blocks, at most half of each
STRIDE = 4  # every fourth position is compared

Heads = dict[int, tuple[int, ...]]  # layer -> KV heads


class Divergence(NamedTuple):
    """``KL(original ‖ converted)`` of the predictions, nats per token.

    Attributes:
        text: on text. recall: on the second reading of repeated text.
    """

    text: float
    recall: float


@dataclass(frozen=True)
class Samples:
    """What predictions are compared on.

    Attributes:
        text: token ids. repeated: token ids whose second half is their first again; only the
            predictions of that half count.
    """

    text: list[Tensor]
    repeated: list[Tensor]

    @staticmethod
    def of(blocks: Sequence[Tensor]) -> Samples:
        """``TOKENS`` from the beginnings of the first ``BLOCKS``; ``REPEATED`` from the ends of as few
        as give so many, twice: the further apart the readings, the better."""
        beginnings = [block[: TOKENS // min(BLOCKS, len(blocks))] for block in blocks[:BLOCKS]]
        length = min(REPEATED, len(blocks[0]) // 2)
        ends = [block[-length:] for block in blocks[: REPEATED // length]]
        return Samples(beginnings, [torch.cat((end, end)) for end in ends])


@contextmanager
def measuring(
    model: PreTrainedModel,
    fitted: dict[int, LinearAttention],
    names: dict[int, str],
    samples: Samples,
) -> Iterator[Callable[[Heads], Divergence]]:
    """The divergence from the original, as a function of which KV heads of the layers are exact.

    Args:
        model: the original model; afterwards it is as it was.
        fitted: the converted layers, all heads of each. names: their modules.
        samples: what to compare predictions on.
    """
    modules = {index: model.get_submodule(name) for index, name in names.items()}
    layers, numbers = decoder_layers(model, names)
    kinds = (
        [(ids, 0) for ids in samples.text],
        [(ids, len(ids) // 2) for ids in samples.repeated],
    )
    training = model.training
    model.eval()
    try:
        original = [[_predictions(model, *sample) for sample in kind] for kind in kinds]
        with use_interface(model), replaying(layers) as prepare:

            def divergence(exact: Heads) -> Divergence:
                converted = remaining(fitted, exact)
                for index, module in modules.items():
                    module.linear_attention = converted.get(index)  # type: ignore[assignment]
                states = [exact.get(number, ()) for number in numbers]
                means = []
                for kind, predictions in zip(kinds, original, strict=True):
                    total = 0.0
                    for (ids, first), wanted in zip(kind, predictions, strict=True):
                        prepare(id(ids), states)
                        found = _predictions(model, ids, first)
                        total += float(
                            kl_div(found, wanted, reduction="batchmean", log_target=True)
                        )
                    means.append(total / len(kind))
                return Divergence(*means)

            yield divergence
    finally:
        for module in modules.values():
            if hasattr(module, "linear_attention"):
                del module.linear_attention
        model.train(training)


def remaining(fitted: dict[int, LinearAttention], exact: Heads) -> dict[int, LinearAttention]:
    """The fitted layers cut to the heads that stay converted; layers without one are left out."""
    cut = {}
    for index, linear in fitted.items():
        gone = exact.get(index, ())
        heads = [h for h in range(linear.shape.kv_heads) if h not in gone]
        if heads:
            cut[index] = linear.select(heads) if gone else linear
    return cut


@torch.no_grad()
def _predictions(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """Log-probabilities at some positions from ``first`` on, ``[n, vocabulary]``; the head sees no
    others."""
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, given: (given[0][:, first::STRIDE],))
    with hook:
        logits = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)
