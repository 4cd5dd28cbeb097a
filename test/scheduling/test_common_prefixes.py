"""One prefix in several jobs: who computes it, who waits, and when it is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scheduling_jobs import Prompt, Req, arrive, job_of, plan_of

from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.open_jobs import (
    SHORTEST,
    CommonPrefixes,
    OpenJobs,
    _places,
)
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

SHARED = (1,) * SHORTEST
FIRST = [(*SHARED, 0), (*SHARED, 1), (2, 2, 0), (2, 2, 1)]
# Behind the shared part the second job's prompts have another text.
SECOND = [(3, 0), (3, 1), (*SHARED, 9, 9, 5), (*SHARED, 9, 9, 6)]


class Jobs:
    """Open jobs whose requests arrive with their tokens."""

    def __init__(self) -> None:
        self.open = OpenJobs()
        self.common = CommonPrefixes(self.open, self._digests)
        self._prompts: dict[str, Prompt] = {}

    def _digests(self, req: Any, ends: Sequence[int]) -> list[bytes]:
        return [repr(self._prompts[req.rid][:end]).encode() for end in ends]

    def add(self, name: str, prompts: list[Prompt]) -> JobState:
        job = job_of(plan_of(prompts))
        job.job_id = name
        self.open.add(job)
        self.common.opened(job)
        return job

    def arrive(self, job: JobState, number: int, prompt: Prompt) -> ScheduledRequest:
        req = Req(f"{job.job_id}-{number}")
        self._prompts[req.rid] = prompt
        request = job.add(req, number, len(prompt), 100)
        self.common.note(job, request)
        return request


def begin(job: JobState, request: ScheduledRequest) -> None:
    job.backlog.remove(request)
    request.running = True
    job.start(request, 0)


def blocked(job: JobState, request: ScheduledRequest) -> bool:
    return bool(job.uses.blocked_by(request.node))


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.mark.parametrize("arrives_first", [False, True])
def test_a_prefix_that_one_job_computes_is_awaited_by_the_other(
    jobs: Jobs, arrives_first: bool
) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", SECOND)
    leader = jobs.arrive(first, 0, FIRST[0])
    if arrives_first:
        waiting = jobs.arrive(second, 2, SECOND[2])
        begin(first, leader)
    else:
        begin(first, leader)
        waiting = jobs.arrive(second, 2, SECOND[2])
    other = jobs.arrive(second, 0, SECOND[0])
    assert blocked(second, waiting)
    assert not blocked(second, other)
    second.follow(waiting, second.uses.blocked_by(waiting.node))
    [node] = leader.leading
    [(job, at)] = first.elsewhere(node)
    assert job is second
    first.uses.computed(leader, SHORTEST)
    second.no_longer_awaits(at, first)
    assert not blocked(second, waiting)
    assert waiting.waiting


def test_a_leader_that_leaves_keeps_no_job_waiting(jobs: Jobs) -> None:
    each = [jobs.add(name, FIRST) for name in "abc"]
    requests = [jobs.arrive(job, 0, FIRST[0]) for job in each]
    begin(each[0], requests[0])
    assert all(map(blocked, each[1:], requests[1:]))
    each[1].follow(requests[1], requests[1].node)
    each[0].leave(requests[0], offloaded=True)
    assert not any(map(blocked, each, requests))
    assert requests[1].waiting
    begin(each[1], requests[1])
    assert blocked(each[2], requests[2])


def test_a_job_with_another_tree_keeps_no_job_waiting(jobs: Jobs) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", FIRST)
    leader, waiting = (jobs.arrive(job, 0, FIRST[0]) for job in (first, second))
    begin(first, leader)
    assert blocked(second, waiting)
    jobs.common.forget(first)
    assert not blocked(second, waiting)
    first.extend(plan_of([*FIRST, (7, 7)]), lambda request: 0)
    jobs.common.note_all(first)
    assert leader.leading
    assert first.elsewhere(leader.leading[0]) == [(second, waiting.node)]
    # What the second computes meanwhile is its own affair.
    begin(second, waiting)
    assert not second.elsewhere(0)


def test_what_the_cache_holds_is_not_awaited(jobs: Jobs) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", FIRST)
    leader, other = (jobs.arrive(job, 0, FIRST[0]) for job in (first, second))
    second.uses.pin(other.node, "lock")
    begin(first, leader)
    assert not blocked(second, other)


def test_jobs_that_were_open_alone_are_noted_with_the_second(jobs: Jobs) -> None:
    first = jobs.add("a", FIRST)
    early = jobs.arrive(first, 0, FIRST[0])
    assert not first.elsewhere(early.node)
    second = jobs.add("b", SECOND)
    late = jobs.arrive(second, 3, SECOND[3])
    assert first.elsewhere(early.node) == [(second, late.node)]
    jobs.open.remove(first)
    jobs.common.forget(first)
    assert not second.elsewhere(late.node)


def test_other_prompts_than_planned_are_not_noted(jobs: Jobs) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", FIRST)
    jobs.common.note(first, first.add(Req("x"), 0, 99, 10))
    assert not second.elsewhere(arrive(second, 1).node)


def test_what_another_job_has_in_the_cache_goes_first(jobs: Jobs) -> None:
    first, second = jobs.add("a", FIRST), jobs.add("b", SECOND)
    leader = jobs.arrive(first, 0, FIRST[0])
    requests = [jobs.arrive(second, i, prompt) for i, prompt in enumerate(SECOND)]
    requests[2].position, requests[3].position = 8, 9
    second.backlog.reorder(second.plan)
    assert second.backlog.first() is requests[0]
    [(_, at)] = first.elsewhere(leader.node)
    second.use_now(at)
    order = []
    while (request := second.backlog.first()) is not None:
        second.backlog.remove(request)
        order.append(request.number)
    assert order == [2, 3, 0, 1]


def test_short_prefixes_are_left_to_each_job(jobs: Jobs) -> None:
    prompts = [(5,) * (SHORTEST - 1) + (i,) for i in range(2)]
    first, second = jobs.add("a", prompts), jobs.add("b", prompts)
    for job in (first, second):
        request = jobs.arrive(job, 0, prompts[0])
    assert request.node
    assert not first.elsewhere(request.node)


def test_nodes_are_compared_where_most_of_their_tokens_are_equal() -> None:
    assert _places(0, 63) == []
    assert _places(0, 64) == [64]
    assert _places(0, 600) == [576, 512, 448, 384, 320]
    assert _places(5000, 5600) == [5568, 5504, 5440, 5376, 5312]
    for begin in (0, 100, 5000):
        for end in range(begin + 256, begin + 9000, 37):
            places = _places(begin, end)
            assert places == sorted(places, reverse=True)
            assert 1 <= len(places) <= 10
            assert all((begin + end) / 2 <= place <= end for place in places)
            longer = _places(begin, end + (end - begin) // 8)
            assert {*places} & {*longer}
