"""The simulated prefix cache, alone: against hand-made cases and a model of sets."""

from __future__ import annotations

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_jobs import Prompt, build, prompt_lists

from sglang_batch.planner.prefixes.prefix_tree import PrefixTree
from sglang_batch.planner.simulator import prefix_cache
from sglang_batch.planner.simulator.engine_state import REQUEST
from sglang_batch.planner.simulator.prefix_cache import (
    GARBAGE,
    IDLE,
    LOCKED,
    LRU,
    PLANNED,
)

# Prefixes of 3, 5 and 2 tokens, twice each. Request 6 shares nothing.
A, B, C = (1,) * 3, (2,) * 5, (3,) * 2
PROMPTS: list[Prompt] = [
    (*A, 8), (*A, 9), (*B, 8), (*B, 9), (*C, 8), (*C, 9), (4,)
]  # fmt: skip
# One prefix within another: 2 and 4 tokens.
NESTED: list[Prompt] = [(1, 1, 2, 2, 8), (1, 1, 2, 2, 9), (1, 1, 3)]


class Cache:
    """The cache of a tree, by request, when all come in input order."""

    def __init__(self, prompts: list[Prompt], eviction: int) -> None:
        self.tree: PrefixTree = build(prompts)
        self.cache = prefix_cache.make_cache(self.tree, eviction)
        self.leaf = np.argsort(self.tree.order)
        self.records = np.zeros(len(prompts), REQUEST)
        self.records["rank"] = self.tree.order

    def node(self, request: int) -> int:
        return int(self.tree.leaf_parent[self.leaf[request]])

    def lock(self, request: int) -> None:
        leaf = self.leaf[request]
        first = self.records["admitted"][leaf] == 0
        prefix_cache.lock(self.cache, self.node(request), bool(first))
        self.records["admitted"][leaf] = 1

    def unlock(self, request: int) -> None:
        prefix_cache.unlock(self.cache, self.node(request))

    def use(self, *requests: int) -> None:
        for request in requests:
            self.lock(request)
            self.unlock(request)

    def evict(self, tokens: int) -> int:
        return int(prefix_cache.evict(self.cache, tokens, self.records))

    def cached(self, request: int) -> int:
        return int(prefix_cache.cached_depth(self.cache, self.node(request)))

    @property
    def totals(self) -> list[int]:
        return [int(tokens) for tokens in self.cache.totals[:3]]


def test_a_prefix_is_locked_while_any_request_uses_it() -> None:
    cache = Cache(PROMPTS, LRU)
    assert cache.cached(0) == 0
    assert prefix_cache.newly_locked(cache.cache, cache.node(0)) == (3, 1)
    cache.lock(0)
    cache.lock(1)
    assert cache.totals == [3, 0, 0]
    assert (cache.cached(0), cache.cached(2)) == (3, 0)
    assert prefix_cache.newly_locked(cache.cache, cache.node(1)) == (0, 0)
    cache.unlock(0)
    assert cache.totals == [3, 0, 0]
    assert cache.evict(10) == 0
    cache.unlock(1)
    assert cache.totals == [0, 3, 0]
    assert prefix_cache.newly_locked(cache.cache, cache.node(1)) == (3, 1)
    assert cache.evict(1) == 3
    assert (cache.totals, cache.cached(1)) == ([0, 0, 0], 0)


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(PROMPTS, LRU)
    cache.use(0, 2, 4, 1)  # A, B, C, and A again
    assert cache.evict(1) == 5
    assert [cache.cached(i) for i in (0, 2, 4)] == [3, 0, 2]
    assert cache.evict(1) == 2
    assert [cache.cached(i) for i in (0, 2, 4)] == [3, 0, 0]
    assert cache.evict(1) == 3
    assert cache.evict(1) == 0


def test_a_prefix_in_use_is_of_its_last_use() -> None:
    cache = Cache(PROMPTS, LRU)
    cache.lock(0)
    cache.use(2)
    cache.unlock(0)  # A was taken up before B and is given back after it
    assert cache.evict(1) == 5


