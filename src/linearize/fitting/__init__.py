"""Fitting kernel parameters to the outputs of pretrained softmax attention."""

from linearize.fitting.data import Activations, Calibration, FitResult, softmax_outputs
from linearize.fitting.match import match_outputs
from linearize.fitting.moments import Moments
from linearize.fitting.solve import fit_factor

__all__ = [
    "Activations",
    "Calibration",
    "FitResult",
    "Moments",
    "fit_factor",
    "match_outputs",
    "softmax_outputs",
]
