"""The quadratic on r directions is the grouped quadratic on the projected keys, in every mode."""

import pytest
import torch
from torch import Tensor

from linearize.ops import kernel_attention
from linearize.ops.projected import ProjectedQuadratic
from linearize.ops.quadratic import GroupedQuadratic
from tolerances import assert_close

EPS, SCALE, DIM, VALUE = 1e-6, 0.3, 8, 5


class Case:
    """Random heads with 1, 2 and 3 groups, keys, and r directions."""

    def __init__(self, rank: int, tokens: int, dtype: torch.dtype = torch.float64) -> None:
        source = torch.Generator().manual_seed(rank * 1000 + tokens)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=source, dtype=torch.float64).to(dtype)

        heads, kv_heads = 6, 2
        self.q, self.k = normal(2, heads, tokens, DIM), normal(2, kv_heads, tokens, DIM)
        self.v = normal(2, kv_heads, tokens, VALUE)
        counts = torch.tensor([1, 2, 3, 3, 2, 1])
        drawn = torch.randint(12, (heads, DIM), generator=source) % counts[:, None]
        self.groups = drawn
        self.factor = normal(heads, 4, 4).tril()
        for head, count in enumerate(counts.tolist()):
            self.factor[head, count + 1 :] = 0
        self.down, self.up = normal(kv_heads, DIM, rank), normal(kv_heads, DIM, rank)

    @property
    def coordinates(self) -> Tensor:
        return self.k @ self.down

    @property
    def keys(self) -> Tensor:
        return self.coordinates @ self.up.transpose(-1, -2)

    def full(self) -> GroupedQuadratic:
        dtype = self.q.dtype
        return GroupedQuadratic(self.groups, self.factor, eps=EPS, scale=SCALE, dtype=dtype)

    def projected(self) -> ProjectedQuadratic:
        return ProjectedQuadratic(
            self.groups, self.factor, self.up, eps=EPS, scale=SCALE, dtype=self.q.dtype
        )


@pytest.mark.parametrize("rank", [1, 3, DIM])
def test_weights_and_features_are_those_of_the_projected_keys(rank: int) -> None:
    case = Case(rank, 17)
    wanted = case.full().weights(case.q, case.keys).values
    view = case.projected()
    assert_close(view.weights(case.q, case.coordinates).values, wanted, torch.float64, "output")
    query, keys = view.query_features(case.q).values, view.key_features(case.coordinates).values
    assert (
        query.shape[-1] == keys.shape[-1] == view.feature_count == 1 + rank + rank * (rank + 1) // 2
    )
    product = query @ keys.repeat_interleave(3, 1).transpose(-1, -2)
    assert_close(product, wanted, torch.float64, "output")


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130, 300])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (3, 0), (2, 7)])
@pytest.mark.parametrize("backend", ["pairwise", "chunked", "recurrent"])
def test_attention_equals_that_of_the_untruncated_kernel(
    backend: str, sinks: int, window: int, tokens: int
) -> None:
    """Exact keys are met in full only where the projection keeps them: here it does (square D, U)."""
    case = Case(DIM, tokens)
    case.up = torch.linalg.inv(case.down).transpose(-1, -2)
    settings = {"scale": SCALE, "sinks": sinks, "window": window}
    wanted, _ = kernel_attention(
        case.full(), case.q, case.k, case.v, backend="pairwise", **settings
    )
    seen = _Seen(case.projected(), case.down)
    found, _ = kernel_attention(seen, case.q, case.k, case.v, backend=backend, **settings)
    assert_close(found, wanted, torch.float64, "output", backend)


def test_gradients_are_those_of_the_projected_keys() -> None:
    case = Case(3, 40)
    case.factor.requires_grad_()
    case.up.requires_grad_()
    outputs = []
    for kernel, keys in ((case.full(), case.keys), (case.projected(), case.coordinates)):
        backend = "pairwise" if isinstance(kernel, GroupedQuadratic) else "chunked"
        if isinstance(kernel, GroupedQuadratic):
            output, _ = kernel_attention(kernel, case.q, keys, case.v, scale=1.0, backend=backend)
        else:
            wide = _Seen(kernel, case.down)
            output, _ = kernel_attention(wide, case.q, case.k, case.v, scale=1.0, backend=backend)
        outputs.append(torch.autograd.grad(output.square().sum(), [case.factor, case.up]))
    for wanted, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, wanted)


class _Seen:
    """A map on coordinates as the engines meet it: given the model's keys."""

    shared_state = True

    def __init__(self, kernel: ProjectedQuadratic, down: Tensor) -> None:
        self.kernel, self.down, self.dtype = kernel, down, kernel.dtype

    def query_features(self, q: Tensor):
        return self.kernel.query_features(q)

    def key_features(self, k: Tensor):
        return self.kernel.key_features(k @ self.down)

    def weights(self, q: Tensor, k: Tensor):
        return self.kernel.weights(q, k @ self.down)
