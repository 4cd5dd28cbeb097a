"""The open jobs of a scheduler: whose requests join first, and their sums."""

from __future__ import annotations

from scheduling_jobs import arrive, arrive_all, plan_of, waiting_of

from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.next_step import EngineNow, choose
from sglang_batch.scheduling.open_jobs import OpenJobs, WaitingView

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


def work(jobs: OpenJobs, **seconds: float) -> None:
    for name, each in seconds.items():
        job(jobs, name).done.raise_by(each)


def test_jobs_are_ordered_by_priority_and_among_equals_by_their_work() -> None:
    jobs = open_jobs("a", "b", "c")
    work(jobs, a=10.0)
    assert order(jobs) == ["b", "c", "a"]
    job(jobs, "c").priority = 1
    assert order(jobs) == ["c", "b", "a"]
    assert [[each.job_id for each in group] for group in jobs.by_priority()] == [
        ["c"],
        ["a", "b"],
    ]
    assert OpenJobs().by_priority() == []


def test_a_job_does_not_catch_up_with_its_new_peers() -> None:
    jobs = open_jobs("a", "b", "c")
    work(jobs, a=50.0, b=30.0)
    for name in "ab":
        job(jobs, name).priority = 2
        arrive_all(job(jobs, name))
    jobs.set_priority(job(jobs, "c"), 2)
    assert job(jobs, "c").done.done_s == 30.0
    jobs.set_priority(job(jobs, "c"), 7)  # it has no peers
    assert job(jobs, "c").done.done_s == 30.0


def test_a_job_is_not_owed_the_time_in_which_nothing_of_it_waited() -> None:
    jobs = open_jobs("a", "b")
    a, b = job(jobs, "a"), job(jobs, "b")
    arrive_all(a)
    work(jobs, a=50.0)
    jobs.arrives(b)
    assert b.done.done_s == 50.0
    arrive(b, 0)
    work(jobs, a=20.0)
    jobs.arrives(b)  # it has waited meanwhile
    assert b.done.done_s == 50.0
    b.take(waiting_of(b)[0])
    jobs.arrives(b)
    assert b.done.done_s == 70.0


def test_a_job_without_requests_is_not_behind_a_new_one() -> None:
    """Or nobody else would join until the new job had as much work."""
    jobs = open_jobs("a", "b")
    a, b = job(jobs, "a"), job(jobs, "b")
    work(jobs, a=50.0)
    jobs.arrives(b)
    assert b.done.done_s == a.done.done_s == 50.0


def of_lengths(*lengths: int) -> OpenJobs:
    """Jobs of ten prompts each; every answer is estimated at 8 decode steps."""
    jobs = OpenJobs()
    for number, length in enumerate(lengths):
        prompts = [(100 * number + i,) * length for i in range(10)]
        one = JobState("abc"[number], plan_of(prompts), 1)
        arrive_all(one, max_decode_steps=8)
        jobs.add(one)
    return jobs


def joined(jobs: OpenJobs, kv_accounting: KvAccounting, tokens: int = 1000) -> str:
    """Jobs of the requests that join a step, in order."""
    now = EngineNow(tokens, 0, None, 0, 64, 100_000, 1)
    (group,) = jobs.by_priority()
    choice = choose(group, kv_accounting, now, jobs.scan)
    names = {id(each.done): each.job_id for each in group}
    return "".join(names[id(request.work)] for request in choice.requests)


def test_requests_join_by_the_work_of_their_jobs_not_by_their_number() -> None:
    # 110 and 10 tokens a prompt, and 8 decode steps: 118 and 18 tokens to compute.
    seen = joined(of_lengths(110, 10), KvAccounting(100_000), tokens=2000)
    assert seen[:9] == "abbbbbbba"
    assert sorted(seen) == list("aaaaaaaaaabbbbbbbbbb")


def test_nobody_overtakes_a_request_that_needs_much_when_it_is_its_turn() -> None:
    jobs, kv_accounting = of_lengths(110, 10), KvAccounting(150)
    kv_accounting.extend_forecast(100)
    work(jobs, a=0.0006)
    # Four of the other's, and then it does not fit.
    assert joined(jobs, kv_accounting) == "bbbb"
    running = kv_accounting.requests
    for request in running:
        request.prompt_s = request.charged_s  # as if all its work was done
    kv_accounting.remove(running[0])
    assert joined(jobs, kv_accounting) == ""  # the other's would fit
    for request in running[1:]:
        kv_accounting.remove(request)
    assert joined(jobs, kv_accounting)[0] == "a"


def test_waiting_requests_are_seen_as_one_item_of_all_their_tokens() -> None:
    jobs = open_jobs("a", "b")
    for each in jobs.each:
        arrive_all(each)
    view = WaitingView(["online"], jobs, num_offloaded=4)
    assert len(view) == 1 + 6 + 4
    online, backlog = view
    assert online == "online"
    assert backlog == (2 * 7, 0)
    jobs.remove(job(jobs, "a"))
    assert len(view) == 1 + 3 + 4
