"""A plan's levels: every token gets all of its KV from them, each position once."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from attention_cases import (
    FORESTS,
    Batch,
    assert_attention_close,
    batches,
    ints,
    make_batch,
    make_planner,
)
from example_counts import examples
from hypothesis import given, settings
from partial_attention import attend_span, merge_two

from sgl_kernel_ext.shared_prefix_attention import AttentionPlan, Level, cascade_levels


def levels_of(batch: Batch, plan: AttentionPlan) -> list[Level]:
    """The plan's levels for the batch's lengths, after a check of every level."""
    levels = cascade_levels(
        plan, batch.q_len, batch.kv_len, batch.table_row, batch.node_end
    )
    for level in levels:
        assert all(array.dtype == np.int32 for array in level)
        assert level.token_indptr[0] == 0
        assert level.token_indptr[-1] == batch.num_tokens
        assert (np.diff(level.token_indptr) > 0).all()
        assert {len(array) for array in level[1:]} == {len(level.token_indptr) - 1}
        assert (level.kv_begin <= level.kv_end).all()
    for level in levels[:-1]:
        empty = level.kv_begin == level.kv_end
        assert not empty.all()
        assert not level.kv_end[empty].any()
        assert not (empty[1:] & empty[:-1]).any()
    return levels


def slots(batch: Batch, row: int, begin: int, end: int) -> torch.Tensor:
    at = torch.arange(begin, end)
    page = batch.table[row].long()[at // batch.page_size]
    return page * batch.page_size + at % batch.page_size


def check_spans(batch: Batch, plan: AttentionPlan, levels: list[Level]) -> None:
    """A token's spans over all levels are its own KV from 0 on, without a gap."""
    request = np.repeat(np.arange(len(batch.q_len)), batch.q_len)
    spans: list[list[tuple[int, int]]] = [[] for _ in request]
    for level in levels:
        ranges = zip(itertools.pairwise(level.token_indptr), *level[1:], strict=True)
        for (start, stop), row, begin, end in ranges:
            for token in plan.gather[start:stop]:
                if begin == end:
                    continue
                spans[token].append((int(begin), int(end)))
                own_row = batch.table_row[request[token]]
                read = batch.k_cache[slots(batch, row, begin, end)]
                own = batch.k_cache[slots(batch, own_row, begin, end)]
                assert torch.equal(read, own)
    for token, covered in enumerate(spans):
        assert covered[0][0] == 0
        assert covered[-1][1] == batch.kv_len[request[token]]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    suffixes = levels[-1]
    first_tokens = plan.gather[suffixes.token_indptr[:-1]]
    assert np.array_equal(suffixes.table_row, batch.table_row[request[first_tokens]])
    assert sorted(suffixes.table_row) == sorted(batch.table_row)


def check_attention(batch: Batch, plan: AttentionPlan, levels: list[Level]) -> None:
    """Attending level by level and merging is attention."""
    q = batch.q[torch.from_numpy(plan.gather).long()]
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    for level in levels:
        parts = []
        ranges = zip(itertools.pairwise(level.token_indptr), *level[1:], strict=True)
        for (start, stop), row, begin, end in ranges:
            read = slots(batch, row, begin, end)
            k, v = batch.k_cache[read], batch.v_cache[read]
            last = level is levels[-1]
            parts.append(attend_span(q[start:stop], k, v, batch.scale, causal=last))
        level_out, level_lse = (torch.cat(each) for each in zip(*parts, strict=True))
        out, lse = merge_two(out, lse, level_out, level_lse)
    gather = torch.from_numpy(plan.gather).long()
    scattered, scattered_lse = torch.empty_like(out), torch.empty_like(lse)
    scattered[gather], scattered_lse[gather] = out, lse
    assert_attention_close(batch, scattered, scattered_lse)


