"""Losses formed a few rows at a time are the losses over all logits, with their gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tiny
from linearize.adapt import losses
from linearize.adapt.losses import Logits
from tolerances import assert_close

NAMES = ["llama", "gpt2", "gemma2", "phi"]  # tied or not, a bias, soft-capped logits


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, the last one shorter."""
    monkeypatch.setattr(losses, "ROWS", 7)


def definition(logits: Tensor, ids: Tensor, teacher: Tensor, share: float) -> Tensor:
    log = logits[:, :-1].log_softmax(-1)
    wanted = teacher[:, :-1].log_softmax(-1)
    nll = -log.gather(-1, ids[:, 1:, None]).mean()
    divergence = (wanted.exp() * (wanted - log)).sum(-1).mean()
    return (1 - share) * nll + share * divergence


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_the_definition(name: str, share: float) -> None:
    model, other = tiny.model(name), tiny.model(name, seed=1)
    ids = tiny.prompt(2, 13)
    of, of_other = Logits(model), Logits(other)
    with torch.no_grad():
        teacher, wide = of_other.hidden(ids), other(input_ids=ids, use_cache=False).logits
    if of._plain:  # the head is the same projection for both, as it is when only LoRA differs
        with torch.no_grad():
            wide = model.get_output_embeddings()(teacher)
    parameter = next(
        p
        for n, p in model.named_parameters()
        if n.endswith(("o_proj.weight", "c_proj.weight", "dense.weight"))
    )
    model.requires_grad_(False)
    parameter.requires_grad_(True)
    found = of.loss(of.hidden(ids), ids, teacher, share)
    (3 * found).backward()
    gradient = parameter.grad
    parameter.grad = None
    wanted = definition(model(input_ids=ids, use_cache=False).logits, ids, wide, share)
    (3 * wanted).backward()
    assert_close(found, wanted, torch.float32, "output")
    assert gradient is not None and parameter.grad is not None
    assert_close(gradient, parameter.grad, torch.float32, "gradient")


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_has_its_own_head(name: str) -> None:
    model, other = tiny.model(name), tiny.model(name, seed=1)
    ids = tiny.prompt(2, 13)
    of, of_other = Logits(model), Logits(other)
    with torch.no_grad():
        found = of.loss(of.hidden(ids), ids, of_other.hidden(ids), 0.3, of_other)
        both = [one(input_ids=ids, use_cache=False).logits for one in (model, other)]
    assert_close(found, definition(both[0], ids, both[1], 0.3), torch.float32, "output")


@pytest.mark.parametrize("name", NAMES)
def test_likelihoods_are_those_of_all_logits(name: str) -> None:
    model, ids = tiny.model(name), tiny.prompt(3, 16)
    of = Logits(model)
    assert of._plain == (name != "gemma2")
    with torch.no_grad():
        found = of.nll(of.hidden(ids), ids)
    for row, one in zip(found, ids, strict=True):
        logits = tiny.logits(model, one[None])[0]
        wanted = functional.cross_entropy(logits[:-1].double(), one[1:])
        assert float(row) == pytest.approx(float(wanted), rel=1e-5)
