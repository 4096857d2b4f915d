"""What a training step of a converted model costs beside the same model with softmax."""

import importlib.util
import statistics
import time

import pytest
import torch

import linearize
import tiny
from linearize import AdaptSettings
from linearize.adapt.losses import Logits
from linearize.adapt.run import _prepare
from linearize.converted import converted_layers
from linearize.models import BUNDLED
from linearize.text import default_text, tokenize

TOKENS = 2048
LIMIT = 2.5  # of the softmax model's step


@pytest.mark.slow
def test_a_step_of_a_converted_model_costs_little_more() -> None:
    """Layers 3 to 26 of the bundled model, unfitted, LoRA on all layers, bf16; processor time."""
    name = "smollm2-135m"
    if importlib.util.find_spec(BUNDLED[name]) is None:
        pytest.skip(f"needs the bundled model, package {BUNDLED[name]}")
    loaded = tiny.filled(linearize.load(name), linearize.Plan(kernel="oal", layers="3-26"))
    ids = tokenize(default_text(), loaded.tokenizer)[None, :TOKENS]
    lora, kernels = _prepare(loaded.model, AdaptSettings())
    logits, layers = Logits(loaded.model), converted_layers(loaded.model).values()
    loaded.model.train()

    def seconds(converted: bool) -> float:
        for linear in layers:
            linear.active = converted
        for tensor in (lora | kernels).values():
            tensor.grad = None
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = logits.loss(logits.hidden(ids), ids, None, 0.0)
        loss.backward()
        return time.process_time() - started

    seconds(True)  # warm-up
    pairs = [(seconds(False), seconds(True)) for _ in range(3)]
    softmax, converted = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"\nsoftmax {softmax:.1f} s, converted {converted:.1f} s: {converted / softmax:.2f} times"
    )
    assert converted < LIMIT * softmax
