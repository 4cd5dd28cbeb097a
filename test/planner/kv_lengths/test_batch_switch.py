"""Who joins next: by hand, and random jobs beside a model of who waits and who runs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from batch_runs import BatchJob, BatchRun, JobRequest, long_job, random_job
from length_lists import LONGEST

from sglang_batch.planner.kv_lengths.batch_state import (
    BATCH_SHARE,
    CHECK_TICKS,
    GROUPS,
    MIN_ROWS,
    TREE,
    LengthBatches,
    RunningRows,
    add,
    come_back,
    is_of_old_batch,
    is_parked,
    join,
    leave,
    make_batches,
    num_waiting,
    propose,
    remove,
    tick,
    wants_switch,
)
from sglang_batch.planner.kv_lengths.length_groups import BatchLaw
from sglang_batch.planner.kv_lengths.length_tree import NONE

# The share of mixed steps that the paper measured with ShareGPT is 8.61 % (section 4.4).
MOST_MIXED = 0.086

# 10,000 tokens of KV, of which a batch takes 4,000 and is small below 2,500.
LAW = BatchLaw(1.0, 1e-4, 0.0, False, 10_000.0, 1000, True)
PADDED = BatchLaw(1.0, 1e-4, 0.0, True, 10_000.0, 1000, True)
NOBODY = RunningRows(0, 0.0, 0)


def waiting(
    rule: int, lengths: Sequence[int], limit: int | None = None
) -> LengthBatches:
    batches = make_batches(len(lengths) + 200, rule, limit)
    for i, length in enumerate(lengths):
        add(batches, i, length, length, NONE)
    return batches


def rows_of(lengths: Sequence[int]) -> RunningRows:
    return RunningRows(len(lengths), float(sum(lengths)), max(lengths, default=0))


def ticks(batches: LengthBatches, number: int) -> None:
    for _ in range(number):
        tick(batches)


def fill(
    batches: LengthBatches, law: BatchLaw, lengths: Sequence[int], rows: list[int]
) -> list[int]:
    """Let requests join until nobody is proposed or fits, and list them.

    Args:
        lengths: of all requests.
        rows: lengths of those that run, to which the ones that join are added.
    """
    joined = []
    while True:
        i = propose(batches, law, rows_of(rows))
        if i == NONE or sum(rows) + lengths[i] > law.capacity:
            return joined
        join(batches, i)
        joined.append(i)
        rows.append(lengths[i])


# Random jobs


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_random_jobs_beside_a_model(part: int) -> None:
    """Nobody is lost or joins twice, and all counts are right after each step."""
    parked = aborted = 0
    for seed in range(40 * part, 40 * part + 40):
        run = BatchRun(random_job(seed)).run()
        parked += run.parked
        aborted += len(run.aborted)
        assert run.ended | run.aborted == {*range(len(run.job.requests))}
        assert not run.early and not run.late
        # Everybody joined, once more each time that it was parked.
        joined = [each.request for each in run.joined]
        assert {*joined} >= run.ended
        assert len(joined) <= len(run.job.requests) + run.parked
        if run.job.rule == GROUPS:
            assert run.mixed == 0
        if not run.job.law.parks:
            assert run.switches == 0
    assert parked > 50 and aborted > 50


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_rows_of_two_batches_run_in_few_steps(part: int) -> None:
    runs = [BatchRun(long_job(seed)).run() for seed in range(15 * part, 15 * part + 15)]
    shares = [run.worst_mixed for run in runs if run.clock >= 500]
    assert len(shares) >= 12
    assert max(shares) <= MOST_MIXED
    assert sum(share > 0.07 for share in shares) >= 3  # it was the bound that held


def test_rows_are_not_parked_again_and_again() -> None:
    """Batches that are small from the start are no reason to park them."""
    rng = Random(4)
    requests = [
        JobRequest(0, 1100 + 300 * cluster + rng.randint(0, 40), rng.randint(100, 300))
        for cluster in range(4)
        for _ in range(40)
    ]
    law = LAW._replace(capacity=330_000.0)
    run = BatchRun(BatchJob(requests, TREE, law)).run()
    # A cluster takes 13 to 24 % of the KV: no two of them are one batch.
    assert run.parked < 12 * len(requests)
    assert run.clock < 1000


@pytest.mark.parametrize("rule", [TREE, GROUPS])
@pytest.mark.parametrize("law", [LAW, PADDED, LAW._replace(parks=False)])
def test_too_few_for_a_batch_run(rule: int, law: BatchLaw) -> None:
    """There are never as many requests as a batch should have."""
    requests = [JobRequest(10 * i, 50 + 300 * i, 30) for i in range(MIN_ROWS // 4)]
    run = BatchRun(BatchJob(requests, rule, law)).run()
    assert len(run.ended) == len(requests)
    assert run.clock < 30 * len(requests)


# AlignedServe's Algorithm 2


def test_the_candidate_batch_joins_as_a_whole() -> None:
    """Also beyond the share of the KV below which a batch is small."""
    lengths = [100] * 38 + [3000] * 30
    batches = waiting(TREE, lengths)
    rows: list[int] = []
    assert fill(batches, LAW, lengths, rows) == [*range(38)]
    assert sum(rows) == 3800 <= BATCH_SHARE * LAW.capacity
    # It is large enough: nobody else joins.
    assert num_waiting(batches) == 30


def test_candidate_requests_are_those_of_the_batchs_lengths_as_it_grows() -> None:
    lengths = [100 + i % 10 for i in range(38)] + [3000] * 30
    batches = waiting(TREE, lengths)
    rows: list[int] = []
    assert len(fill(batches, LAW, lengths, rows)) == 38
    ticks(batches, 10)
    for i, length in enumerate([109, 110, 119, 120], 100):
        add(batches, i, length, length, NONE)
    for i in (102, 101):  # the longest first, from both ends of the range
        assert propose(batches, LAW, rows_of(rows)) == i
        join(batches, i)
        rows.append(110)
    assert propose(batches, LAW, rows_of(rows)) == NONE
    ticks(batches, 1)
    assert propose(batches, LAW, rows_of(rows)) == 103


def test_a_switch_begins_when_the_batch_is_small() -> None:
    lengths = [100] * 30 + [2000] * 2
    law = LAW._replace(parks=False)
    batches = waiting(TREE, lengths)
    rows: list[int] = []
    assert fill(batches, law, lengths, rows) == [*range(30)]
    for i in range(5):  # 2,500 tokens are left: not small
        leave(batches, i)
        rows.pop()
    assert propose(batches, law, rows_of(rows)) == NONE
    assert not is_of_old_batch(batches, 20)
    leave(batches, 5)
    rows.pop()
    assert fill(batches, law, lengths, rows) == [30, 31]
    assert all(is_of_old_batch(batches, i) for i in range(6, 30))
    assert not any(is_of_old_batch(batches, i) for i in (30, 31))
    # While rows of the old batch run, no third one is formed.
    add(batches, 32, 5, 5, NONE)
    assert propose(batches, law, RunningRows(26, 10.0, 1)) == NONE
    for i in range(6, 30):
        leave(batches, i)
    assert not is_of_old_batch(batches, 30)
    assert propose(batches, law, RunningRows(2, 10.0, 1)) == 32


def test_batches_are_switched_at_once_when_there_were_many_mixed_steps() -> None:
    lengths = [100] * 30 + [2000] * 2
    batches = waiting(TREE, lengths)
    rows: list[int] = []
    fill(batches, LAW, lengths, rows)
    ticks(batches, 100)
    rows = [100] * 20
    for i in range(10):
        leave(batches, i)
    assert fill(batches, LAW, lengths, rows) == [30, 31]
    for step in range(9):  # 8 of 108 steps are few
        assert not wants_switch(batches, LAW, rows_of(rows)), step
        tick(batches)
    assert wants_switch(batches, LAW, rows_of(rows))
    assert [i for i in range(10, 32) if is_parked(batches, i)] == [*range(10, 30)]
    for i in range(10, 30):
        leave(batches, i)
        add(batches, i, 210, 210, NONE)
    # The new batch goes on alone.
    now = rows_of([2009, 2009])
    assert not wants_switch(batches, LAW, now)
    assert propose(batches, LAW, now) == NONE


def test_a_small_batch_is_parked_for_one_with_many_more_rows() -> None:
    """In the first step, when not even one mixed step is few."""
    for others, expected in [(30, False), (31, True)]:
        lengths = [100] * 20 + [3000] * 5
        batches = waiting(TREE, lengths)
        rows: list[int] = []
        fill(batches, LAW, lengths[:20], rows)
        assert len(rows) == 20
        for i in range(30, 30 + others):
            add(batches, i, 50, 50, NONE)
        now = rows_of(rows)
        assert propose(batches, LAW, now) == NONE
        assert wants_switch(batches, LAW, now) == expected
        if expected:
            assert all(is_parked(batches, i) for i in range(20))
            for i in range(20):
                leave(batches, i)
                add(batches, i, 100, 100, NONE)
            # It was formed without them.
            assert propose(batches, LAW, NOBODY) == 30
            assert not wants_switch(batches, LAW, NOBODY)


def test_the_rest_of_a_candidate_batch_has_to_be_larger_too() -> None:
    lengths = [100] * 20
    batches = waiting(TREE, lengths)
    rows: list[int] = []
    fill(batches, LAW, lengths, rows)
    for i in range(30, 70):
        add(batches, i, 50, 50, NONE)
    now = rows_of(rows)
    assert propose(batches, LAW, now) == NONE
    for i in range(30, 40):
        remove(batches, i)
    assert propose(batches, LAW, now) == NONE
    assert not wants_switch(batches, LAW, now)


def test_a_switch_that_has_become_needless_is_forgotten() -> None:
    lengths = [100] * 20 + [3000] * 5
    batches = waiting(TREE, lengths)
    rows: list[int] = []
    fill(batches, LAW, lengths[:20], rows)
    for i in range(30, 70):
        add(batches, i, 50, 50, NONE)
    assert propose(batches, LAW, rows_of(rows)) == NONE
    for i in range(20):  # all of them end before they are parked
        leave(batches, i)
    tick(batches)
    assert not wants_switch(batches, LAW, NOBODY)
    assert propose(batches, LAW, NOBODY) == 30
    join(batches, 30)
    tick(batches)
    assert not wants_switch(batches, LAW, RunningRows(1, 50.0, 50))


# Groups of lengths


def test_the_first_group_joins_shortest_first() -> None:
    lengths = [1000] * 5 + [41 + i // 2 for i in range(20)]
    batches = waiting(GROUPS, lengths)
    law = PADDED._replace(weight_s=0.01)
    assert fill(batches, law, lengths, []) == [*range(5, 25)]
    for i in range(5, 25):
        leave(batches, i)
    tick(batches)
    assert fill(batches, law, lengths, []) == [*range(5)]
    # Of heavy weights all rows take a share.
    law = PADDED._replace(weight_s=100.0, capacity=1e6)
    batches = waiting(GROUPS, lengths)
    assert sorted(fill(batches, law, lengths, [])) == [*range(25)]


def test_a_row_is_parked_for_a_much_faster_group() -> None:
    law = PADDED._replace(weight_s=0.01)
    batches = waiting(GROUPS, [1000, 5])
    for i in range(2):
        join(batches, i)
    for i in range(2, 102):
        add(batches, i, 21, 21, NONE)
    ticks(batches, CHECK_TICKS)
    now = rows_of([1016, 21])
    for without in (law._replace(parks=False), law._replace(padded=False)):
        assert not wants_switch(batches, without, now)
    assert wants_switch(batches, law, now)
    assert [is_parked(batches, i) for i in range(2)] == [True, False]
    leave(batches, 0)
    add(batches, 0, 1016, 1016, NONE)
    # It waits until the group has ended.
    lengths = [1016, *[21] * 101]
    assert sorted(fill(batches, law, lengths, [21])) == [*range(2, 102)]


@pytest.mark.parametrize(("length", "expected"), [(102, False), (108, True)])
def test_little_padding_is_no_reason(length: int, expected: bool) -> None:
    # The weights cost as much as 100 tokens, so that 1,120 or 1,180 tokens are read for 940
    # or 970.
    law = PADDED._replace(weight_s=0.01, max_rows=10)
    lengths = [66] * 5 + [length] * 5
    batches = waiting(GROUPS, [each - CHECK_TICKS for each in lengths])
    for i in range(10):
        join(batches, i)
    ticks(batches, CHECK_TICKS)
    for i in range(20, 30):
        add(batches, i, 66, 66, NONE)
    now = rows_of(lengths)
    assert wants_switch(batches, law, now) == expected
    assert propose(batches, law, now) == 20  # of the first group in any case


def test_long_rows_that_fill_a_batch_stay() -> None:
    law = PADDED._replace(weight_s=0.01)
    batches = waiting(GROUPS, [1000 - CHECK_TICKS] * 8)
    fill(batches, law, [1000 - CHECK_TICKS] * 8, [])
    ticks(batches, CHECK_TICKS)
    for i in range(20, 120):
        add(batches, i, 10, 10, NONE)
    assert not wants_switch(batches, law, rows_of([1000] * 8))


def test_the_groups_are_looked_for_now_and_then() -> None:
    law = PADDED._replace(weight_s=0.01)
    batches = waiting(GROUPS, [1000, *[10] * 100])
    for i in range(2):
        join(batches, i)
    seen = []
    for k in range(3 * CHECK_TICKS):
        seen.append(wants_switch(batches, law, rows_of([1000 + k, 10 + k])))
        tick(batches)
    assert [k for k, wants in enumerate(seen) if wants] == [0, 16, 32]


def test_with_packed_rows_nobody_waits_for_a_better_batch() -> None:
    for law in (LAW, PADDED._replace(parks=False)):
        lengths = [2000, 3000, 10]
        batches = waiting(GROUPS, lengths)
        assert sorted(fill(batches, law, lengths, [])) == [0, 1, 2]


def families_join_in_turn(run: BatchRun) -> int:
    """Check that members join one after the other, and count how often they did."""
    number = 0
    family = [each.family for each in run.job.requests]
    left = {each: family.count(each) for each in {*family} - {NONE}}
    for one, other in zip(run.joined, run.joined[1:], strict=False):
        of_one = family[one.request]
        left[of_one] -= 1
        # When nobody runs any more, the prefix is gone.
        if left[of_one] > 0 and not other.alone:
            assert family[other.request] == of_one
            number += 1
    return number


def test_members_of_a_family_join_one_after_the_other() -> None:
    rng = Random(6)
    number = 0
    for _ in range(40):
        requests: list[JobRequest] = []
        # Some families have equal lengths, and some are longer than the tree knows.
        lengths = [rng.choice([30, 31, 300, LONGEST + 5]) for _ in range(30)]
        for family, length in enumerate(lengths):
            steps = [rng.randint(1, 20) for _ in range(rng.choice([1, 2, 9]))]
            requests += [JobRequest(0, length, each, family) for each in steps]
        law = rng.choice([LAW, PADDED])._replace(
            capacity=rng.choice([1e3, 1e5, 1e6]), max_rows=rng.choice([4, 50]),
            parks=False,
        )  # fmt: skip
        run = BatchRun(BatchJob(requests, GROUPS, law)).run()
        assert run.parked == 0 or law.capacity < 1e6
        if run.parked == 0:
            number += families_join_in_turn(run)
    assert number > 1000


def test_siblings_join_before_shorter_ones() -> None:
    batches = make_batches(5, GROUPS)
    for i, family in enumerate([7, 7, NONE, 7]):
        add(batches, i, 10, 10, family)
    assert propose(batches, PADDED, NOBODY) == 0
    join(batches, 0)
    add(batches, 4, 5, 5, NONE)
    assert propose(batches, PADDED, rows_of([10])) == 1
    join(batches, 1)
    # One without a family is between the others.
    assert propose(batches, PADDED, rows_of([10] * 2)) == 4
    remove(batches, 2)
    assert propose(batches, PADDED, rows_of([10] * 2)) == 3


# Rows and requests that go


def test_a_row_that_comes_back_is_one_of_the_running_batch() -> None:
    lengths = [100] * 30 + [2000] * 2
    batches = waiting(TREE, lengths)
    law = LAW._replace(parks=False)
    rows: list[int] = []
    fill(batches, law, lengths, rows)
    leave(batches, 0)
    fill(batches, law, lengths, [100] * 20)
    assert is_of_old_batch(batches, 1)
    come_back(batches, 0)
    state = batches.state[0]
    assert not is_of_old_batch(batches, 0)
    assert (state["rows_old"], state["rows_new"]) == (29, 3)


def test_requests_of_the_candidate_batch_are_aborted() -> None:
    lengths = [100] * 38
    batches = waiting(TREE, lengths)
    assert propose(batches, LAW, NOBODY) == 0
    join(batches, 0)
    for i in (1, 2, 5, 37):
        remove(batches, i)
        remove(batches, i)  # nobody is removed twice
    assert num_waiting(batches) == 33
    rows = [100]
    assert fill(batches, LAW, lengths, rows) == [3, 4, *range(6, 37)]
    assert num_waiting(batches) == 0
    # Another one is formed of the same requests.
    for i in range(1, 38):
        if i not in (1, 2, 5, 37):
            leave(batches, i)
        add(batches, i, 500, 500, NONE)
    leave(batches, 0)
    assert len(fill(batches, LAW, [500] * 38, [])) == 20
