"""Evaluation of any model, converted or not."""

from linearize.evaluate.fidelity import Errors, Fidelity, KernelFidelity, fidelity
from linearize.evaluate.perplexity import Perplexity, perplexity, sequence_nll

__all__ = [
    "Errors",
    "Fidelity",
    "KernelFidelity",
    "Perplexity",
    "fidelity",
    "perplexity",
    "sequence_nll",
]
