"""`backend="triton"`: whole attention calls against the definition, and the calls it refuses."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from linearize.attention import LinearAttention
from linearize.errors import BackendError
from linearize.kernels import HeadShape
from linearize.ops import api, kernel_attention, pairwise
from linearize.ops.quadratic import DimensionQuadratic
from linearize.plan import Plan
from ops.cases import Case, attend, make
from tolerances import assert_close

pytest.importorskip("triton", reason="needs the triton package (the extra triton)")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with mock.patch.dict(os.environ, {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}):
    from linearize.ops.triton import engine, sums  # read when the kernels are defined


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BLOCKS", (16,))
    monkeypatch.setattr(sums, "CHUNK", 16)


def on(case: Case) -> Case:
    moved = {name: getattr(case, name).to(DEVICE) for name in ("q", "k", "v", "groups", "factor")}
    mask = None if case.key_mask is None else case.key_mask.to(DEVICE)
    return Case(
        **moved, key_mask=mask, sinks=case.sinks, window=case.window, saturation=case.saturation
    )


def test_outputs_with_padding_and_gradients_are_the_definitions() -> None:
    mask = torch.arange(20)[None] >= torch.tensor([0, 7])[:, None]
    sizes: dict[str, Any] = dict(batch=2, kv_heads=1, ratio=2, tokens=20, dim=4, groups=3)
    case = on(make(**sizes, dtype=torch.float32, key_mask=mask))
    exact = on(make(**sizes, key_mask=mask))
    direction = torch.randn(case.v.shape, device=DEVICE).repeat_interleave(2, dim=1)
    gradients = []
    for one, backend in ((case, "triton"), (exact, "pairwise")):
        for tensor in one.tensors():
            tensor.requires_grad_()
        output = attend(one, backend)
        gradients.append(
            [output, *torch.autograd.grad(output, one.tensors(), direction.to(output.dtype))]
        )
    for at, (actual, wanted) in enumerate(zip(*gradients, strict=True)):
        assert_close(actual, wanted, torch.float32, "gradient" if at else "output")
    assert gradients[0][2][1, :, :7].abs().max() == 0  # keys of the padding


def test_decoding_from_a_state_is_the_whole() -> None:
    case = on(make(batch=2, ratio=3, tokens=22, dim=3, dtype=torch.float32))
    with torch.no_grad():
        whole = attend(case, "pairwise")
        y, state = [], None
        for part in (slice(0, 19), slice(19, 20), slice(20, 21), slice(21, 22)):
            q, k, v = (x[:, :, part] for x in (case.q, case.k, case.v))
            now = Case(q, k, v, case.groups, case.factor)
            output, state = attend(now, "triton", state=state, return_state=True)
            y.append(output)
    assert_close(torch.cat(y, dim=2), whole, torch.float32, "output")


@pytest.mark.parametrize(
    "settings",
    [
        dict(window=3, sinks=2),
        dict(window=5, center=True, saturation=6),
        dict(sinks=1),
        dict(kernel="global"),
    ],
)
def test_windows_sinks_and_centres_compose(settings: dict[str, Any]) -> None:
    shape = HeadShape(4, 2, 4, 3, 0.5)
    layer = LinearAttention.from_plan(Plan(**settings), shape, 0).to(DEVICE)
    with torch.no_grad():
        for number in (*layer.parameters(), *layer.buffers()):
            if number.is_floating_point():
                number += 0.2 * torch.randn_like(number)
        q, k, v = (torch.randn(1, h, 21, n, device=DEVICE) for h, n in ((4, 4), (2, 4), (2, 3)))
        found, state = layer(q[:, :, :18], k[:, :, :18], v[:, :, :18], backend="triton")
        parts = [found]
        for at in (18, 19, 20):
            one = (x[:, :, at : at + 1] for x in (q, k, v))
            output, state = layer(*one, state=state, backend="triton")
            parts.append(output)
        exact = {name: getattr(layer, name) for name in ("sinks", "window", "saturation")}
        wanted = pairwise.attend(layer.map(), q, k, v, scale=0.5, **exact)
    assert_close(torch.cat(parts, dim=2), wanted, torch.float32, "output")


def test_a_named_backend_that_cannot_run_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    single, double = (on(make(dtype=dtype)) for dtype in (torch.float32, torch.float64))
    with pytest.raises(BackendError, match="float64"):
        attend(double, "triton")
    general = DimensionQuadratic(
        torch.ones(1), torch.ones(1, 4), torch.ones(1, 4, 4), scale=1, dtype=torch.float32
    )
    with pytest.raises(BackendError, match="no grouped quadratic"):
        kernel_attention(general, single.q, single.k, single.v, scale=1, backend="triton")
    compact = LinearAttention.from_plan(Plan(state_rank=2), HeadShape(1, 1, 4, 3, 0.5), 0)
    with pytest.raises(BackendError, match="no grouped quadratic"):
        compact.to(DEVICE)(single.q, single.k, single.v, backend="triton")
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="no triton package"):
        attend(single, "triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here")
def test_without_a_gpu_or_the_interpreter_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_interpreted", lambda: False)
    with pytest.raises(BackendError, match=r"on 'cpu', without TRITON_INTERPRET=1"):
        attend(on(make(dtype=torch.float32)), "triton")


def test_auto_takes_it_on_a_gpu_where_it_can_run() -> None:
    case = make(dtype=torch.float32)
    gpu: Any = SimpleNamespace(is_cuda=True, shape=case.q.shape)
    with mock.patch.object(api.triton, "why_not", return_value=None):
        assert api._choose("auto", case.kernel, gpu, case.k) == "triton"
        assert api._choose("auto", case.kernel, case.q, case.k) == "chunked"
        assert api._choose("recurrent", case.kernel, gpu, case.k) == "recurrent"
    with mock.patch.object(api.triton, "why_not", return_value="a reason"):
        assert api._choose("auto", case.kernel, gpu, case.k) == "chunked"
        with pytest.raises(BackendError, match="a reason"):
            api._choose("triton", case.kernel, gpu, case.k)
