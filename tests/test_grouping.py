"""Contribution profiles and groups, against brute force and against the text of SPEC section 2."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.grouping import bootstrap_groups, contributions, fixed_groups

TINY = 1e-12


def slow_bootstrap(
    profile: Tensor, *, alpha: float, gamma: float, tau: float, min_groups: int, drawn: list
) -> list[list[int]]:
    """SPEC section 2, 'Grouping', sentence by sentence; ``drawn`` lists the resampled prompts."""
    prompts, heads, dim = profile.shape
    chi_p = profile.tolist()
    result = []
    for h in range(heads):
        chi = [sum(chi_p[p][h][r] for p in range(prompts)) / prompts for r in range(dim)]
        # Sort ascending, stable: order pi.
        pi = sorted(range(dim), key=lambda r: chi[r])
        # Tail size m = ceil(alpha d); candidate cuts k in {max(1, d - m), ..., d - 1}.
        m = math.ceil(alpha * dim)
        candidates = list(range(max(1, dim - m), dim))
        # Gap rho_k = chi_{pi_{k+1}} / max(chi_{pi_k}, tiny); pi_1 is pi[0].
        rho = {k: chi[pi[k]] / max(chi[pi[k - 1]], TINY) for k in candidates}
        support = dict.fromkeys(candidates, 0.0)
        for replicate in drawn:
            # chi^(b) the resampled mean; pi stays fixed.
            chi_b = [sum(chi_p[p][h][r] for p in replicate) / prompts for r in range(dim)]
            for k in candidates:
                upper = min(chi_b[r] for r in pi[k:])
                lower = max(chi_b[r] for r in pi[:k])
                if upper / max(lower, TINY) >= tau:
                    support[k] += 1 / len(drawn)
        support = {k: round(s * len(drawn)) / len(drawn) for k, s in support.items()}
        kept = {k for k in candidates if rho[k] >= tau and support[k] >= gamma}
        # Fewer than G_min groups: unused candidates in descending lexicographic (S_k, rho_k),
        # exact ties in candidate order.
        unused = [k for k in candidates if k not in kept]
        while len(kept) + 1 < min_groups and unused:
            best = unused[0]
            for k in unused[1:]:
                if (support[k], rho[k]) > (support[best], rho[best]):
                    best = k
            kept.add(best)
            unused.remove(best)
        # Group 1 (here number 0) is the low-contribution bulk.
        groups = [0] * dim
        for place, r in enumerate(pi):
            groups[r] = sum(1 for k in kept if place >= k)
        result.append(groups)
    return result


def draw(prompts: int, bootstrap: int, seed: int) -> list[list[int]]:
    """The replicates a generator of this seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(prompts, (bootstrap, prompts), generator=generator).tolist()


def fast(profile: Tensor, *, seed: int = 0, bootstrap: int = 100, **changes: float) -> list:
    arguments = {"alpha": 0.25, "gamma": 0.9, "tau": 1.5, "min_groups": 2} | changes
    generator = torch.Generator().manual_seed(seed)
    return bootstrap_groups(profile, **arguments, bootstrap=bootstrap, generator=generator).tolist()


def one_head(*values: float, prompts: int = 3) -> Tensor:
    """Every prompt has the same profile, so every replicate has it too."""
    return torch.tensor(values, dtype=torch.float64).expand(prompts, 1, -1)


