"""Evaluation of any model, converted or not."""

from linearize.evaluate.fidelity import fidelity
from linearize.evaluate.fidelity_result import Errors, Fidelity, KernelFidelity
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
