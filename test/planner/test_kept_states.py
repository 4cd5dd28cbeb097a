"""The exact choice of states against all choices, on small random trees."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_parts.kept_states import choose_states, state_ends
from sim_jobs import build

from sglang_batch.planner.prefixes.prefix_tree import PrefixTree
from sglang_batch.planner.requests import Bools

PROMPTS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
    min_size=2, max_size=9,
)  # fmt: skip


def replayed(tree: PrefixTree, keeps: Bools) -> tuple[int, int]:
    """Tokens found in the cache if the requests start one by one, in the tree's order, and
    the most states that are still to be taken up when one has started."""
    ends, computed, saved = state_ends(tree), {0}, 0
    uses: list[int] = []
    first: dict[int, int] = {}
    for leaf in range(tree.num_requests):
        node, path = int(tree.leaf_parent[leaf]), []
        while node > 0:
            path.append(node)
            node = int(tree.parent[node])
        kept = [node for node in path if keeps[node]]
        used = next((node for node in kept if node in computed), 0)
        uses.append(used)
        saved += int(ends[used])
        for node in kept:
            first.setdefault(node, leaf)
        computed.update(kept)
    most = 0
    for leaf in range(tree.num_requests):
        to_come = set(uses[leaf + 1 :]) - {0}
        most = max(most, sum(first[node] <= leaf for node in to_come))
    return saved, most


@pytest.mark.slow
@settings(deadline=None)  # compiled on first use
@given(PROMPTS, st.integers(0, 4))
def test_no_other_choice_saves_more(prompts: list[tuple[int, ...]], most: int) -> None:
    tree = build(prompts)
    best = choose_states(tree, most)
    saved, in_use = replayed(tree, best.keeps)
    assert saved == best.saved_tokens
    assert in_use <= most
    if tree.num_nodes > 11:
        return
    for choice in product([False, True], repeat=tree.num_nodes - 1):
        saved, in_use = replayed(tree, np.array([False, *choice]))
        assert saved <= best.saved_tokens or in_use > most


@pytest.mark.parametrize(("most", "saved"), [(0, 0), (1, 300), (2, 390), (9, 390)])
def test_one_state_is_kept_where_most_need_it(most: int, saved: int) -> None:
    # Four requests share 100 tokens, the first two of them 90 more.
    prompts = [(0,) * 100 + (1,) * 90 + (i,) for i in (2, 3)]
    prompts += [(0,) * 100 + (i,) for i in (4, 5)]
    assert choose_states(build(prompts), most).saved_tokens == saved


def test_one_state_after_the_other_is_enough_where_the_longer_prefix_comes_last() -> (
    None
):
    prompts = [(0,) * 100 + (i,) for i in (1, 2)]
    prompts += [(0,) * 100 + (9,) * 90 + (i,) for i in (3, 4)]
    assert choose_states(build(prompts), 1).saved_tokens == 390
