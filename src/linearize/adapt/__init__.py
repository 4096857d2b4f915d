"""Adaptation: from a converted model to a good one, by LoRA and kernel parameters trained together."""

from linearize.adapt.data import Part, read_parts
from linearize.adapt.result import ADAPTATION, Adaptation, AdaptationReport, read_adaptation
from linearize.adapt.run import adapt
from linearize.adapt.settings import PRESETS, AdaptSettings

__all__ = [
    "ADAPTATION",
    "PRESETS",
    "AdaptSettings",
    "Adaptation",
    "AdaptationReport",
    "Part",
    "adapt",
    "read_adaptation",
    "read_parts",
]
