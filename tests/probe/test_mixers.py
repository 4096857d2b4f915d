"""Mixers: causal, the same by every engine, and made of the kernels that serve converted models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linearize import kernels, ops
from linearize.errors import PlanError
from linearize.kernels.oal import OAL
from linearize.kernels.rebased import Rebased
from linearize.probe.catalogue import (
    DEFAULT,
    Architecture,
    ladder,
    layers_of,
    mixer_names,
    mixer_title,
)
from linearize.probe.mixers import KernelMixer, ShortConvolution, engine
from linearize.probe.model import RecallModel
from linearize.probe.references import Mamba, Rwkv, mamba_layers, rwkv_layers
from tolerances import assert_close

SHAPE = Architecture(heads=2, feature_dim=8)
ATTENDING = [name for name in mixer_names() if name not in ("mamba", "rwkv", "none")]


def inputs(tokens: int = 20, width: int = 16, batch: int = 2) -> Tensor:
    return torch.randn(batch, tokens, width)


def attending(name: str) -> KernelMixer:
    """The kernel layer of a mixer, its parameters moved off their special start."""
    layer = layers_of(name, SHAPE, 16, 20, seed=0)[1]
    assert isinstance(layer, KernelMixer)
    layer.prepare(inputs())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return layer


@pytest.mark.parametrize("name", ATTENDING)
def test_mixers_agree_with_the_oracle(name: str) -> None:
    """The layer against projections by hand and the pairwise definition, head by head."""
    layer, x = attending(name), inputs()
    scale = layer.kernel.shape.scale
    q, k, v = layer.project(x)
    weights, query_log, key_log = layer.kernel.map().weights(
        q.to(layer.kernel.dtype), k.to(layer.kernel.dtype)
    )
    log = weights.double().clamp(min=1e-300).log()
    for part in (query_log, key_log):
        log = log if part is None else log + part.double()
    log = torch.where(weights > 0, log, -torch.inf)
    if layer.kernel.exact:
        log = (q @ k.transpose(-1, -2)).double() * scale
    causal = torch.ones(20, 20).tril().bool()
    expected = log.masked_fill(~causal, -torch.inf).softmax(-1) @ v.double()
    heads = torch.cat([expected[:, head] for head in range(expected.shape[1])], dim=-1)
    assert_close(layer(x), heads.float() @ layer.output.weight.T, torch.float32, "output")


@pytest.mark.parametrize("name", ATTENDING)
def test_every_engine_trains_the_same_layer(name: str) -> None:
    layer, x = attending(name), inputs(140)  # more than one chunk
    results = []
    for backend in ("pairwise", "chunked"):
        layer.zero_grad()
        output = layer(x, backend=backend)
        output.square().sum().backward()
        results.append((output, [p.grad.clone() for p in layer.parameters() if p.grad is not None]))
    (one, gradients), (other, others) = results
    assert_close(other, one, torch.float32, "output")
    assert len(gradients) == len(others)
    for a, b in zip(gradients, others, strict=True):
        assert_close(b, a, torch.float32, "gradient")


@pytest.mark.parametrize("name", [*DEFAULT, "none"])
def test_mixers_do_not_look_ahead(name: str) -> None:
    layers = layers_of(name, SHAPE, 16, 20, seed=0)
    x = inputs()
    changed = x.clone()
    changed[:, 12:] = torch.randn_like(changed[:, 12:])
    for layer in layers:
        x, changed = layer(x), layer(changed)
    assert_close(changed[:, :12], x[:, :12], torch.float32, "output")
    difference = (changed - x).detach()[:, 12:].abs().max()
    assert float(difference) > 0.01 * float(x.detach().abs().max())


@pytest.mark.parametrize("name", ["softmax", "based", "oal"])
def test_attention_maps_are_the_normalised_weights(name: str) -> None:
    layer, x = attending(name), inputs()
    found = layer.attention_map(x)
    _, _, v = layer.project(x)
    mixed = (found @ v).transpose(1, 2).flatten(2)
    assert_close(layer.output(mixed), layer(x), torch.float32, "output")
    assert torch.allclose(found.sum(-1), torch.ones(2, found.shape[1], 20))
    assert float(found.triu(1).abs().max()) == 0


def test_softmax_is_torch_attention_however_large_its_logits() -> None:
    layer, x = attending("softmax"), inputs()
    q, k, v = (20 * part if at < 2 else part for at, part in enumerate(layer.project(x)))
    q.retain_grad()
    mixed = layer.attend(q, k, v, "pairwise")
    expected = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=layer.kernel.shape.scale
    )
    assert_close(mixed, expected, torch.float32, "output")
    mixed.sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())


def test_softmax_has_full_heads_and_kernels_small_ones() -> None:
    shape = Architecture(heads=3, softmax_heads=2, feature_dim=8)
    softmax, based = (layers_of(name, shape, 16, 20, seed=0)[1] for name in ("softmax", "based"))
    assert isinstance(softmax, KernelMixer) and isinstance(based, KernelMixer)
    of_softmax, of_based = softmax.kernel.shape, based.kernel.shape
    assert (of_softmax.query_heads, of_softmax.head_dim, of_softmax.value_dim) == (2, 8, 8)
    assert (of_based.query_heads, of_based.head_dim, of_based.value_dim) == (3, 8, 5)
    assert based(inputs()).shape == (2, 20, 16)  # also where heads do not divide the width


def test_engines_by_length() -> None:
    assert (engine(256), engine(257)) == ("pairwise", "chunked")
    assert set(map(engine, (2, 4096))) <= set(ops.BACKENDS)


def test_short_convolutions_follow_the_formula() -> None:
    layer, u = ShortConvolution(4, 3), inputs(5, 4)
    result = layer(u)
    for t in range(5):
        mixed = torch.zeros(2, 4)
        for back in range(min(3, t + 1)):
            mixed += layer.taps[back] * u[:, t - back]
        gate = u[:, t] @ layer.gate.weight.T + layer.offset
        assert torch.allclose(result[:, t], u[:, t] + mixed * gate, atol=1e-6)


def test_a_short_convolution_of_one_tap_mixes_nothing() -> None:
    layer, u = ShortConvolution(4, 1), inputs(5, 4)
    assert torch.allclose(layer(u)[:, 2:3], layer(u[:, 2:3]))


def test_oal_fixes_its_groups_on_the_first_batch() -> None:
    """Groups split the dimensions where contributions jump; L is near Taylor's, and trains."""
    layer = layers_of("oal", Architecture(feature_dim=8, groups=3), 16, 20, seed=0)[1]
    assert isinstance(layer, KernelMixer) and isinstance(layer.kernel, OAL)
    with torch.no_grad():
        layer.inputs.weight[[2, 5]] *= 20  # two dimensions of the queries far above the others
        layer.inputs.weight[5] *= 20
    x = inputs()
    layer.prepare(x)
    groups = layer.kernel.groups[0].tolist()
    assert (groups[5], groups[2]) == (2, 1)
    assert [groups[r] for r in (0, 1, 3, 4, 6, 7)] == [0] * 6
    before = layer.kernel.factor.detach().clone()
    layer(x).square().sum().backward()
    gradient = layer.kernel.factor.grad
    assert gradient is not None
    lower = torch.ones(4, 4).tril().bool()
    assert bool((gradient[0][lower] != 0).all())  # the Taylor factor alone is a saddle
    layer.prepare(x)
    assert torch.equal(layer.kernel.factor, before)


