"""What every kernel owes its callers, checked for all that are discovered."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_cases import VARIANTS, calibration, generator, inputs, make, map_in, shape_of
from linearize import kernels
from linearize.fitting import match_outputs
from linearize.kernels import Kernel
from linearize.ops import KernelMap, State, chunked, kernel_attention, pairwise, recurrent
from tolerances import assert_close

CASES = sorted(VARIANTS)
LENGTHS = (1, 2, 8, 15, 17, 63, 64, 65, 130)
CHUNK = 16  # so that the lengths above end before, on and after its multiples
HEADS = {1: (2, 2), 3: (3, 1), 7: (7, 1)}
EXACT = {
    "pure": {},
    "sinks": {"sinks": 3},
    "window": {"window": 16},
    "both": {"sinks": 3, "window": 16},
    "saturation": {"sinks": 3, "window": 16, "saturation": 20},
}

each_case = pytest.mark.parametrize("case", CASES)
each_exact = pytest.mark.parametrize("exact", EXACT)


def settings_for(kernel: Kernel, exact: str, tokens: int = 0) -> dict[str, Any]:
    """Engine arguments; softmax itself lives in a window that holds everything."""
    window = {"window": max(tokens, 1)} if kernel.exact else {}
    return {"scale": kernel.shape.scale, **EXACT[exact], **window}


def oracle(kernel: Kernel, exact: str, view: KernelMap, *tensors: torch.Tensor, **more: Any):  # type: ignore[no-untyped-def]
    """The definition: for softmax without a window, so that its weights are what is used."""
    settings = {"scale": kernel.shape.scale, **EXACT[exact]}
    if kernel.exact:
        settings.pop("saturation", None)  # no key ever leaves its window
    return pairwise.attend(view, *tensors, **settings, **more)


@each_case
@each_exact
@pytest.mark.parametrize("ratio", HEADS)
@torch.no_grad()
def test_engines_equal_the_definition(case: str, exact: str, ratio: int) -> None:
    shape = shape_of(*HEADS[ratio])
    longest = LENGTHS[-1]
    tensors = inputs(shape, longest, seed=ratio, dtype=torch.float32)
    kernel = make(case, shape, seed=ratio)
    settings = settings_for(kernel, exact, longest)
    single = map_in(kernel, kernel.dtype)
    by_chunks = [
        chunked.attend(single, *(x[:, :, :n] for x in tensors), **settings, chunk=CHUNK)[0]
        for n in LENGTHS
    ]
    whole = chunked.attend(single, *tensors, **settings)[0]
    by_token = recurrent.attend(single, *tensors, **settings)[0] if ratio == 3 else None

    view = map_in(kernel, torch.float64)
    tensors = tuple(x.double() for x in tensors)
    expected = oracle(kernel, exact, view, *tensors)
    for n, output in zip(LENGTHS, by_chunks, strict=True):
        assert_close(output, expected[:, :, :n], torch.float32, "output", f"chunked, {n} tokens")
        output = chunked.attend(view, *(x[:, :, :n] for x in tensors), **settings, chunk=CHUNK)[0]
        assert_close(output, expected[:, :, :n], torch.float64, "output", f"chunked, {n} tokens")
    assert_close(whole, expected, torch.float32, "output", "chunked, default chunk")
    if by_token is not None:
        assert_close(by_token, expected, torch.float32, "output", "recurrent")
    # a step knows nothing of the steps to come: one run covers every length
    output = recurrent.attend(view, *tensors, **settings)[0]
    assert_close(output, expected, torch.float64, "output", "recurrent")


@each_case
@pytest.mark.parametrize("exact", ["pure", "both"])
@torch.no_grad()
def test_long_sequence_with_small_heads(case: str, exact: str) -> None:
    tokens = 1334
    shape = shape_of(2, 1, dim=4, value_dim=3)
    kernel = make(case, shape)
    view = map_in(kernel, torch.float64)
    tensors = inputs(shape, tokens, batch=1)
    settings = settings_for(kernel, exact, tokens)
    expected = oracle(kernel, exact, view, *tensors)
    output, state = chunked.attend(view, *tensors, **settings)
    assert_close(output, expected, torch.float64, "output", "chunked")
    with torch.enable_grad():  # the road with saved states
        output = chunked.attend(view, *tensors, **settings, chunk=64)[0]
    assert_close(output, expected, torch.float64, "output", "chunked with gradients")
    step = 1200
    head, tail = (
        tuple(x[:, :, part] for x in tensors) for part in (slice(step), slice(step, None))
    )
    state = chunked.attend(view, *head, **settings)[1]
    output = recurrent.attend(view, *tail, **settings, state=state)[0]
    assert_close(output, expected[:, :, step:], torch.float64, "output", "recurrent")


@each_case
@each_exact
def test_left_padding_changes_nothing(case: str, exact: str) -> None:
    tokens, padding = 25, 7
    shape = shape_of(4, 2)
    kernel = make(case, shape)
    view = map_in(kernel, torch.float64)
    settings = settings_for(kernel, exact, tokens)
    tensors = [x.requires_grad_() for x in inputs(shape, tokens)]
    key_mask = torch.ones(2, tokens, dtype=torch.bool)
    key_mask[1, :padding] = False
    alone = [x[1:, :, padding:] for x in tensors]
    expected = oracle(kernel, exact, view, *alone)
    cotangent = torch.randn(expected.shape, generator=generator(5), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * cotangent).sum(), tensors, retain_graph=True)

    engines = {
        "pairwise": lambda: pairwise.attend(view, *tensors, key_mask=key_mask, **settings),
        "chunked": lambda: chunked.attend(view, *tensors, key_mask=key_mask, chunk=6, **settings)[
            0
        ],
        "recurrent": lambda: recurrent.attend(view, *tensors, key_mask=key_mask, **settings)[0],
    }
    for name, engine in engines.items():
        output = engine()[1:, :, padding:]
        assert_close(output, expected, torch.float64, "output", name)
        gradients = torch.autograd.grad((output * cotangent).sum(), tensors)
        for gradient, want in zip(gradients, wanted, strict=True):
            assert_close(gradient, want, torch.float64, "gradient", name)
            assert torch.equal(gradient[1, :, :padding], torch.zeros_like(gradient[1, :, :padding]))


@each_case
@each_exact
@torch.no_grad()
def test_split_and_resumed_equals_whole(case: str, exact: str) -> None:
    tokens = 45
    shape = shape_of(3, 1)
    kernel = make(case, shape)
    view = map_in(kernel, torch.float64)
    tensors = inputs(shape, tokens)
    key_mask = torch.ones(2, tokens, dtype=torch.bool)
    key_mask[1, :4] = False
    settings = settings_for(kernel, exact, tokens)
    expected = chunked.attend(view, *tensors, key_mask=key_mask, **settings)[0]
    source = generator(len(case))
    for first, second in ((chunked, recurrent), (recurrent, chunked), (chunked, chunked)):
        cuts = torch.randperm(tokens - 1, generator=source)[:2].sort().values + 1
        outputs = []
        state: State | None = None
        bounds = [0, *cuts.tolist(), tokens]
        for at, engine in enumerate((first, second, first)):
            part = slice(bounds[at], bounds[at + 1])
            output, state = engine.attend(
                view,
                *(x[:, :, part] for x in tensors),
                key_mask=key_mask[:, part],
                state=state,
                **settings,
            )
            outputs.append(output)
        assert_close(
            torch.cat(outputs, 2), expected, torch.float64, "output", f"cut at {cuts.tolist()}"
        )


@each_case
@pytest.mark.parametrize("exact", ["pure", "both"])
def test_gradients_equal_those_of_the_definition(case: str, exact: str) -> None:
    tokens = 75  # two segments of eight chunks
    shape = shape_of(6, 2)
    kernel = make(case, shape)
    kernel.double()
    tensors = [x.requires_grad_() for x in inputs(shape, tokens, batch=1)]
    leaves = [*tensors, *kernel.parameters()]
    settings = settings_for(kernel, exact, tokens)
    cotangent = torch.randn(
        1, 6, tokens, shape.value_dim, generator=generator(5), dtype=torch.float64
    )
    expected = oracle(kernel, exact, map_in(kernel, torch.float64), *tensors)
    wanted = torch.autograd.grad((expected * cotangent).sum(), leaves)
    output = chunked.attend(map_in(kernel, torch.float64), *tensors, chunk=8, **settings)[0]
    gradients = torch.autograd.grad((output * cotangent).sum(), leaves)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert_close(gradient, want, torch.float64, "gradient")
    for want in wanted:  # or the comparison says nothing
        assert float(want.abs().max()) > 1e-6


@each_case
def test_seeds_decide_everything(case: str) -> None:
    shape = shape_of(4, 2)
    name, options = VARIANTS[case]
    first, again, other = (
        kernels.get(name).build(shape, {**options, "seed": seed}) for seed in (3, 3, 4)
    )
    assert first.state_dict().keys() == again.state_dict().keys()
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    random = {"performer", "spectraformer", "dijiang", "t2r"}
    differs = any(
        not torch.equal(value, other.state_dict()[key]) for key, value in first.state_dict().items()
    )
    assert differs == (name in random)

    tensors = inputs(shape, 33, dtype=torch.float32)
    settings = settings_for(first, "both", 33)
    with torch.no_grad():
        outputs = [chunked.attend(k.map(), *tensors, **settings)[0] for k in (first, first, again)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@each_case
def test_settings_and_numbers_rebuild_the_kernel(case: str) -> None:
    shape = shape_of(4, 2)
    kernel = make(case, shape, seed=1)
    copy = type(kernel).build(shape, {**kernel.settings(), "seed": 2})
    copy.load_state_dict(kernel.state_dict())
    assert {**copy.settings(), "seed": 1} == kernel.settings()
    assert copy.feature_count == kernel.feature_count
    assert copy.shared_state == kernel.shared_state
    assert copy.trainable_numbers == kernel.trainable_numbers
    tensors = inputs(shape, 20, dtype=torch.float32)
    settings = settings_for(kernel, "pure", 20)
    with torch.no_grad():
        outputs = [chunked.attend(k.map(), *tensors, **settings)[0] for k in (kernel, copy)]
    assert torch.equal(*outputs)


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_inputs(case: str, dtype: torch.dtype) -> None:
    tokens = 2048
    shape = shape_of(2, 1)
    kernel = make(case, shape)
    view = kernel.map()
    settings = settings_for(kernel, "pure", tokens)
    tensors = inputs(shape, tokens, batch=1, dtype=dtype)
    output, state = kernel_attention(view, *tensors, **settings)
    assert output.dtype == dtype
    assert bool(output.isfinite().all())
    assert state is not None
    assert state.sums.dtype == view.dtype == kernel.dtype
    assert bool(state.sums.isfinite().all())
    assert state.sums.shape == (1, kernel.state_heads, max(1, kernel.feature_count), 6)


@each_case
@torch.no_grad()
def test_grouped_heads_equal_repeated_ones(case: str) -> None:
    grouped = make(case, shape_of(6, 2))
    single = make(case, shape_of(6, 6))
    single.load_state_dict(grouped.state_dict())
    q, k, v = inputs(grouped.shape, 40)
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    expected = pairwise.attend(map_in(single, torch.float64), q, *repeated, scale=1.0)
    view = map_in(grouped, torch.float64)
    assert_close(
        pairwise.attend(view, q, k, v, scale=1.0), expected, torch.float64, "output", "pairwise"
    )
    settings = settings_for(grouped, "pure", 40)
    for engine in (chunked, recurrent):
        output = engine.attend(view, q, k, v, **settings)[0]
        assert_close(output, expected, torch.float64, "output")


@each_case
@pytest.mark.parametrize("tokens", [4, 7])
@torch.no_grad()
def test_weights_sum_to_one(case: str, tokens: int) -> None:
    """Constant values come back, also where the head and token counts could be confused."""
    shape = shape_of(4, 4)
    kernel = make(case, shape)
    view = map_in(kernel, torch.float64)
    q, k, v = inputs(shape, tokens)
    constant = torch.arange(1.0, 5, dtype=torch.float64)[:, None, None].expand_as(v)
    for exact in EXACT:
        settings = settings_for(kernel, exact, tokens)
        outputs = {
            "pairwise": oracle(kernel, exact, view, q, k, constant),
            "chunked": chunked.attend(view, q, k, constant, **settings, chunk=3)[0],
            "recurrent": recurrent.attend(view, q, k, constant, **settings)[0],
        }
        for name, output in outputs.items():
            assert_close(output, constant, torch.float64, "output", f"{name}, {exact}")


@each_case
@pytest.mark.parametrize("exact", ["pure", "both"])
def test_large_logits_stay_finite(case: str, exact: str) -> None:
    tokens = 50
    shape = shape_of(2, 1)
    kernel = make(case, shape)
    q, k, v = inputs(shape, tokens, dtype=torch.float32)
    logits = q @ k.transpose(-1, -2) * shape.scale
    factor = (80 / logits.abs().max()).sqrt()
    tensors = [(x * factor).requires_grad_() for x in (q, k)] + [v.requires_grad_()]
    leaves = [*tensors, *kernel.parameters()]
    settings = settings_for(kernel, exact, tokens)
    for name, engine in (("chunked", chunked), ("recurrent", recurrent), ("pairwise", None)):
        view = kernel.map()
        if engine is None:
            output = oracle(kernel, exact, view, *tensors)
        else:
            output = engine.attend(view, *tensors, **settings)[0]
        assert bool(output.isfinite().all()), name
        gradients = torch.autograd.grad(output.sum(), leaves, allow_unused=True)
        for gradient in gradients:
            assert gradient is None or bool(gradient.isfinite().all()), name


@each_case
@torch.no_grad()
def test_weights_are_the_products_of_features(case: str) -> None:
    """A kernel that overrides ``weights`` still means its features; none is negative."""
    shape = shape_of(4, 2)
    kernel = make(case, shape)
    view = map_in(kernel, torch.float64)
    q, k, _ = inputs(shape, 9)
    values, query_log, key_log = view.weights(q, k)
    weights = values
    for log_scale in (query_log, key_log):
        weights = weights if log_scale is None else weights * log_scale.exp()
    assert float(weights.min()) >= 0
    if kernel.exact:
        assert kernel.feature_count == 0
        return
    query, keys = view.query_features(q), view.key_features(k)
    assert query.values.shape[-1] == keys.values.shape[-1] == kernel.feature_count
    assert keys.values.shape[1] == kernel.state_heads
    true_query, true_keys = (
        f.values if f.log_scale is None else f.values * f.log_scale.exp() for f in (query, keys)
    )
    true_keys = true_keys.repeat_interleave(4 // kernel.state_heads, dim=1)
    assert_close(true_query @ true_keys.transpose(-1, -2), weights, torch.float64, "output")


@each_case
def test_construction_ignores_the_ambient_device_and_dtype(case: str) -> None:
    """Models are built on the meta device, with a half type as default, and filled afterwards."""
    name, options = VARIANTS[case]
    shape = shape_of(4, 2)
    plain = kernels.get(name).build(shape, {**options, "seed": 3})
    ambient = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            other = kernels.get(name).build(shape, {**options, "seed": 3})
    finally:
        torch.set_default_dtype(ambient)
    for key, value in plain.named_buffers():
        assert torch.equal(value, dict(other.named_buffers())[key]), key
    for parameter in other.parameters():
        assert parameter.dtype == torch.float32


@each_case
def test_fitting_lowers_the_error(case: str) -> None:
    """From the kernel's own start, on every position of one sequence: a deterministic descent."""
    name, options = VARIANTS[case]
    shape = shape_of(4, 2)
    kernel = kernels.get(name).build(shape, options)
    data = calibration(shape, positions=40)
    if not kernel.trainable_numbers:
        assert kernel.fit(data) is None
        return
    data = replace(data, validation=data.fit, kernel_validation=data.kernel_fit)
    recipe = {"positions": 40, "validate_every": 20, "head_wise": kernel.head_wise}
    _, start = match_outputs(kernel, data, steps=1, learning_rate=0.0, **recipe)
    result, best = match_outputs(kernel, data, steps=60, **recipe)
    assert result.curve[0] > 0
    assert result.curve[0] == pytest.approx(float(start.mean()), rel=1e-4)
    assert result.curve[-1] < 0.97 * result.curve[0]
    assert float(best.mean()) < 0.97 * float(start.mean())
    _, kept = match_outputs(kernel, data, steps=1, learning_rate=0.0, **recipe)
    assert torch.allclose(kept, best)  # the parameters left behind are the best ones


@pytest.mark.parametrize("name", kernels.available())
def test_description(name: str) -> None:
    cls = kernels.get(name)
    assert cls.name == name
    assert cls.title and cls.source and cls.__doc__
    kernel = cls(shape_of(6, 2))
    if kernel.head_wise:
        assert all(p.shape[0] == 6 for p in kernel.parameters())
    assert all(p.dtype == torch.float32 for p in kernel.parameters())
