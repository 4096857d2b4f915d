"""Speed and memory, measured beside softmax in the same run."""

from linearize.bench.decode import DecodeBench, DecodePoint, decode_benchmark
from linearize.bench.model import ModelBench, ModelPoint, model_benchmark
from linearize.bench.operator import (
    Crossover,
    OperatorBench,
    OperatorRow,
    operator_benchmark,
)
from linearize.bench.target import Target, prepare

__all__ = [
    "Crossover",
    "DecodeBench",
    "DecodePoint",
    "ModelBench",
    "ModelPoint",
    "OperatorBench",
    "OperatorRow",
    "Target",
    "decode_benchmark",
    "model_benchmark",
    "operator_benchmark",
    "prepare",
]
