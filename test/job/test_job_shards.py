"""The shards of a running job."""

from __future__ import annotations

import numpy as np
import pytest
from builders import make_machine
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.errors import ConfigError
from sglang_batch.job.job_shards import JobProgress, JobShards
from sglang_batch.planner.output_lengths.estimates import OutputEstimates
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, Int32s, PlanRequests
from sglang_batch.planner.sharding.speeds import ShardSpeeds

FAMILIES, SIZE, SHARED = 8, 6, 50
N = FAMILIES * SIZE
FAMILY = np.arange(N) // SIZE


def make_requests() -> PlanRequests:
    prompts = [[1000 + i // SIZE] * SHARED + [i] for i in range(N)]
    return PlanRequests(
        tokens=np.concatenate(prompts).astype(np.int32),
        offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        max_new_tokens=np.full(N, 100, np.int32),
        known_output_len=np.full(N, UNKNOWN, np.int32),
    )


@pytest.fixture
def requests() -> PlanRequests:
    return make_requests()


@pytest.fixture
def tree(requests: PlanRequests) -> PrefixTree:
    return build_prefix_tree(requests.tokens, requests.offsets)


def estimates(lengths: int | np.ndarray = 100) -> OutputEstimates:
    length = np.zeros(N) + lengths
    return OutputEstimates(length, length**2)


def speeds(*each: float) -> ShardSpeeds:
    return ShardSpeeds(np.array(each), np.array(each))


def shards(
    tree: PrefixTree,
    requests: PlanRequests,
    replica: Int32s | None = None,
    of: ShardSpeeds | None = None,
) -> JobShards:
    num_shards = 2 if of is None else len(of)
    return JobShards(
        tree, requests, make_machine(), num_shards, estimates(), replica, of
    )


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


def test_faster_replicas_get_more(tree: PrefixTree, requests: PlanRequests) -> None:
    found = shards(tree, requests, of=speeds(1.0, 3.0))
    assert np.bincount(shard_of(found)).tolist() == [N // 4, 3 * N // 4]


def test_a_replica_that_left_keeps_what_it_was_sent(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    found = shards(tree, requests, of=speeds(1.0, 1.0, 1.0))
    of = shard_of(found)
    sent = np.flatnonzero(of == 1)[:2].tolist()
    found.rebalance(estimates(), progress(of, sent, []), speeds(1.0, 0.0, 1.0))
    after = shard_of(found)
    assert np.flatnonzero(after == 1).tolist() == sent
    counts = np.bincount(after)
    assert abs(counts[0] - counts[2]) <= SIZE
    # It comes back.
    found.rebalance(estimates(), progress(after, sent, []), speeds(1.0, 1.0, 1.0))
    assert (shard_of(found) == 1).sum() >= N // 4


def test_replicas_that_join_get_their_share(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    found = JobShards(tree, requests, make_machine(), 1, estimates(), None)
    assert shard_of(found).tolist() == [0] * N
    found.rebalance(estimates(), None, ShardSpeeds.equal(2))
    assert np.bincount(shard_of(found)).tolist() == [N // 2, N // 2]
    of = shard_of(found)
    ended = np.flatnonzero(of == 0).tolist()
    state = progress(of, [], ended, whole=False)
    found.rebalance(estimates(), state, ShardSpeeds.equal(4))
    after = shard_of(found)
    moved = np.flatnonzero(of != after)
    assert set(of[moved]) == {1}, "nothing of the others is left to move"
    assert (np.bincount(after[of == 1], minlength=4) >= SIZE).all()


def test_a_replica_that_joins_has_an_empty_shard_if_nothing_moves(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    found = shards(tree, requests)
    before = found.each
    of = shard_of(found)
    found.rebalance(estimates(), progress(of, list(range(N)), []), ShardSpeeds.equal(3))
    assert [len(shard.index) for shard in found.each] == [N // 2, N // 2, 0]
    assert found.each[0] is before[0] and found.each[1] is before[1]


def test_new_requests_follow_nobody_who_left(
    tree: PrefixTree, requests: PlanRequests
) -> None:
    # All that were planned are on the second replica, which is gone.
    replica = np.full(N, -1, np.int32)
    replica[2::SIZE] = 1
    of = shard_of(shards(tree, requests, replica, speeds(1.0, 0.0, 1.0)))
    assert (of[replica == 1] == 1).all()
    assert set(of[replica < 0]) == {0, 2}


@pytest.mark.parametrize("num_shards", [1, 2])
def test_without_replicas_the_job_is_cut_for_all(
    tree: PrefixTree, requests: PlanRequests, num_shards: int
) -> None:
    nobody = speeds(*[0.0] * num_shards)
    found = shards(tree, requests, of=nobody)
    before = shard_of(found)
    assert np.bincount(before).tolist() == [N // num_shards] * num_shards
    found.rebalance(estimates(), progress(before, [0], []))
    assert np.array_equal(shard_of(found), before)


def test_replicas_keep_their_numbers(tree: PrefixTree, requests: PlanRequests) -> None:
    found = shards(tree, requests)
    with pytest.raises(ConfigError, match="speeds of 1 replicas, but the job has 2"):
        found.rebalance(estimates(), None, ShardSpeeds.equal(1))
    replica = np.full(N, 4, np.int32)
    with pytest.raises(ConfigError, match="has replica 4, but there are 2"):
        shards(tree, requests, replica)


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_replicas_come_and_go(data: st.DataObject) -> None:
    """Whatever happens, each request is in one shard, and requests that were sent stay."""
    requests = make_requests()
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    k = data.draw(st.integers(1, 4))
    found = JobShards(tree, requests, make_machine(), k, estimates(), None)
    sent: set[int] = set()
    for _ in range(data.draw(st.integers(1, 5))):
        of = shard_of(found)
        assert (of >= 0).all()
        assert sum(len(shard.index) for shard in found.each) == N
        sent |= data.draw(st.sets(st.integers(0, N - 1), max_size=10))
        ended = sorted(
            data.draw(st.sets(st.sampled_from(sorted(sent)))) if sent else []
        )
        k += data.draw(st.integers(0, 2))
        speed = st.sampled_from([0.0, 0.5, 1.0, 2.0])
        of_replicas = speeds(*data.draw(st.lists(speed, min_size=k, max_size=k)))
        lengths = np.array(
            data.draw(st.lists(st.integers(1, 100), min_size=N, max_size=N))
        )
        state = progress(of, sorted(sent), ended, whole=False)
        found.rebalance(estimates(lengths), state, of_replicas)
        after = shard_of(found)
        assert len(found.each) == k
        stays = np.isin(np.arange(N), sorted(sent))
        assert np.array_equal(after[stays], of[stays])
        if of_replicas.there.any():
            assert of_replicas.there[after[~stays]].all()
        for number, shard in enumerate(found.each):
            found.ordered(shard.index[shard.tree.order])
            assert np.array_equal(np.flatnonzero(after == number), shard.index)
