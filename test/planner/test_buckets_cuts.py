"""Cuts of a depth-first order: where, how large the pieces are, and what they may repeat."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import PROMPTS, Prompt, tree_of

from sglang_batch.planner.prefixes.bucket_splitters import cut_order
from sglang_batch.planner.requests import Floats, Int32s, Int64s

WORK = st.lists(st.integers(0, 40), min_size=20, max_size=20)
SHARES = st.sampled_from([0.0, 0.05, 0.3, 1.0])


def cut(
    lcp: Int32s, work: Floats, fewest: int, most: int, share: float = 0.1
) -> Int64s:
    before = np.concatenate([np.zeros(1), np.cumsum(work)])
    return cut_order(lcp, lcp.astype(np.float64), before, fewest, most, share)


def allowed(lcp: Int32s, work: Floats, start: int, at: int, share: float) -> bool:
    """Whether the piece from ``start`` may end here, tried out leaf by leaf."""
    low = at
    while low > start and (low == at or lcp[low] >= lcp[at]):
        low -= 1
    high = at + 1
    while high < len(lcp) and lcp[high] >= lcp[at]:
        high += 1
    least = min(work[low:at].sum(), work[at:high].sum())
    return bool(lcp[at] <= share * least)


@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS, WORK, st.integers(1, 5), st.integers(0, 5), SHARES)
def test_a_piece_ends_where_the_price_is_lowest(
    prompts: list[Prompt], each: list[int], fewest: int, more: int, share: float
) -> None:
    lcp, n, most = tree_of(prompts).lcp, len(prompts), fewest + more
    work = np.array(each[:n], np.float64)
    begin = cut(lcp, work, fewest, most, share)
    assert begin.dtype == np.int64
    assert begin.tolist() == sorted(set(begin.tolist()))
    assert begin[0] == 0 and begin[-1] == n
    for start, end in zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True):
        if n - start <= most:
            assert end == n
            continue
        last = n - fewest
        window = range(start + fewest, min(start + most, last) + 1)
        may = [at for at in window if allowed(lcp, work, start, at, share)]
        later = range(start + most + 1, last + 1)
        if may:
            assert end in may and lcp[end] == min(lcp[at] for at in may)
            middle = start + (fewest + most) // 2
            equal = [abs(at - middle) for at in may if lcp[at] == lcp[end]]
            assert abs(end - middle) == min(equal)
        else:
            found = (at for at in later if allowed(lcp, work, start, at, share))
            assert end == next(found, n)


@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS, WORK, st.integers(1, 3), SHARES)
def test_no_family_is_cut_below_its_price(
    prompts: list[Prompt], each: list[int], fewest: int, share: float
) -> None:
    tree = tree_of(prompts)
    work = np.array(each[: len(prompts)], np.float64)
    begin = cut(tree.lcp, work, fewest, fewest, share)
    for node in range(tree.num_nodes):
        first, end = tree.leaf_begin[node], tree.leaf_end[node]
        edges = [first, *(x for x in begin if first < x < end), end]
        if len(edges) > 2:
            parts = [work[a:b].sum() for a, b in pairwise(edges)]
            assert tree.depth[node] <= share * min(parts)


def test_a_large_family_is_cut_into_parts_that_pay() -> None:
    # 100 requests share 6 tokens, the others nothing.
    lcp = np.zeros(200, np.int32)
    lcp[41:140] = 6
    begin = cut(lcp, np.full(200, 2.0), 5, 15, 0.1)
    inside = [int(x) for x in begin if 40 < x < 140]
    # A part needs 60 of work, 30 requests.
    assert inside == [70, 100] or len(inside) == 2
    assert min(np.diff([40, *inside, 140])) >= 30
    assert 40 in begin and 140 in begin
    assert np.diff(begin)[begin[:-1] >= 140].max() <= 15


def test_equal_prices_give_pieces_of_the_middle_size() -> None:
    begin = cut(np.zeros(101, np.int32), np.ones(101), 6, 14)
    assert begin.tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 101]


def test_an_infinite_price_is_never_paid() -> None:
    n = 10
    price = np.array([0.0] + [np.inf] * 6 + [0.0] * 3)
    lcp = (price > 0).astype(np.int32)
    begin = cut_order(lcp, price, np.arange(n + 1) * 1e9, 1, 2, 1.0)
    assert begin.tolist() == [0, 7, 8, 10]
