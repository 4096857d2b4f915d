"""Profiles and groups of a head against their definitions, written out pair by pair."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import tiny
from linearize.diagnose import groups, profiles
from linearize.diagnose.groups import candidate_cuts
from linearize.errors import PlanError, TextError
from linearize.grouping import bootstrap_groups
from linearize.text import divide, tokenize

PLAN = tiny.plan(layers=(0, 2))


def prompts() -> list[Tensor]:
    return divide(tokenize(tiny.text(), None), PLAN).prompts


def test_a_profile_is_the_mean_over_causal_pairs_then_over_prompts() -> None:
    loaded, head = tiny.loaded(), 4
    found = profiles(loaded, tiny.text(), PLAN, head=head)
    kv_head, dim = head // (tiny.HEADS // tiny.KV_HEADS), tiny.HEAD_DIM
    assert [one.layer for one in found.heads] == [0, 2]
    assert (found.prompts, found.prompt_length) == (4, 16)
    for one in found.heads:
        assert (one.head, one.kv_head) == (head, kv_head)
        expected = torch.zeros(dim, dtype=torch.float64)
        query, key = torch.zeros(dim), torch.zeros(dim)
        for prompt in prompts():
            q, k, _ = tiny.recorded(loaded.model, prompt)[one.layer]
            q, k = q[0, head], k[0, kv_head]
            pairs = [(i, j) for i in range(len(prompt)) for j in range(i + 1)]
            total = sum((q[i] * k[j] * dim**-0.5).abs().double() for i, j in pairs)
            expected += total / len(pairs) / 4
            query, key = query + q.abs().mean(0) / 4, key + k.abs().mean(0) / 4
        assert one.contribution == pytest.approx(expected.tolist(), rel=1e-5)
        assert one.query == pytest.approx(query.tolist(), rel=1e-5)
        assert one.key == pytest.approx(key.tolist(), rel=1e-5)
        ranked = sorted(expected.tolist(), reverse=True)
        assert [one.contribution[r] for r in one.order] == pytest.approx(ranked, rel=1e-5)
        assert one.top_share == pytest.approx(sum(ranked[:5]) / sum(ranked), rel=1e-5)


def test_cuts_explain_the_groups_of_a_conversion() -> None:
    plan = tiny.plan(layers="all", alpha=0.5, gamma=0.2, tau=1.1)
    for head in (0, 3):
        for one in groups(tiny.loaded(), tiny.text(), plan, head=head).heads:
            assert sorted(r for group in one.groups for r in group) == list(range(tiny.HEAD_DIM))
            assert one.sorted_contribution == sorted(one.sorted_contribution)
            assert [cut.below for cut in one.cuts] == [4, 5, 6, 7]
            ends = [0, *(cut.below for cut in one.cuts if cut.made), tiny.HEAD_DIM]
            pieces = [one.order[a:b] for a, b in itertools.pairwise(ends)]
            assert [sorted(piece) for piece in pieces] == one.groups
            natural = [cut for cut in one.cuts if cut.natural]
            assert all(cut.made and cut.gap >= 1.1 and cut.support >= 0.2 for cut in natural)
            if len(natural) >= plan.min_groups - 1:
                assert [cut for cut in one.cuts if cut.made] == natural


def test_cuts_are_those_of_the_grouping_on_many_profiles() -> None:
    settings = dict(alpha=0.4, tau=1.2, bootstrap=60)
    source = torch.Generator().manual_seed(0)
    for seed in range(20):
        profile = torch.rand(5, 1, 12, generator=source, dtype=torch.float64) + 0.05
        profile *= 1.5 ** torch.arange(12)
        member = bootstrap_groups(
            profile,
            gamma=0.5,
            min_groups=1,
            generator=torch.Generator().manual_seed(seed),
            **settings,
        )[0]
        fresh = torch.Generator().manual_seed(seed)
        found = candidate_cuts(profile[:, 0], source=fresh, **settings)
        kept = [k for k, gap, support in found if gap >= 1.2 and support >= 0.5]
        sorted_member = member[profile[:, 0].mean(0).argsort(stable=True)]
        assert kept == [k for k in range(1, 12) if sorted_member[k] != sorted_member[k - 1]]


def test_a_head_or_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="head 6; found query heads 0-5"):
        profiles(tiny.loaded(), tiny.text(), PLAN, head=6)
    with pytest.raises(PlanError, match="layers 0-2"):
        groups(tiny.loaded(), tiny.text(), tiny.plan(layers=(3,)))
    with pytest.raises(TextError, match="too few"):
        profiles(tiny.loaded(), tiny.text(100), PLAN)


def test_a_converted_model_is_refused() -> None:
    with pytest.raises(PlanError, match="converted already"):
        profiles(tiny.converted(), tiny.text(), PLAN)
