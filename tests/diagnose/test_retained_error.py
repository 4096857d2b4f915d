"""The retained-error protocol: what is averaged when, what is random, and that no work is lost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from linearize import Plan
from linearize.diagnose import RetainedError, retained_error
from linearize.diagnose.data import generator
from linearize.diagnose.hybrid import full_errors, hybrid_errors, sample
from linearize.diagnose.retained_result import p_value, summarise
from linearize.errors import CheckpointError, PlanError, TextError
from linearize.fitting import Activations
from linearize.grouping import bootstrap_groups, contributions
from linearize.kernels import HeadShape, get
from linearize.text import divide, split_blocks

SHAPE = HeadShape(tiny.HEADS, tiny.KV_HEADS, tiny.HEAD_DIM, tiny.HEAD_DIM, tiny.HEAD_DIM**-0.5)
KERNELS = ("performer", "taylorshift")


def plan(**changes: Any) -> Plan:
    return tiny.plan(**{"layers": (0, 2), "skip_blocks": 3, "fit_blocks": 2} | changes)


def measure(**options: Any) -> RetainedError:
    settings: dict[str, Any] = {"plan": plan(), "kernels": KERNELS, "seeds": (0, 1)}
    settings |= {"positions": 6, "controls": 20} | options
    return retained_error(tiny.loaded(), tiny.text(), **settings)


def without_time(result: RetainedError) -> str:
    """Everything a result holds but its time, exact to the last bit."""
    value = asdict(result)
    del value["seconds"]
    return json.dumps(value)


def activations(layer: int, blocks: list[torch.Tensor]) -> Activations:
    seen = [tiny.recorded(tiny.model(), block)[layer] for block in blocks]
    return Activations(*(torch.cat([one[i] for one in seen]) for i in range(3)))


@torch.no_grad()
def test_ratios_by_hand() -> None:
    """Mean over seeds, then the ratio of every layer and sequence, then their mean."""
    found = measure(controls=0)
    ratios: dict[str, list[float]] = {name: [] for name in KERNELS}
    for layer, selection in zip((0, 2), found.selections, strict=True):
        prompts = activations(layer, divide(tiny.text(), plan()).prompts)
        profile = contributions(prompts.q, prompts.k, SHAPE.scale)
        # the source of a conversion's grouping: Calibration.generator(3) with the plan's seed 42
        source = torch.Generator().manual_seed((42 * 1_000_003 + layer) * 101 + 3)
        options = plan().model_dump(include={"alpha", "gamma", "tau", "min_groups", "bootstrap"})
        selected = bootstrap_groups(profile, generator=source, **options) > 0
        assert selection.layer == layer
        assert selection.pretrained == [row.nonzero().flatten().tolist() for row in selected]
        blocks = activations(layer, split_blocks(tiny.text(), 64)[:3])
        data = sample(blocks, SHAPE.scale, 6, generator(42, layer, "at"))
        for name in KERNELS:
            seeds = (0, 1) if name == "performer" else (0,)
            made = [get(name).build(SHAPE, {"seed": 1000 * seed + layer}) for seed in seeds]
            hybrid, full = (
                torch.stack([each.mean(1) for each in errors]).mean(0)
                for errors in (
                    [hybrid_errors(kernel, data, selected) for kernel in made],
                    [full_errors(kernel, data) for kernel in made],
                )
            )
            ratios[name] += (hybrid / full).tolist()
    for kernel in found.kernels:
        assert kernel.ratio == pytest.approx(sum(ratios[kernel.kernel]) / 6, rel=1e-6)
        assert kernel.seeds == ([0, 1] if kernel.kernel == "performer" else [0])
        assert kernel.controls is None
    count = sum(len(head) for one in found.selections for head in one.pretrained)
    assert found.share == pytest.approx(count / (2 * tiny.HEADS * tiny.HEAD_DIM))


def test_seeds_are_averaged_before_the_ratio_and_controls_share_its_denominator() -> None:
    selected, full = torch.tensor([[1.0, 3.0]]).double(), torch.tensor([[2.0, 12.0]]).double()
    drawn = torch.tensor(
        [[[1.0, 3.0], [2.0, 12.0], [0.2, 1.2]]]
    ).double()  # [layers, replicates, B]
    found = summarise(
        "performer", [0], [7], {"pretrained": (selected, full), "gaussian": (full, full)}, drawn
    )
    assert (found.ratio, found.gaussian) == (0.375, 1.0)
    assert found.controls is not None
    assert found.controls.ratios == pytest.approx([0.375, 1.0, 0.1])
    assert (found.controls.reached, found.controls.p) == (2, 3 / 4)
    assert found.layers[0].p == 3 / 4 and found.layers[0].layer == 7


def test_p_counts_replicates_that_reach_the_observed_value() -> None:
    replicates = torch.arange(1000) / 1000
    assert p_value(2.0, replicates) == (0, 1 / 1001)
    assert p_value(0.0, replicates) == (1000, 1.0)
    assert p_value(0.995, replicates.double()) == (5, 6 / 1001)


def test_the_gaussian_control_is_a_function_of_the_seed_alone() -> None:
    first, again = measure(controls=0), measure(controls=0, kernels=("taylorshift",))
    other = measure(controls=0, kernels=("taylorshift",), plan=plan(seed=1))
    assert first.kernels[1] == again.kernels[0]
    assert first.kernels[1].gaussian != other.kernels[0].gaussian
    # it is independent of the model's queries and keys, though not of its values
    assert first.selections[0].gaussian != first.selections[0].pretrained


def test_random_subsets_of_a_flat_head_are_like_its_selection() -> None:
    """On Gaussian-like random models nothing stands out: p is not small."""
    found = measure(kernels=("taylorshift",), controls=50)
    (kernel,) = found.kernels
    assert kernel.controls is not None and len(kernel.controls.ratios) == 50
    assert min(kernel.controls.ratios) > 0
    assert kernel.controls.largest == max(kernel.controls.ratios)
    assert 1 / 51 <= kernel.controls.p <= 1


def test_an_interrupted_run_goes_on_to_the_same_result(tmp_path: Path) -> None:
    whole = measure(store=tmp_path / "whole")
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    parts = {"performer": ("pretrained", "gaussian", "controls-seed0", "controls-seed1")}
    parts["taylorshift"] = ("pretrained", "gaussian", "controls-seed0")
    assert names == sorted(
        f"{kernel}-layer{layer}-{part}.json"
        for kernel, own in parts.items()
        for layer in (0, 2)
        for part in own
    )

    class Interrupted(Exception):
        pass

    def stop(done: int, total: int, message: str) -> None:
        if done == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        measure(store=tmp_path / "parts", progress=stop)
    kept = sorted(file.name for file in (tmp_path / "parts").iterdir())
    assert len(kept) == 5
    stamps = {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in kept}
    assert without_time(measure(store=tmp_path / "parts")) == without_time(whole)
    assert stamps == {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in kept}
    # all parts there: the model is not run at all
    messages: list[tuple[int, int, str]] = []
    again = measure(store=tmp_path / "parts", progress=lambda *step: messages.append(step))
    assert without_time(again) == without_time(whole)
    assert [(done, total) for done, total, _ in messages] == [(14, 14)]


def test_threads_do_not_change_the_result() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(measure(kernels=("dijiang",), seeds=(0,)))
    finally:
        torch.set_num_threads(before)
    first, second = (each.kernels[0].controls for each in results)
    assert first is not None and second is not None
    assert first.ratios == pytest.approx(second.ratios, rel=1e-4)


def test_parts_of_other_settings_are_refused(tmp_path: Path) -> None:
    measure(store=tmp_path, controls=0)
    for changes, found in (
        ({"positions": 5}, "query_positions=6"),
        ({"plan": plan(seed=3)}, "seed=42"),
        ({"fitted": True}, "fitted=False"),
    ):
        with pytest.raises(CheckpointError, match=found):
            measure(store=tmp_path, controls=0, **changes)
    (damaged,) = tmp_path.glob("performer-layer0-gaussian.json")
    damaged.write_text("{")
    with pytest.raises(CheckpointError, match="Delete this file"):
        measure(store=tmp_path, controls=0)


def test_more_kernels_and_layers_join_the_parts_that_are_there(tmp_path: Path) -> None:
    first = measure(store=tmp_path, kernels=("taylorshift",), plan=plan(layers=(0,)))
    both = measure(store=tmp_path, kernels=("taylorshift", "dijiang"))
    assert both.kernels[0].layers[0] == first.kernels[0].layers[0]


def test_fitting_first_improves_the_kernel_and_leaves_the_selection() -> None:
    options: dict[str, Any] = {"kernels": ("oal",), "seeds": (0,), "controls": 0}
    drawn, fitted = measure(**options), measure(**options, fitted=True)
    assert fitted.fitted and not drawn.fitted
    assert fitted.kernels[0].layers[0].full_mse < drawn.kernels[0].layers[0].full_mse
    assert fitted.selections == drawn.selections


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(PlanError, match="a kernel without error"):
        measure(kernels=("softmax",))
    with pytest.raises(PlanError, match="performer"):
        measure(kernels=("performers",))
    with pytest.raises(PlanError, match="no kernel or no seed"):
        measure(kernels=())
    with pytest.raises(PlanError, match="skip_blocks=0"):
        measure(plan=plan(skip_blocks=0))
    with pytest.raises(TextError, match="480 too few"):
        retained_error(tiny.loaded(), tiny.text(800), plan(skip_blocks=16))