@pytest.mark.parametrize(
    ("rung", "norm", "affine"), [("square", 0, 0), ("norm", 1, 0), ("affine", 0, 1), ("", 1, 1)]
)
@pytest.mark.parametrize("form", ["rebased", "rebased-outer"])
def test_rungs_of_the_ladder(form: str, rung: str, norm: int, affine: int) -> None:
    name = f"{form}-{rung}" if rung else form
    layer = layers_of(name, SHAPE, 16, 20, seed=0)[1]
    assert isinstance(layer, KernelMixer) and isinstance(layer.kernel, Rebased)
    assert layer.kernel.name == form
    assert (layer.kernel.norm, layer.kernel.query_affine is not None) == (norm, affine)


def test_the_ladder_of_a_list() -> None:
    assert ladder(["based", "rebased-outer"]) == [
        *("based", "rebased-outer-square", "rebased-outer-norm", "rebased-outer-affine"),
        "rebased-outer",
    ]
    assert ladder(["oal", "oal"]) == ["oal"]
    assert set(ladder(list(DEFAULT))) <= set(mixer_names())


def test_every_kernel_is_a_mixer_with_a_title() -> None:
    assert set(kernels.available()) <= set(mixer_names())
    titles = [mixer_title(name) for name in mixer_names()]
    assert len(set(titles)) == len(titles)


