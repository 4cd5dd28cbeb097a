"""The open jobs of a scheduler: whose requests join first, and their sums."""

from __future__ import annotations

from scheduling_jobs import arrive_all, plan_of

from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.open_jobs import OpenJobs
from sglang_batch.scheduling.waiting_view import WaitingView

PROMPTS = [(1, 2, 3), (1, 2, 4), (9,)]


def open_jobs(*names: str, density: list[float] | None = None) -> OpenJobs:
    jobs = OpenJobs()
    for name in names:
        jobs.add(JobState(name, plan_of(PROMPTS, density=density), 1))
    return jobs


def order(jobs: OpenJobs) -> list[str]:
    return [job.job_id for job in jobs.in_order()]


def job(jobs: OpenJobs, name: str) -> JobState:
    found = jobs.get(name)
    assert found is not None
    return found


def test_jobs_join_by_priority_and_among_equals_by_what_they_were_served() -> None:
    jobs = open_jobs("a", "b", "c")
    job(jobs, "a").served = 10
    assert order(jobs) == ["b", "c", "a"]
    job(jobs, "c").priority = 1
    assert order(jobs) == ["c", "b", "a"]


def test_jobs_taken_from_both_ends_run_one_after_the_other() -> None:
    jobs = open_jobs("a", "b", density=[2.0, 1.0, 0.5])
    job(jobs, "a").served = 10
    assert order(jobs) == ["a", "b"]


def test_a_job_does_not_catch_up_with_its_new_peers() -> None:
    jobs = open_jobs("a", "b", "c")
    for name, served in (("a", 50), ("b", 30), ("c", 0)):
        job(jobs, name).served = served
    job(jobs, "a").priority = job(jobs, "b").priority = 2
    jobs.set_priority(job(jobs, "c"), 2)
    assert job(jobs, "c").served == 30
    jobs.set_priority(job(jobs, "c"), 7)  # it has no peers
    assert job(jobs, "c").served == 30


def test_waiting_requests_are_seen_as_one_item_of_all_their_tokens() -> None:
    jobs = open_jobs("a", "b")
    for each in jobs:
        arrive_all(each)
    view = WaitingView(["online"], jobs, num_offloaded=4)
    assert len(view) == 1 + 6 + 4
    online, backlog = view
    assert online == "online"
    assert backlog == (2 * 7, 0)
    jobs.remove(job(jobs, "a"))
    assert len(view) == 1 + 3 + 4
