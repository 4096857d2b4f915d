"""The plan is validated before anything runs, says what is wrong, and survives JSON unchanged."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linearize import LinearizeError, Plan
from linearize.errors import PlanError
from linearize.plan import parse_layers


def test_defaults_are_the_papers_settings() -> None:
    plan = Plan()
    assert (plan.kernel, plan.window, plan.sinks, plan.center) == ("oal", 0, 0, False)
    assert (plan.alpha, plan.gamma, plan.tau) == (0.25, 0.9, 1.5)
    assert (plan.min_groups, plan.bootstrap, plan.prompts) == (2, 1000, 40)
    assert (plan.block, plan.skip_blocks, plan.fit_blocks, plan.validation_blocks) == (
        4096,
        16,
        8,
        2,
    )
    assert (plan.eps, plan.seed, plan.solver) == (1e-6, 42, "moments")


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3-26", list(range(3, 27))),
        ("4,12,20", [4, 12, 20]),
        ("20, 4 ,12", [4, 12, 20]),
        ("0-2,5", [0, 1, 2, 5]),
        ("1-3,2-4,3", [1, 2, 3, 4]),
        ("7", [7]),
    ],
)
def test_layers_are_read_in_every_form(text: str, layers: list[int]) -> None:
    assert parse_layers(text, None) == layers
    assert Plan(layers=text).layer_indices(30) == layers
    assert Plan(layers=layers[::-1] + layers).layer_indices(30) == layers


@pytest.mark.parametrize(
    ("count", "middle"),
    [
        (1, [0]),
        (2, [0, 1]),
        (3, [1]),
        (12, list(range(1, 11))),
        (30, list(range(3, 27))),
    ],
)
def test_middle_leaves_a_tenth_at_each_end(count: int, middle: list[int]) -> None:
    assert Plan(layers="middle").layer_indices(count) == middle
    assert Plan(layers="all").layer_indices(count) == list(range(count))


@pytest.mark.parametrize(
    "text", ["", "a", "3-", "-3", "3--5", "1,,2", "1.5", "3-x", "all,2", "0x2"]
)
def test_layers_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(PlanError) as raised:
        Plan(layers=text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("layers", "outside"),
    [
        ("0-30", "30"),
        ([30], "30"),
        ([-1, 2], "-1"),
        ("3-99", "99"),
        ([], "empty"),
        ("5-3", "empty"),
    ],
)
def test_layers_outside_the_model_are_named(layers: Any, outside: str) -> None:
    with pytest.raises(PlanError) as raised:
        Plan(layers=layers).layer_indices(30)
    assert outside in str(raised.value)
    assert "0-29" in str(raised.value)
    assert raised.value.remedy.endswith("3-26.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", -1),
        ("sinks", -1),
        ("window", 1.5),
        ("saturation", 0),
        ("alpha", 0),
        ("alpha", 1.1),
        ("gamma", -0.1),
        ("gamma", 1.1),
        ("tau", 0),
        ("min_groups", 0),
        ("bootstrap", 0),
        ("groups", 0),
        ("prompts", 0),
        ("prompt_length", 1),
        ("block", 1),
        ("skip_blocks", -1),
        ("fit_blocks", 0),
        ("validation_blocks", 0),
        ("positions", 0),
        ("solver", "sgd"),
        ("eps", 0),
        ("eps", "small"),
        ("seed", None),
        ("options", [1]),
        ("kernel", 3),
        ("layers", 3),
        ("layers", None),
        ("layers", (1, "x")),
        ("layers", (0.5,)),
        ("widnow", 3),
        ("keep", "0"),
        ("keep", "100%"),
        ("keep", "ten"),
        ("heads", "some"),
        ("state_rank", 0),
        ("fitting", "both"),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(PlanError) as raised:
        Plan(**{name: value})
    assert name in str(raised.value)
    assert repr(value) in str(raised.value) or str(value) in str(raised.value)
    assert raised.value.remedy


def test_a_group_budget_below_the_minimum_contradicts_itself() -> None:
    with pytest.raises(PlanError, match="groups=2 is below min_groups=3"):
        Plan(groups=2, min_groups=3)
    assert Plan(groups=1).groups == 1  # the learned global


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"layers": "auto"}, "need one of keep, max_kl and memory_budget"),
        ({"heads": "auto", "keep": 2, "max_kl": 0.1}, "keep, max_kl given"),
        ({"keep": 2}, "keep is for"),
        ({"state_rank": 8, "state_budget": 1000}, "exclude each other"),
        ({"saturation": 512}, "sinks and window are 0"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(PlanError, match=found):
        Plan(**settings)


def test_a_plan_cannot_be_changed() -> None:
    plan = Plan()
    with pytest.raises((LinearizeError, ValueError, TypeError)):
        plan.window = 3  # type: ignore[misc]
    assert plan.window == 0


@given(
    st.builds(
        dict,
        layers=st.one_of(
            st.sampled_from(["all", "middle", "3-26", "1,2"]),
            st.lists(st.integers(0, 40), min_size=1),
        ),
        window=st.integers(0, 2**20),
        sinks=st.integers(0, 64),
        center=st.booleans(),
        alpha=st.floats(0.01, 1),
        tau=st.floats(0.1, 10),
        eps=st.floats(1e-12, 1),
        seed=st.integers(-(2**40), 2**40),
        groups=st.none() | st.integers(2, 64),
        options=st.dictionaries(st.text(), st.integers() | st.booleans() | st.text()),
    )
)
def test_json_keeps_the_plan(values: dict[str, Any]) -> None:
    plan = Plan(**values)
    again = Plan(**json.loads(json.dumps(plan.model_dump(mode="json"))))
    assert again == plan
    assert again.layer_indices(41) == plan.layer_indices(41)
