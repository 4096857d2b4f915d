"""linearize: softmax attention of pretrained causal language models in linear time."""

from linearize import evaluate, kernels, ops
from linearize.adapt import Adaptation, AdaptSettings, adapt
from linearize.checkpoint import load, save
from linearize.convert import Conversion, convert
from linearize.errors import LinearizeError
from linearize.models import Loaded
from linearize.plan import Plan

__all__ = [
    "AdaptSettings",
    "Adaptation",
    "Conversion",
    "LinearizeError",
    "Loaded",
    "Plan",
    "adapt",
    "convert",
    "evaluate",
    "kernels",
    "load",
    "ops",
    "save",
]
