"""Softmax behind the kernel interface is softmax."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernel_cases import calibration, inputs, shape_of
from linearize import kernels
from linearize.kernels.softmax import Softmax
from linearize.ops import kernel_attention, pairwise


def test_weights_are_exponentials() -> None:
    kernel = Softmax(shape_of(4, 2))
    q, k, _ = inputs(kernel.shape, 5)
    values, query_log, key_log = kernel.weights(q, k)
    assert query_log is not None and key_log is None
    logits = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * kernel.shape.scale
    assert torch.allclose(values * query_log.exp(), logits.exp())


@pytest.mark.parametrize("backend", ["chunked", "recurrent", "pairwise"])
def test_outputs_are_those_of_scaled_dot_product_attention(backend: str) -> None:
    kernel = Softmax(shape_of(6, 2))
    q, k, v = inputs(kernel.shape, 40, dtype=torch.float32)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    output, _ = kernel_attention(
        kernel, q, k, v, scale=kernel.shape.scale, window=40, backend=backend
    )
    assert torch.allclose(output, expected, atol=1e-5)
    by_weights = pairwise.attend(kernel, q, k, v, scale=kernel.shape.scale)
    assert torch.allclose(by_weights, expected, atol=1e-5)


def test_a_masked_logit_does_not_drown_the_allowed_ones() -> None:
    """The future holds a logit 120 above the past: fp32 alone would end at 87."""
    kernel = Softmax(shape_of(1, 1, dim=1, value_dim=1))
    q = torch.ones(1, 1, 3, 1)
    k = torch.tensor([0.0, 1.0, 120.0])[None, None, :, None]
    v = torch.tensor([1.0, 2.0, 3.0])[None, None, :, None]
    output = pairwise.attend(kernel, q, k, v, scale=1.0).flatten()
    share = 1 / (1 + torch.e)
    assert output.tolist() == pytest.approx([1, share + 2 * (1 - share), 3], rel=1e-5)


def test_only_softmax_is_exact_and_it_has_no_state() -> None:
    assert [name for name in kernels.available() if kernels.get(name).exact] == ["softmax"]
    kernel = Softmax(shape_of(4, 2))
    assert kernel.feature_count == 0
    gain = torch.nn.Parameter(torch.zeros(4))  # what a layer with a window may bring along
    data = replace(calibration(kernel.shape, window=4), parameters=(gain,))
    assert kernel.fit(data) is None
    assert bool((gain == 0).all())
    q, k, _ = inputs(kernel.shape, 3)
    assert bool((kernel.query_features(q).values == 0).all())
    assert bool((kernel.key_features(k).values == 0).all())
