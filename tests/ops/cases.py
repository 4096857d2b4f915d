"""Random inputs of the operators, by hand and by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from linearize.ops import grouped_quadratic_attention
from linearize.ops.quadratic import GroupedQuadratic

__all__ = ["Case", "attend", "make", "random_cases"]


@dataclass(frozen=True)
class Case:
    """One operator call: a grouped quadratic kernel and its inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    groups: Tensor
    factor: Tensor
    eps: float = 1e-3
    scale: float = 0.5
    sinks: int = 0
    window: int = 0
    saturation: int | None = None
    key_mask: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    @property
    def kernel(self) -> GroupedQuadratic:
        return GroupedQuadratic(
            self.groups, self.factor, eps=self.eps, scale=self.scale, dtype=self.q.dtype
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What every engine takes by name."""
        names = ("scale", "sinks", "window", "saturation", "key_mask")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.factor


def make(
    *,
    batch: int = 1,
    kv_heads: int = 1,
    ratio: int = 1,
    tokens: int = 8,
    dim: int = 4,
    value_dim: int = 3,
    groups: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **settings: object,
) -> Case:
    """Normal inputs; groups drawn at random, so that heads differ and a group may be empty."""
    g = torch.Generator().manual_seed(seed)
    heads = kv_heads * ratio

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return Case(
        normal(batch, heads, tokens, dim),
        normal(batch, kv_heads, tokens, dim),
        normal(batch, kv_heads, tokens, value_dim),
        torch.randint(groups, (heads, dim), generator=g),
        normal(heads, groups + 1, groups + 1).tril(),
        **settings,  # type: ignore[arg-type]
    )


@st.composite
def random_cases(draw: st.DrawFn, *, hybrid: bool = True, masked: bool = True) -> Case:
    """Cases of all small shapes; ``hybrid``: some with exact keys and saturation; ``masked``: padding."""
    tokens = draw(st.integers(1, 14))
    batch = draw(st.integers(1, 2))
    case = make(
        batch=batch,
        kv_heads=draw(st.integers(1, 2)),
        ratio=draw(st.sampled_from([1, 2, 3])),
        tokens=tokens,
        dim=draw(st.integers(1, 5)),
        value_dim=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**16)),
        sinks=draw(st.integers(0, 3)) if hybrid else 0,
        window=draw(st.integers(0, 6)) if hybrid else 0,
        saturation=draw(st.none() | st.integers(1, 6)) if hybrid else None,
        key_mask=torch.tensor(
            draw(
                st.lists(
                    st.lists(st.booleans(), min_size=tokens, max_size=tokens),
                    min_size=batch,
                    max_size=batch,
                )
            )
        )
        if masked and draw(st.booleans())
        else None,
    )
    return case


def attend(case: Case, backend: str, **changes: Any) -> Any:
    """The grouped operator on a case; ``changes`` are further arguments of it."""
    return grouped_quadratic_attention(
        case.q,
        case.k,
        case.v,
        case.groups,
        case.factor,
        eps=case.eps,
        scale=case.scale,
        key_mask=case.key_mask,
        backend=backend,
        **changes,
    )