def test_what_ended_requests_left_is_as_old_as_any_prefix() -> None:
    cache = Cache(PROMPTS, LRU)
    cache.use(0)
    prefix_cache.leave_garbage(cache.cache, int(cache.leaf[6]), 7)
    cache.use(2)
    assert cache.totals == [0, 8, 7]
    assert cache.evict(4) == 3 + 7
    assert (cache.totals[GARBAGE], cache.cached(2)) == (0, 5)


def test_the_plan_drops_what_nobody_needs_again() -> None:
    cache = Cache(PROMPTS, PLANNED)
    prefix_cache.leave_garbage(cache.cache, int(cache.leaf[6]), 7)
    cache.use(0)
    assert (cache.cached(1), cache.totals) == (3, [0, 3, 0])
    cache.use(1)
    assert (cache.cached(1), cache.totals) == (0, [0, 0, 0])


def test_the_plan_evicts_what_it_needs_last() -> None:
    # In input order the next uses are 1, 3 and 5.
    cache = Cache(PROMPTS, PLANNED)
    cache.use(4, 0, 2)
    assert cache.evict(1) == 2
    assert cache.evict(1) == 5
    assert cache.evict(1) == 3


@pytest.mark.parametrize("eviction", [LRU, PLANNED])
def test_a_child_goes_before_its_parent(eviction: int) -> None:
    cache = Cache(NESTED, eviction)
    cache.use(0)
    assert (cache.cached(0), cache.totals) == (4, [0, 4, 0])
    assert cache.evict(1) == 2
    assert (cache.cached(0), cache.cached(2)) == (2, 2)
    assert cache.evict(1) == 2
    assert cache.cached(2) == 0


@pytest.mark.parametrize("eviction", [LRU, PLANNED])
def test_a_parent_stays_under_a_child_in_use(eviction: int) -> None:
    cache = Cache(NESTED, eviction)
    cache.lock(0)
    cache.use(2)
    assert (cache.totals, cache.evict(100)) == ([4, 0, 0], 0)
    assert cache.cached(1) == 4


def test_a_prefix_is_read_by_many_and_counted_once() -> None:
    cache = Cache(NESTED, LRU)
    nodes = [cache.node(i) for i in range(3)]
    changes = [prefix_cache.change_readers(cache.cache, node, 1) for node in nodes]
    assert changes == [4, 0, 0]
    changes = [prefix_cache.change_readers(cache.cache, node, -1) for node in nodes]
    assert changes == [0, -2, -2]


@settings(deadline=None, max_examples=examples(100))
@given(
    prompt_lists(most=12),
    st.sampled_from([LRU, PLANNED]),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 40)), max_size=40),
)
def test_totals_and_residents_agree(
    prompts: list[Prompt], eviction: int, steps: list[tuple[int, int]]
) -> None:
    """Any request starts or, if it runs, ends. Then some tokens are evicted."""
    cache = Cache(prompts, eviction)
    running: set[int] = set()
    for number, tokens in steps:
        request = number % len(prompts)
        if request in running:
            running.remove(request)
            cache.unlock(request)
        else:
            running.add(request)
            cache.lock(request)
        check_consistent(cache, running)
        idle = cache.totals[IDLE]
        freed = cache.evict(tokens)
        assert min(tokens, idle) <= freed <= idle
        assert cache.totals[IDLE] == idle - freed
        check_consistent(cache, running)


def check_consistent(cache: Cache, running: set[int]) -> None:
    """Running requests have their prefix, and no node is there without its parent."""
    tree = cache.tree
    resident = cache.cache.nodes["resident"]
    locked: set[int] = set()
    for request in running:
        node = cache.node(request)
        assert cache.cached(request) == tree.depth[node]
        while node > 0:
            locked.add(node)
            node = int(tree.parent[node])
    here = [node for node in range(1, tree.num_nodes) if resident[node]]
    assert all(tree.parent[node] <= 0 or resident[tree.parent[node]] for node in here)
    assert locked <= set(here)

    def tokens(nodes: set[int]) -> int:
        return int(sum(tree.depth[i] - tree.depth[tree.parent[i]] for i in nodes))

    assert cache.totals[LOCKED] == tokens(locked)
    assert cache.totals[IDLE] == tokens(set(here) - locked)
