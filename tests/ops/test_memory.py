"""Memory of the operator beyond its inputs and outputs, counted allocation by allocation."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from linearize.ops import kernel_attention
from ops.cases import make


def peak_bytes(tokens: int, *, sinks: int, window: int, gradient: bool) -> tuple[int, int]:
    """Highest number of bytes alive at once within one call, and bytes of its output."""
    case = make(tokens=tokens, dim=1, value_dim=96, dtype=torch.float32)
    kernel = case.kernel
    q, k, v = (x.requires_grad_(gradient) for x in (case.q, case.k, case.v))
    with (
        torch.set_grad_enabled(gradient),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        output, _ = kernel_attention(kernel, q, k, v, scale=0.3, sinks=sinks, window=window)
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    alive = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        peak = max(peak, alive)
    assert peak >= output.nbytes  # the profiler saw what was allocated
    return peak, output.nbytes


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (2, 40)])
def test_forward_memory_beyond_the_output_does_not_grow_with_the_length(
    sinks: int, window: int
) -> None:
    beyond = {}
    for tokens in (4096, 16384):
        peak, output = peak_bytes(tokens, sinks=sinks, window=window, gradient=False)
        beyond[tokens] = peak - output
    # The mask of real tokens is one byte a token and counts as an input.
    assert beyond[16384] - beyond[4096] <= 16384 - 4096 + 1024, beyond


def test_memory_with_gradients_is_far_below_one_score_matrix() -> None:
    """Copies of the inputs are kept, never the weights."""
    peak, output = peak_bytes(8192, sinks=0, window=0, gradient=True)
    assert peak - output < 8192 * 8192 * 4 / 8
