"""The shards of a running job."""

from __future__ import annotations

import numpy as np
import pytest
from builders import make_machine

from sglang_batch.job.job_shards import JobProgress, JobShards
from sglang_batch.planner.lengths.output_length import OutputEstimates
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, Int32s, PlanRequests

FAMILIES, SIZE, SHARED = 8, 6, 50
N = FAMILIES * SIZE
FAMILY = np.arange(N) // SIZE


@pytest.fixture
def requests() -> PlanRequests:
    prompts = [[1000 + i // SIZE] * SHARED + [i] for i in range(N)]
    return PlanRequests(
        tokens=np.concatenate(prompts).astype(np.int32),
        offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        max_new_tokens=np.full(N, 100, np.int32),
        known_output_len=np.full(N, UNKNOWN, np.int32),
    )


@pytest.fixture
def tree(requests: PlanRequests) -> PrefixTree:
    return build_prefix_tree(requests.tokens, requests.offsets)


def estimates(lengths: int | np.ndarray = 100) -> OutputEstimates:
    length = np.zeros(N) + lengths
    return OutputEstimates(length, length**2)


def shards(
    tree: PrefixTree, requests: PlanRequests, replica: Int32s | None = None
) -> JobShards:
    return JobShards(tree, requests, make_machine(), 2, estimates(), replica)


def progress(
    shard_of: Int32s, sent: list[int], ended: list[int], *, whole: bool = True
) -> JobProgress:
    stays, left = np.zeros(N, np.bool_), np.ones(N)
    stays[sent] = stays[ended] = True
    left[ended] = 0.0
    return JobProgress(shard_of, stays, left, whole)


def shard_of(found: JobShards) -> Int32s:
    """By request, -1 for those that were left out."""
    of = np.full(N, -1, np.int32)
    for number, shard in enumerate(found.each):
        of[shard.index] = number
    return of


def test_new_requests_follow_their_siblings(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    # One request of each family was planned, all but one on the second replica.
    replica = np.full(N, -1, np.int32)
    replica[2::SIZE] = 1
    replica[2] = 0
    of = shard_of(shards(tree, requests, replica))
    assert np.array_equal(of, (FAMILY > 0).astype(np.int32))


def test_a_family_on_two_replicas_is_not_put_together(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    replica = (np.arange(N) % 2).astype(np.int32)
    assert np.array_equal(shard_of(shards(tree, requests, replica)), replica)


def test_nothing_changes_while_shards_have_the_same_work(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    found = shards(tree, requests)
    before = found.each
    found.rebalance(estimates(), progress(shard_of(found), [0], []))
    assert found.each is before


def test_lengths_that_are_learnt_move_whole_families(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    found = shards(tree, requests)
    of = shard_of(found)
    assert np.bincount(of).tolist() == [N // 2, N // 2]
    found.rebalance(estimates(np.where(of == 0, 90, 10)), progress(of, [], []))
    after = shard_of(found)
    # 2160 and 240 tokens before. Both get 1200, and only the last family is divided.
    assert (of != after).sum() == 10
    assert set(of[of != after]) == {0}
    assert sum(len(set(after[each == FAMILY])) > 1 for each in range(FAMILIES)) == 1


@pytest.mark.parametrize("whole", [False, True])
def test_requests_that_ended_are_left_out_once_all_are_planned(
    tree: PrefixTree, requests: PlanRequests, whole: bool
) -> None:
    found = shards(tree, requests)
    of = shard_of(found)
    # The second replica has answered everything. The first has answered all but the
    # last request of its first family, and four families are still to come.
    first = int(FAMILY[of == 0][0])
    members = np.flatnonzero(first == FAMILY)
    ended = [*np.flatnonzero(of == 1), *members[:-1]]
    state = progress(of, [int(members[-1])], [int(each) for each in ended], whole=whole)
    found.rebalance(estimates(), state)
    after = shard_of(found)
    moved = np.flatnonzero((of == 0) & (after == 1))
    assert len(moved) == 9, "half of those to come"
    if not whole:
        assert (after >= 0).all()
        return
    # A neighbour keeps the last one's prefix.
    assert after[members].tolist() == [-1] * (SIZE - 2) + [0, 0]
    shard = found.each[0]
    last = int(np.flatnonzero(shard.index == members[-1])[0])
    leaf = int(np.flatnonzero(shard.tree.order == last)[0])
    assert shard.tree.depth[shard.tree.leaf_parent[leaf]] == SHARED
    # It does not come back.
    state = progress(after, [], [int(each) for each in ended], whole=whole)
    found.rebalance(estimates(np.where(after == 0, 90, 10)), state)
    assert not (shard_of(found)[np.flatnonzero(after < 0)] >= 0).any()
