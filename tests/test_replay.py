"""Replayed passes give what full ones give, and compute no layer before the first changed one."""

import pytest
import torch
from torch import Tensor, nn

import tiny
from linearize.models import attention_layers
from linearize.replay import decoder_layers, replaying


class Layer(nn.Module):
    """Adds its amount and counts how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.amount, self.runs = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.amount < 0:
            raise ArithmeticError
        return x + self.amount


def stack(count: int) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(count)))


def amounts(layers: nn.Sequential) -> list[float]:
    return [layer.amount for layer in layers]


def test_only_layers_from_the_first_changed_one_on_are_computed() -> None:
    layers = stack(4)
    with replaying(list(layers)) as prepare:
        for changed in (0, 2, 3, 1, 1):
            layers[changed].amount += 1
            before = [layer.runs for layer in layers]
            prepare("x", amounts(layers))
            assert float(layers(torch.zeros(1))) == sum(amounts(layers))
            ran = [layer.runs - old for layer, old in zip(layers, before, strict=True)]
            assert ran == [int(position >= changed) for position in range(4)]


def test_what_changes_back_is_computed_again() -> None:
    layers = stack(3)
    with replaying(list(layers)) as prepare:
        for amount in (1.0, 5.0, 1.0, 7.0):
            layers[1].amount = amount
            prepare("x", amounts(layers))
            assert float(layers(torch.zeros(1))) == 2 + amount


def test_other_tokens_are_remembered_apart() -> None:
    layers = stack(3)
    with replaying(list(layers)) as prepare:
        for amount in (1.0, 4.0):
            layers[2].amount = amount
            for tokens in (10.0, 20.0):
                prepare(tokens, amounts(layers))
                assert float(layers(torch.tensor(tokens))) == tokens + 2 + amount
    assert [layer.runs for layer in layers] == [2, 2, 4]


def test_after_a_pass_that_failed_nothing_is_taken_for_known() -> None:
    layers = stack(3)
    with replaying(list(layers)) as prepare:
        layers[1].amount = -1
        prepare("x", amounts(layers))
        with pytest.raises(ArithmeticError):
            layers(torch.zeros(1))
        layers[1].amount = 1
        prepare("x", amounts(layers))
        assert float(layers(torch.zeros(1))) == 3
    assert [layer.runs for layer in layers] == [1, 2, 1]


def test_forward_is_as_it_was_afterwards() -> None:
    layers = stack(2)
    own = lambda x: x * 2  # noqa: E731  # as libraries that move modules about install it
    layers[1].forward = own
    with pytest.raises(ArithmeticError), replaying(list(layers)) as prepare:
        prepare("x", [0, 0])
        assert float(layers(torch.ones(1))) == 4
        raise ArithmeticError
    assert "forward" not in layers[0].__dict__
    assert layers[1].forward is own


@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name != "bloom"])
def test_every_architecture_is_replayed(name: str) -> None:
    """A change of the last layer needs no other, and one of the second all but the first."""
    model = tiny.model(name)
    names = {layer.index: layer.name for layer in attention_layers(model)}
    layers, numbers = decoder_layers(model, names)
    assert numbers == list(range(tiny.LAYERS))
    ids, states = tiny.prompt(1, 12), [0] * tiny.LAYERS
    seen: list[int] = []
    hooks = [
        model.get_submodule(inside).register_forward_hook(lambda *_, n=number: seen.append(n))
        for number, inside in names.items()
    ]
    with replaying(layers) as prepare:
        prepare("ids", states)
        tiny.logits(model, ids)
        for changed in (2, 1):
            with torch.no_grad():
                for parameter in layers[changed].parameters():
                    parameter.mul_(1.1)
            states[changed] += 1
            seen.clear()
            prepare("ids", states)
            replayed = tiny.logits(model, ids)
            assert seen == list(range(changed, tiny.LAYERS))
            prepare("other", states)
            assert torch.equal(tiny.logits(model, ids), replayed)
    for hook in hooks:
        hook.remove()


def test_modules_outside_a_list_have_no_layers() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert decoder_layers(model, {0: "a", 1: "b"}) == ([], [])
