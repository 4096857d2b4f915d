"""Evaluation of any model, converted or not."""

from linearize.evaluate.perplexity import Perplexity, perplexity, sequence_nll

__all__ = ["Perplexity", "perplexity", "sequence_nll"]
