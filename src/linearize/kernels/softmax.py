"""Softmax itself: the reference, behind the interface of the kernels."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from linearize.fitting import Calibration
from linearize.kernels.base import Kernel
from linearize.ops.features import Features, Weights
from linearize.ops.partial import fold_heads, unfold_heads

__all__ = ["Softmax"]

HEADROOM = 44.0  # fp32 ends at e^88; this leaves room to sum weights and even to square them


class Softmax(Kernel):
    """``κ = e^s``, ``s = q·k·scale``. No finite features give it, so its state grows: all keys.

    A layer with this kernel keeps every key in its window, and nothing ever reaches the state,
    whose single feature is zero. With a window of its own it is softmax over that and the sinks,
    what StreamingLLM (Xiao et al. 2023, section 3.2) keeps: the baseline of every hybrid. It is the
    one kernel with :attr:`exact` set.
    """

    name = "softmax"
    title = "Softmax"
    source = "Attention Is All You Need, section 3.2.1"
    exact: ClassVar[bool] = True

    @property
    def feature_count(self) -> int:
        """Zero: the state does not help, all keys and values are kept instead."""
        return 0

    def query_features(self, q: Tensor) -> Features:
        """One zero per token."""
        return Features(q.new_zeros(*q.shape[:-1], 1))

    def key_features(self, k: Tensor) -> Features:
        """One zero per token."""
        return Features(k.new_zeros(*k.shape[:-1], 1))

    def weights(self, q: Tensor, k: Tensor) -> Weights:
        """``e^s`` relative to the query's largest logit over all keys given, allowed or not.

        Which keys are allowed is not known here, hence the headroom: in fp32 a key still counts
        when its logit is 130 below that of a key which will be masked.
        """
        product = fold_heads(q * self.shape.scale, k.shape[1]) @ k.transpose(-1, -2)
        logits = unfold_heads(product, q.shape[1])
        shift = logits.detach().amax(-1, keepdim=True) - HEADROOM
        return Weights((logits - shift).exp(), shift)

    def fit(self, calibration: Calibration) -> None:
        """Nothing to learn, not even a gain: no key is left to a kernel."""
