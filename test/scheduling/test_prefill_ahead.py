"""Prompts that are computed before there is room for their answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scheduling_jobs import arrive_all, plan_of, waiting_of

from sglang_batch.planner.kv_lengths.batch_state import GROUPS, TREE
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.length_backlog import LengthBacklogs, fill_ahead
from sglang_batch.scheduling.next_step import EngineNow, choose, put_back
from sglang_batch.scheduling.open_jobs import ScanPace
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

CAPACITY, PROMPT, STEPS = 1000, 20, 100


def a_job(rule: int, num_requests: int = 40) -> tuple[JobState, KvAccounting]:
    """A job of whose requests eight fit by the forecast."""
    prompts = [tuple(range(100 * i, 100 * i + PROMPT)) for i in range(num_requests)]
    plan = plan_of(prompts, est_decode_steps=STEPS)
    if rule:
        key = np.full(num_requests, PROMPT, np.int32)
        family = np.full(num_requests, -1, np.int32)
        plan = replace(plan, length_rule=rule, length_key=key, family=family)
    kv_accounting = KvAccounting(CAPACITY)
    kv_accounting.extend_forecast(4 * STEPS)
    job = JobState("job", plan, 1, LengthBacklogs(kv_accounting))
    arrive_all(job)
    return job, kv_accounting


def tokens_ahead(kv_accounting: KvAccounting) -> int:
    return sum(each.input_len for each in kv_accounting.requests if each.prompt_only)


def rows_of(kv_accounting: KvAccounting) -> int:
    return LengthBacklogs(kv_accounting).rows().rows


def the_engine(kv_accounting: KvAccounting, ahead_tokens: int) -> EngineNow:
    return EngineNow(
        step_tokens=512,
        decode_rows=sum(kv_accounting.decoding),
        chunk=None,
        chunk_left=0,
        rows=100,
        room=CAPACITY - sum(kv_accounting.kv),
        page_size=1,
        fill_rest=lambda filling, limit: fill_ahead(filling, limit, ahead_tokens),
    )


def take(
    rule: int, ahead_tokens: int
) -> tuple[JobState, KvAccounting, list[ScheduledRequest]]:
    job, kv_accounting = a_job(rule)
    now = the_engine(kv_accounting, ahead_tokens)
    choice = choose([job], kv_accounting, now, ScanPace())
    return job, kv_accounting, choice.requests


@pytest.mark.parametrize("rule", [TREE, GROUPS])
def test_prompts_are_computed_ahead_up_to_the_limit(rule: int) -> None:
    _, kv_accounting, alone = take(rule, 0)
    assert 0 < len(alone) < 12
    assert not any(request.prompt_only for request in alone)
    _, kv_accounting, taken = take(rule, 7 * PROMPT + 3)
    assert [request.prompt_only for request in taken] == [
        *(False for _ in alone),
        *(True for _ in range(7)),
    ]
    assert tokens_ahead(kv_accounting) == 7 * PROMPT
    # They are no part of the batch.
    assert rows_of(kv_accounting) == len(alone)


def test_orders_that_are_followed_compute_none_ahead() -> None:
    assert len(take(0, 1000)[2]) == len(take(0, 0)[2])


def test_they_stay_in_the_candidate_batch() -> None:
    job, _, taken = take(TREE, 7 * PROMPT)
    state = job.backlog._batches.state[0]  # type: ignore[attr-defined]
    before = int(state["num_next"])
    ahead = [request for request in taken if request.prompt_only]
    left = len(job.backlog._left_next)  # type: ignore[attr-defined]
    assert left > 0
    for request in ahead:
        request.prompt_only, request.on_host = False, True
        job.backlog.add(request)
    assert state["num_next"] == before + left


@pytest.mark.parametrize("rule", [TREE, GROUPS])
def test_they_wait_on_the_host_and_join_from_there(rule: int) -> None:
    job, kv_accounting, taken = take(rule, 7 * PROMPT)
    running = [request for request in taken if not request.prompt_only]
    ahead = taken[len(running) :]
    for request in running:
        kv_accounting.begin_decoding(request)
    for request in ahead:  # as the manager of the KV does
        kv_accounting.remove(request)
        job.leave(request, offloaded=True)
        request.on_host = True
        job.backlog.add(request)
    assert tokens_ahead(kv_accounting) == 0
    assert {request.est_decode_steps for request in ahead} == {STEPS}
    # Others are computed ahead of those whose KV is there.
    beyond = job.backlog.next_ahead()
    assert beyond is not None
    assert not beyond.on_host
    for request in running:
        kv_accounting.remove(request)
        job.leave(request, offloaded=False)
    now = the_engine(kv_accounting, 0)
    choice = choose([job], kv_accounting, now, ScanPace())
    assert choice.from_host
    assert set(choice.from_host) <= set(ahead)
    assert len(choice.from_host) + len(choice.requests) == len(running)
    assert choice.tokens == PROMPT * len(choice.requests)


def test_one_that_cannot_wait_goes_on() -> None:
    job, kv_accounting, taken = take(TREE, 2 * PROMPT)
    request = taken[-1]
    assert request.prompt_only
    rows = rows_of(kv_accounting)
    kv_accounting.decode_after_all(request)
    kv_accounting.begin_decoding(request)
    assert request.est_decode_steps == STEPS
    assert rows_of(kv_accounting) == rows + 1
    assert tokens_ahead(kv_accounting) == PROMPT
    put_back(job, kv_accounting, taken[-2])
    assert tokens_ahead(kv_accounting) == 0
    assert not taken[-2].prompt_only


@pytest.mark.parametrize("rule", [TREE, GROUPS])
def test_a_request_that_waited_for_its_prefix_joins_first(rule: int) -> None:
    """Others of its length wait for longer."""
    job, _ = a_job(rule)
    follower = next(request for request in waiting_of(job) if request.leaf == 30)
    job.follow(follower, 1)
    first = job.backlog.first()
    assert first is not None
    assert first is not follower
    job.release_followers([1])
    assert job.backlog.first() is follower
