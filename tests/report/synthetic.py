"""A small account of a conversion, made up."""

from typing import Any

from linearize.convert import ConversionReport, LayerReport
from linearize.plan import Plan

DIM = 8


def layer(index: int, groups: list[list[list[int]]], **changes: Any) -> LayerReport:
    """Two heads; the profile of head h ascends with the dimension, times h + 1."""
    values: dict[str, Any] = {
        "layer": index,
        "groups": groups,
        "profile": [[0.01 * (head + 1) * 2**r for r in range(DIM)] for head in range(2)],
        "fit_mse": [0.00125, 0.00375],
        "validation_mse": [0.002, 0.004],
        "validation_relative": [0.1234, 0.4321],
        "start": ["taylor", "global"],
        "curve": [0.5, 0.1],
        "trainable": 12,
        "state_bytes": 1000,
        "seconds": 1.5,
    }
    return LayerReport(**values | changes)


def conversion(**changes: Any) -> ConversionReport:
    """Layers 1 and 2 of 4; head 1 of layer 2 has most groups."""
    two = [[0, 1, 2, 3, 4, 5, 6], [7]]
    three = [[0, 1, 2, 3, 4], [5, 6], [7]]
    values: dict[str, Any] = {
        "plan": Plan(layers="1-2", sinks=3, window=17, saturation=99, seed=12345).model_dump(
            mode="json"
        ),
        "base": "some/model",
        "layers": [layer(1, [two, two]), layer(2, [two, three])],
        "tokens": 54321,
        "fit_blocks": [16, 17, 19],
        "validation_blocks": [24],
        "model_layers": 4,
        "cache_bytes_per_token": 96,
        "seconds": 77.0,
        "versions": {"torch": "9.8.7", "linearize": "0.0.1"},
    }
    return ConversionReport(**values | changes)


def evaluation(**changes: Any) -> dict[str, Any]:
    """What ``linearize eval`` stores."""
    one = {"value": 0.0, "targets": 2046, "blocks": 2, "block": 1024, "per_block": [2.0, 2.2]}
    values: dict[str, Any] = {
        "model": "out",
        "text": ["test.txt"],
        "block": 1024,
        "blocks": 2,
        "batch": 1,
        "targets": 2046,
        "perplexity": 12.3456,
        "softmax_perplexity": 10.9876,
        "ratio": 12.3456 / 10.9876,
        "details": {"model": one | {"nll": 2.5133}, "softmax": one | {"nll": 2.3968}},
        "seconds": 3.0,
        "versions": {},
    }
    return values | changes


def sample(**changes: Any) -> dict[str, Any]:
    """What ``linearize generate --compare`` stores."""
    values: dict[str, Any] = {
        "prompt": "Once upon",
        "settings": "max_new_tokens=4",
        "note": None,
        "softmax": {"text": " a time"},
        "converted": {"text": " a hill"},
    }
    return values | changes