def check(batch: Batch, plan: AttentionPlan) -> None:
    levels = levels_of(batch, plan)
    check_spans(batch, plan, levels)
    check_attention(batch, plan, levels)


@pytest.mark.parametrize("name", FORESTS)
def test_known_forests(name: str) -> None:
    batch = make_batch(**FORESTS[name])  # type: ignore[arg-type]
    check(batch, make_planner(batch).plan(*batch.planned()))


@given(batch=batches())
@settings(max_examples=examples(60), deadline=None)
def test_any_forest(batch: Batch) -> None:
    check(batch, make_planner(batch).plan(*batch.planned()))


def test_nodes_of_one_depth_share_a_level() -> None:
    batch = make_batch(**FORESTS["three-levels"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    assert plan.gather.tolist() == [0, 1, 6, 2, 3, 4, 5]
    root, middle, lowest, suffixes = levels_of(batch, plan)
    assert root.token_indptr.tolist() == [0, 7]
    assert (root.kv_begin.tolist(), root.kv_end.tolist()) == ([0], [63])
    # Nodes 1 and 2, and request 5 that has only the root above it.
    assert middle.token_indptr.tolist() == [0, 4, 6, 7]
    assert middle.kv_begin.tolist() == [63, 63, 0]
    assert middle.kv_end.tolist() == [100, 129, 0]
    assert lowest.token_indptr.tolist() == [0, 3, 7]
    assert lowest.kv_begin.tolist() == [100, 0]
    assert lowest.kv_end.tolist() == [163, 0]
    assert suffixes.token_indptr.tolist() == list(range(8))
    assert suffixes.kv_begin.tolist() == [163, 163, 163, 100, 129, 129, 63]


def test_empty_ranges_between_nodes() -> None:
    batch = make_batch(
        node_parent=[-1, -1, 1, 0],
        node_end=[40, 50, 90, 80],
        request_node=[2, 3, 0, 1, 2, 3, -1],
        own_len=[1, 2, 3, 4, 5, 6, 7],
    )
    plan = make_planner(batch).plan(*batch.planned())
    check(batch, plan)
    # Node 3 below node 0, a request of node 0, node 2 below node 1, a request of it.
    _, lower, _ = levels_of(batch, plan)
    assert lower.token_indptr.tolist() == [0, 2, 3, 5, 7]
    assert lower.kv_end.tolist() == [80, 0, 90, 0]


def test_without_kept_nodes_there_are_only_suffixes() -> None:
    batch = make_batch(own_len=[5, 9], node_parent=[-1], node_end=[4])
    plan = make_planner(batch).plan(*batch.planned())
    (suffixes,) = levels_of(batch, plan)
    assert suffixes.kv_end.tolist() == [5, 9]


def test_a_kept_plan_has_the_lengths_of_now() -> None:
    batch = make_batch(**FORESTS["two-groups"], room=16)  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    for tokens in ([1] * 7, [0, 3, 16, 1, 2, 0, 16]):
        grown = batch.grown(tokens)
        assert plan.still_valid(grown.kv_len)
        check(grown, plan)


def test_levels_of_many_requests_are_quick() -> None:
    """A bound that holds on a slow and busy core. The target is 1 ms."""
    node_parent = ints([-1] * 8 + [i % 8 for i in range(56)])
    node_end = ints([100] * 8 + [300] * 56)
    request_node = ints([8 + i % 56 for i in range(512)])
    q_len, table_row = ints([1] * 512), ints(range(512))
    kv_len = ints(range(301, 813))
    planner = make_planner(make_batch(), max_requests=512)
    plan = planner.plan(q_len, kv_len, table_row, node_parent, node_end, request_node)
    assert plan.num_kept_nodes == 64
    times = []
    for _ in range(20):
        began = time.perf_counter()
        levels = cascade_levels(plan, q_len, kv_len, table_row, node_end)
        times.append(time.perf_counter() - began)
    assert len(levels) == 3
    assert np.median(times) < 5e-3
