"""Softmax as the kernel of a layer: over every key, or over its exact keys alone."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernel_cases import inputs, shape_of
from linearize.attention import LinearAttention
from linearize.kernels.softmax import Softmax
from linearize.ops.state import State

SHAPE = shape_of(4, 2, dim=8, value_dim=6)


@pytest.mark.parametrize("backend", ["pairwise", "chunked", "recurrent"])
@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (0, 5), (2, 3), (4, 200)])
def test_a_window_leaves_softmax_its_exact_keys_alone(
    backend: str, sinks: int, window: int
) -> None:
    q, k, v = (x.double().requires_grad_() for x in inputs(SHAPE, 150))
    at = torch.arange(150)
    distance = at[:, None] - at
    kept = (distance >= 0) & ((distance < window) | (at < sinks))
    wanted = scaled_dot_product_attention(
        q, k, v, attn_mask=kept, scale=SHAPE.scale, enable_gqa=True
    )
    layer = _layer(sinks, window)
    output, _ = layer(q, k, v, backend=backend)
    assert torch.allclose(output, wanted, atol=1e-12)
    weight = torch.randn_like(wanted)
    gradients = torch.autograd.grad((output * weight).sum(), (q, k, v))
    for found, expected in zip(
        gradients, torch.autograd.grad((wanted * weight).sum(), (q, k, v)), strict=True
    ):
        assert torch.allclose(found, expected, atol=1e-11)


def test_what_it_keeps_does_not_grow() -> None:
    layer, everything = _layer(2, 3), _layer(0, 0)
    assert not layer.every_key and layer.state_bytes == 5 * 2 * (8 + 6) * 4 + 2 * 7 * 8
    assert everything.every_key and everything.state_bytes == 0
    q, k, v = inputs(SHAPE, 60)
    sizes = []
    state: State | None = None
    for start in range(0, 60, 20):
        part = slice(start, start + 20)
        _, state = layer(q[:, :, part], k[:, :, part], v[:, :, part], state=state)
        sizes.append(sum(x.numel() for x in vars(state).values() if isinstance(x, torch.Tensor)))
    assert sizes[0] == sizes[-1]


def _layer(sinks: int, window: int) -> LinearAttention:
    kernel = Softmax(SHAPE)
    kernel.dtype = torch.float64
    return LinearAttention(kernel, sinks=sinks, window=window)
