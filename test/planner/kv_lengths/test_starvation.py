"""Requests that have waited too long join first (section 3.5 of AlignedServe).

A request that was added at tick ``s`` is due from tick ``s + limit + 1`` on. While anybody
is due, the request that is proposed has waited as long as each of them, or it is in the
candidate batch, and so is, or was until it joined, a request that has waited as long. It
joins if it fits. So a request waits for at most ``limit + 1`` ticks and those in which it
was due, and the next one did not fit.
"""

from __future__ import annotations

import pytest
from batch_runs import BatchJob, BatchRun, JobRequest, random_job

from sglang_batch.planner.kv_lengths.batch_state import (
    GROUPS,
    TREE,
    RunningRows,
    add,
    join,
    make_batches,
    num_waiting,
    propose,
    remove,
    tick,
)
from sglang_batch.planner.kv_lengths.length_groups import BatchLaw
from sglang_batch.planner.kv_lengths.length_tree import NONE

LAW = BatchLaw(1.0, 1e-4, 0.0, False, 10_000.0, 1000, True)
PADDED = BatchLaw(1.0, 1e-4, 0.0, True, 10_000.0, 1000, True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("rule", [TREE, GROUPS])
def test_nobody_overtakes_a_request_that_is_due(part: int, rule: int) -> None:
    """1,000 jobs in all."""
    num_due = 0
    for seed in range(125 * part, 125 * part + 125):
        run = BatchRun(random_job(seed, rule, due=True)).run()
        assert (run.early, run.late) == ([], [])
        num_due += run.num_due
    assert num_due > 5000


def test_a_request_of_a_rare_length_waits_for_the_limit_only() -> None:
    """Without one, it waits until the others have come to an end."""
    others = [JobRequest(i // 30, 100, 3) for i in range(1800)]
    rare = JobRequest(5, 900, 3)

    def joins(rule: int, law: BatchLaw, limit: int | None) -> int:
        run = BatchRun(BatchJob([*others, rare], rule, law, limit)).run()
        assert (run.early, run.late) == ([], [])
        return next(each.step for each in run.joined if each.request == len(others))

    for rule, law in [(TREE, LAW), (GROUPS, PADDED._replace(weight_s=1e-6))]:
        assert joins(rule, law, None) >= 60
        for limit in (7, 20):
            # The rows that were there before it need three steps to end.
            assert 5 + limit < joins(rule, law, limit) <= 5 + limit + 1 + 3


def test_all_that_are_due_join_in_the_order_in_which_they_came() -> None:
    lengths = [500, 20, 500, 70, 20, 3000]
    for rule in (TREE, GROUPS):
        batches = make_batches(len(lengths), rule, 3)
        for i, length in enumerate(lengths):
            add(batches, i, length, length, NONE)
            tick(batches)
        # The first three have waited for 6, 5 and 4 ticks, the next one for 3.
        now = RunningRows(9, 9000.0, 1000)
        for i in range(3):
            assert propose(batches, LAW, now) == i
            join(batches, i)
        assert propose(batches, LAW, now) != 3
        tick(batches)
        assert propose(batches, LAW, now) == 3
        remove(batches, 3)
        assert num_waiting(batches) == 2


def test_a_candidate_batch_that_is_due_joins_as_a_whole() -> None:
    batches = make_batches(60, TREE, 50)
    add(batches, 0, 120, 120, NONE)
    tick(batches)
    for i in range(1, 30):
        add(batches, i, 100, 100, NONE)
    large = RunningRows(9, 9000.0, 1000)
    assert propose(batches, LAW, RunningRows(0, 0.0, 0)) == 1  # it is formed
    for i in range(30, 60):
        tick(batches)
        add(batches, i, 5000, 5000, NONE)
    for _ in range(20):
        assert propose(batches, LAW, large) == NONE
        tick(batches)
    # Request 0 is due, and the others of its batch join before it: they are shorter.
    for i in (*range(1, 30), 0):
        assert propose(batches, LAW, large) == i
        join(batches, i)


def test_a_candidate_batch_is_due_no_more_when_its_oldest_request_was_aborted() -> None:
    batches = make_batches(80, TREE, 50)
    add(batches, 0, 120, 120, NONE)
    tick(batches)
    for i in range(1, 30):
        add(batches, i, 100, 100, NONE)
        if i == 20:
            add(batches, 70, 4000, 4000, NONE)
            tick(batches)
    # Formed of all but the long one. The oldest request in it leaves, then another one.
    assert propose(batches, LAW, RunningRows(0, 0.0, 0)) == 1
    remove(batches, 0)
    remove(batches, 29)
    large = RunningRows(9, 9000.0, 1000)
    for _ in range(48):
        tick(batches)
    assert propose(batches, LAW, large) == NONE  # request 0 would be due now
    for i in range(1, 21):
        remove(batches, i)
    tick(batches)
    tick(batches)
    # Those of the batch that are left came after the long one.
    assert propose(batches, LAW, large) == 70
