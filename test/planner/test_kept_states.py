"""The exact choice of states against all choices, on small random trees."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_jobs import build

from sglang_batch.planner.prefixes.kept_states import choose_states, state_ends
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree
from sglang_batch.planner.requests import Bools

PROMPTS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
    min_size=2, max_size=9,
)  # fmt: skip


def replayed(tree: PrefixTree, keeps: Bools) -> int:
    """Tokens found in the cache if the requests run one by one, in the tree's order."""
    ends, computed, saved = state_ends(tree), {0}, 0
    for leaf in range(tree.num_requests):
        node, path = int(tree.leaf_parent[leaf]), []
        while node > 0:
            path.append(node)
            node = int(tree.parent[node])
        kept = [node for node in path if keeps[node]]
        saved += max((int(ends[node]) for node in kept if node in computed), default=0)
        computed.update(kept)
    return saved


def most_on_a_path(tree: PrefixTree, keeps: Bools) -> int:
    number = np.zeros(tree.num_nodes, np.int64)
    for node in range(1, tree.num_nodes):
        number[node] = number[tree.parent[node]] + keeps[node]
    return int(number.max())


@settings(deadline=None)  # compiled on first use
@given(PROMPTS, st.integers(0, 4))
def test_no_other_choice_saves_more(prompts: list[tuple[int, ...]], most: int) -> None:
    tree = build(prompts)
    best = choose_states(tree, most)
    assert replayed(tree, best.keeps) == best.saved_tokens
    assert most_on_a_path(tree, best.keeps) <= most
    if tree.num_nodes > 11:
        return
    for choice in product([False, True], repeat=tree.num_nodes - 1):
        keeps = np.array([False, *choice])
        if most_on_a_path(tree, keeps) <= most:
            assert replayed(tree, keeps) <= best.saved_tokens


@pytest.mark.parametrize(("most", "saved"), [(0, 0), (1, 300), (2, 390), (9, 390)])
def test_one_state_is_kept_where_most_need_it(most: int, saved: int) -> None:
    # Four requests share 100 tokens, two of them 90 more.
    prompts = [(0,) * 100 + (1,) * 90 + (i,) for i in (2, 3)]
    prompts += [(0,) * 100 + (i,) for i in (4, 5)]
    assert choose_states(build(prompts), most).saved_tokens == saved