def test_unknown_and_impossible_mixers() -> None:
    with pytest.raises(PlanError, match=r"mixer 'nosuch'.*based.*mamba"):
        layers_of("nosuch", SHAPE, 16, 20, seed=0)
    with pytest.raises(PlanError, match="32 heads of based; found width 16"):
        layers_of("based", Architecture(heads=32), 16, 20, seed=0)
    with pytest.raises(PlanError, match="more groups than feature dimensions"):
        Architecture(groups=17)


def references(name: str) -> tuple[nn.Module, Any]:
    """Our layer with moved parameters, and transformers' own forward pass of the same."""
    torch.manual_seed(0)
    layer = (mamba_layers(16, 2) if name == "mamba" else rwkv_layers(16, 2, 12))[1]
    assert isinstance(layer, Mamba | Rwkv)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    inner = layer.inner.eval()
    return layer, inner if name == "mamba" else lambda x: inner(x)[0]


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
def test_references_compute_what_transformers_computes(name: str) -> None:
    layer, theirs = references(name)
    direction = inputs(12)
    results = []
    for forward in (layer, theirs):
        layer.zero_grad()
        x = torch.linspace(-1, 1, 2 * 12 * 16).view(2, 12, 16).requires_grad_()
        output = forward(x)
        (output * direction).sum().backward()
        results.append([output, x.grad, *(p.grad.clone() for p in layer.parameters())])
    assert_close(results[0][0], results[1][0], torch.float32, "output")
    for ours, other in zip(results[0][1:], results[1][1:], strict=True):
        assert_close(ours, other, torch.float32, "gradient")


def model(mixer: str, seed: int = 0) -> RecallModel:
    return RecallModel(mixer, SHAPE, vocabulary=20, length=12, width=16, seed=seed)


@pytest.mark.parametrize("mixer", ["performer", "oal", "mamba"])
def test_a_seed_decides_every_parameter(mixer: str) -> None:
    one = model(mixer).state_dict()
    torch.manual_seed(5)
    same, other = model(mixer).state_dict(), model(mixer, seed=1).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_logits_at_chosen_positions_are_those_of_all() -> None:
    made = model("based")
    tokens = torch.randint(20, (3, 12))
    at = torch.rand(3, 12) < 0.4
    logits = made(tokens)
    assert logits.shape == (3, 12, 20)
    assert torch.allclose(made(tokens, at), logits[at], atol=1e-6)


def test_sizes_of_states() -> None:
    assert model("based").state_numbers == 2 * (1 + 8 + 36) * (8 + 1)
    assert model("softmax").state_numbers is None
    assert model("mamba").state_numbers is None
    assert model("rebased-square").state_numbers == 2 * 8 * (8 + 1)


def test_without_mixing_nothing_reaches_another_position() -> None:
    made = model("none")
    tokens = torch.randint(20, (1, 12))
    changed = tokens.clone()
    changed[:, :11] = (changed[:, :11] + 1) % 20
    assert torch.allclose(made(tokens)[:, 11], made(changed)[:, 11])
    assert not made.attends and model("t2r").attends