@settings(max_examples=60)
@given(data=st.data())
def test_contributions_equal_brute_force(data: st.DataObject) -> None:
    prompts, kv_heads, ratio, tokens, dim = (data.draw(st.integers(1, top)) for top in (3,) * 5)
    scale = data.draw(st.sampled_from([0.25, 1.0, -0.5]))
    q = torch.randn(prompts, kv_heads * ratio, tokens, dim, dtype=torch.float64)
    k = torch.randn(prompts, kv_heads, tokens, dim, dtype=torch.float64)
    found = contributions(q, k, scale)
    assert found.dtype == torch.float64
    for p in range(prompts):
        for h in range(kv_heads * ratio):
            for r in range(dim):
                pairs = [
                    abs(float(q[p, h, i, r] * k[p, h // ratio, j, r]) * scale)
                    for i in range(tokens)
                    for j in range(i + 1)
                ]
                assert float(found[p, h, r]) == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)


def test_contributions_of_half_precision_are_summed_exactly() -> None:
    q = torch.full((1, 1, 4096, 2), 0.1, dtype=torch.bfloat16)
    value = float(q[0, 0, 0, 0])
    assert contributions(q, q, 1.0)[0, 0].tolist() == pytest.approx([value**2] * 2, rel=1e-12)


@settings(max_examples=150)
@given(data=st.data())
def test_bootstrap_grouping_follows_the_specification(data: st.DataObject) -> None:
    # Small integers and 1, 2, 4 or 8 prompts: every mean is exact, so ties are ties in any order
    # of summation, and there are many.
    prompts, heads = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(2, 12))
    count = prompts * heads * dim
    values = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    profile = torch.tensor(values, dtype=torch.float64).view(prompts, heads, dim)
    arguments = {
        "alpha": data.draw(st.sampled_from([0.125, 0.25, 0.5, 1.0])),
        "gamma": data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "tau": data.draw(st.sampled_from([1.01, 1.2, 1.5, 3.0])),
        "min_groups": data.draw(st.integers(1, 4)),
    }
    seed, bootstrap = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1, 7, 40]))
    wanted = slow_bootstrap(profile, **arguments, drawn=draw(prompts, bootstrap, seed))
    assert fast(profile, seed=seed, bootstrap=bootstrap, **arguments) == wanted


def test_the_seed_decides_and_nothing_else_does() -> None:
    profile = torch.rand(5, 4, 16, dtype=torch.float64).exp() ** 2
    settings_ = {"alpha": 1.0, "gamma": 0.5, "tau": 1.05, "bootstrap": 20}
    first = fast(profile, seed=7, **settings_)
    torch.manual_seed(999)
    torch.rand(100)
    assert fast(profile, seed=7, **settings_) == first
    assert any(fast(profile, seed=s, **settings_) != first for s in range(8, 40))


def test_stable_wide_gaps_are_cut_without_a_maximum() -> None:
    profile = one_head(1, 1, 1, 1, 2, 4, 8, 16)
    assert fast(profile, alpha=0.5) == [[0, 0, 0, 0, 1, 2, 3, 4]]


def test_only_the_tail_is_cut() -> None:
    """The gap below the tail of ceil(alpha d) dimensions is no candidate, however wide."""
    profile = one_head(1, 100, 100, 100, 100, 100, 100, 200)
    assert fast(profile, alpha=0.25) == [[0, 0, 0, 0, 0, 0, 0, 1]]
    assert fast(profile, alpha=1.0) == [[0, 1, 1, 1, 1, 1, 1, 2]]


def test_a_gap_of_exactly_tau_and_a_support_of_exactly_gamma_suffice() -> None:
    assert fast(one_head(2, 2, 2, 3), min_groups=1, gamma=1.0) == [[0, 0, 0, 1]]
    assert fast(one_head(2, 2, 2, 2.999), min_groups=1, gamma=1.0) == [[0, 0, 0, 0]]


def test_a_gap_that_resampling_closes_has_no_support() -> None:
    """One prompt of three carries the outlier: the mean has the gap, most replicates do not."""
    profile = torch.ones(4, 1, 8, dtype=torch.float64)
    profile[0, 0, 5] = 9.0  # mean 3 against 1, but 1 in every replicate without prompt 0
    cut = [[0, 0, 0, 0, 0, 1, 0, 0]]
    support = 1 - (3 / 4) ** 4  # a replicate of 4 holds prompt 0 with this probability: 0.68
    assert fast(profile, gamma=support - 0.1, min_groups=1, bootstrap=1000) == cut
    assert fast(profile, gamma=support + 0.1, min_groups=1, bootstrap=1000) == [[0] * 8]


def test_missing_groups_are_added_by_support_then_gap_then_position() -> None:
    # No gap reaches tau = 3; supports are all zero, so the widest gap is first, then the next.
    profile = one_head(1, 1, 1, 1, 1.1, 1.1, 2.2, 2.75)
    assert fast(profile, alpha=1.0, tau=3, min_groups=2) == [[0, 0, 0, 0, 0, 0, 1, 1]]
    assert fast(profile, alpha=1.0, tau=3, min_groups=3) == [[0, 0, 0, 0, 0, 0, 1, 2]]
    assert fast(profile, alpha=1.0, tau=3, min_groups=4) == [[0, 0, 0, 0, 1, 1, 2, 3]]
    # Equal support and gap everywhere: the first candidates, in their order.
    flat = one_head(2, 2, 2, 2, 2, 2, 2, 2)
    assert fast(flat, alpha=0.5, min_groups=3) == [[0, 0, 0, 0, 1, 2, 2, 2]]


def test_support_goes_before_the_gap() -> None:
    """A narrow gap that every replicate has is added before a wide one that few have."""
    profile = torch.tensor([[1.0, 1, 1, 1, 1, 1, 1.4, 1.4]] * 4, dtype=torch.float64)[:, None]
    profile[0, 0, 7] = 5.4  # mean 2.4: gap 1.7, absent without prompt 0
    arguments = {"alpha": 0.25, "gamma": 1.0, "tau": 1.3, "bootstrap": 400}
    assert fast(profile, min_groups=2, **arguments) == [[0, 0, 0, 0, 0, 0, 1, 1]]
    assert fast(profile, min_groups=3, **arguments) == [[0, 0, 0, 0, 0, 0, 1, 2]]


def test_more_groups_than_candidates_gives_what_there_is() -> None:
    assert fast(one_head(1, 1, 1, 1), alpha=0.5, min_groups=9) == [[0, 0, 1, 2]]
    assert fast(one_head(1.0), min_groups=2) == [[0]]


def test_ties_keep_the_order_of_the_dimensions() -> None:
    profile = one_head(5, 1, 5, 1, 5, 1)
    assert fast(profile, alpha=0.5, min_groups=1) == [[1, 0, 1, 0, 1, 0]]
    # A cut inside a run of equals separates the later dimensions from the earlier ones.
    assert fast(one_head(3, 3, 3, 3), alpha=0.25, min_groups=2) == [[0, 0, 0, 1]]


def test_dimensions_that_never_contribute_do_not_divide_by_zero() -> None:
    assert fast(one_head(0, 0, 0, 0, 0, 0, 0, 1)) == [[0, 0, 0, 0, 0, 0, 0, 1]]
    assert fast(one_head(*[0] * 8), min_groups=1) == [[0] * 8]


@settings(max_examples=60)
@given(data=st.data())
def test_fixed_groups_split_at_the_widest_gaps_and_are_nested(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 10))
    heads = data.draw(st.integers(1, 3))
    profile = torch.rand(heads, dim, dtype=torch.float64) ** 3 + 1e-3
    coarser: list | None = None
    for count in range(1, dim + 1):
        groups = fixed_groups(profile, count).tolist()
        for h in range(heads):
            assert sorted(set(groups[h])) == list(range(count))
            order = sorted(range(dim), key=lambda r: float(profile[h, r]))
            sizes = [float(profile[h, r]) for r in order]
            gaps = [sizes[i] / sizes[i - 1] for i in range(1, dim)]
            widest = sorted(sorted(range(1, dim), key=lambda i: -gaps[i - 1])[: count - 1])
            assert [groups[h][r] for r in order] == [
                sum(place >= cut for cut in widest) for place in range(dim)
            ]
            if coarser is not None:  # each finer group lies inside one coarser group
                pairs = {(groups[h][r], coarser[h][r]) for r in range(dim)}
                assert len(pairs) == count
        coarser = groups
