"""A job whose plan comes to cover other requests while it runs, against sets and loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from scheduling_jobs import Prompt, job_of, plan_of, random_prompts, waiting_of

from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.scheduled_request import ScheduledRequest


@dataclass(eq=False)
class Req:
    """SGLang's request, as far as a plan that grows looks at it."""

    rid: str
    number: int
    prefix_len: int = 0
    output_ids: list[int] = field(default_factory=list)


class Drive:
    """Random steps of a scheduler whose plan changes, and the books done slowly.

    A lock on a prefix is its tokens.
    """

    def __init__(self, random: Random, page_size: int, *, dual: bool) -> None:
        self.random, self.page_size, self.dual = random, page_size, dual
        self.prompts = random_prompts(random, random.randint(1, 16), page_size)
        self.planned: list[int] = []
        self.job = job_of(self.new_plan([]), page_size)
        self.books = KvAccounting(10**6)
        self.books.extend_forecast(64)
        self.to_arrive = list(range(len(self.prompts)))
        random.shuffle(self.to_arrive)
        self.requests: dict[int, ScheduledRequest] = {}
        self.running: list[ScheduledRequest] = []
        self.offloaded: list[ScheduledRequest] = []
        self.over: set[int] = set()  # numbers that ended
        self.forgotten: set[int] = set()  # those of them that a plan left out
        self.locks: list[object] = []  # held, in the cache's own books

    # The plan -------------------------------------------------------------------------

    def new_plan(self, numbers: list[int]) -> JobPlan:
        position = list(range(len(numbers)))
        self.random.shuffle(position)
        prompts = [self.prompts[number] for number in numbers]
        # Sometimes the plan has another prompt than the engine.
        for place, number in enumerate(numbers):
            if number % 11 == 10:
                prompts[place] = (*prompts[place], 7)
        return plan_of(
            prompts,
            position=position,
            density=[1.0] * len(numbers) if self.dual else None,
            num_left=len(numbers) // 2,
            est_decode_steps=float(self.random.randint(1, 30)),
            numbers=numbers,
        )

    def extend(self) -> None:
        kind = self.random.randrange(3)
        everyone = range(len(self.prompts))
        more = {n for n in everyone if self.random.random() < 0.4}
        if kind == 0:  # grows
            chosen = more.union(self.planned)
        elif kind == 1:  # grows, and forgets those that ended
            chosen = more.union(self.planned) - self.over
        else:
            chosen = more
        # One that ended and was left out does not come back.
        lowest = min(self.planned, default=0)
        self.forgotten |= {n for n in self.over if n < lowest}
        chosen -= self.forgotten
        self.forgotten |= (self.over & set(self.planned)) - chosen
        self.planned = sorted(chosen)
        self.random.shuffle(self.planned)
        plan = self.new_plan(self.planned)
        before = {n: (r.running, r.steps) for n, r in self.requests.items()}
        estimates = {r: r.est_decode_steps for r in self.running}
        extension = self.job.extend(plan, self.cached_len)
        for request, own in extension.resized:
            self.books.resize(request, own)
        for lock in extension.released:
            self.locks.remove(lock)
        assert before == {n: (r.running, r.steps) for n, r in self.requests.items()}
        assert estimates == {r: r.est_decode_steps for r in self.running}
        assert set(extension.running) == {r for r in self.running if r.leaf >= 0}
        for request in self.requests.values():
            number = request.req.number
            known = number in chosen and number % 11 != 10
            assert (request.leaf >= 0) == known
            if known:
                assert plan.number[request.leaf] == number

        # Nobody relies on a prefix that is not computed yet.
        uses = self.job.uses
        for request in extension.running:
            for node in uses.path(request.node):
                if uses.depth[node] > self.cached_len(request):
                    assert node in uses.computing or uses.uses_left[node] == 0

    def cached_len(self, request: ScheduledRequest) -> int:
        return request.input_len if request.decoding else int(request.req.prefix_len)

    # A request's way ------------------------------------------------------------------

    def arrive(self) -> None:
        if self.to_arrive:
            number = self.to_arrive.pop()
            req = Req(f"r{number}", number)
            prompt = self.prompts[number]
            self.requests[number] = self.job.add(req, number, len(prompt), 40)

    def start(self) -> None:
        ready = [r for r in self.requests.values() if r.waiting]
        if not ready:
            return
        request, uses = self.random.choice(ready), self.job.uses
        node = uses.blocked_by(request.node)
        if node:
            self.job.follow(request, node)
            return
        kept = uses.kept_depth(request.node)
        self.job.backlog.remove(request)
        self.books.admit(request)
        request.req.prefix_len = kept
        self.running.append(request)
        if request.leaf >= 0:
            uses.start(request, kept)
            self.pin(request, kept)
            self.unpin(uses.spent(request))

    def pin(self, request: ScheduledRequest, num_tokens: int) -> None:
        uses, prompt = self.job.uses, self.prompts[request.req.number]
        for node in uses.path(request.node):
            if uses.depth[node] <= num_tokens and uses.wanted(node):
                lock = prompt[: int(uses.depth[node])]
                uses.pin(node, lock)
                self.locks.append(lock)

    def unpin(self, nodes: list[int]) -> None:
        for node in nodes:
            self.locks.remove(self.job.uses.unpin(node))

    def compute(self) -> None:
        computing = [r for r in self.running if not r.decoding]
        if not computing:
            return
        request = self.random.choice(computing)
        done = self.random.randint(request.req.prefix_len, request.input_len)
        if self.random.random() < 0.5:
            done = request.input_len
        request.req.prefix_len = done
        if request.leaf >= 0:
            nodes = self.job.uses.computed(request, done)
            self.pin(request, done)
            self.job.release_followers(nodes)
        if done == request.input_len:
            self.books.begin_decoding(request)

    def decode(self) -> None:
        outlived = self.books.count_decode_step()
        self.job.work.apply_estimates(list(outlived))

    def leave(self) -> None:
        if not self.running:
            return
        request = self.running.pop(self.random.randrange(len(self.running)))
        offloaded = request.decoding and self.random.random() < 0.4
        self.books.remove(request)
        if request.leaf >= 0:
            nodes = self.job.uses.leave(request, offloaded=offloaded)
            self.job.release_followers(nodes)
        if offloaded:
            self.offloaded.append(request)
            return
        self.job.work.ended(request)
        self.end(request)

    def resume(self) -> None:
        if not self.offloaded:
            return
        request = self.offloaded.pop(self.random.randrange(len(self.offloaded)))
        self.books.admit(request)
        self.books.begin_decoding(request)
        if request.leaf >= 0:
            self.job.uses.start(request, request.input_len)
            self.unpin(self.job.uses.spent(request))
        self.running.append(request)

    def skip(self) -> None:
        waiting = waiting_of(self.job)
        if waiting:
            request = self.random.choice(waiting)
            self.job.take(request)
            if request.leaf >= 0:
                self.job.uses.skip(request.leaf, request.node)
                self.job.work.ended(request)
                self.unpin(self.job.uses.spent(request))
            self.end(request)

    def end(self, request: ScheduledRequest) -> None:
        self.job.forget(request)
        del self.requests[request.req.number]
        self.over.add(request.req.number)

    # The books ------------------------------------------------------------------------

    def check(self) -> None:
        job, uses, plan = self.job, self.job.uses, self.job.plan
        leaf = {int(number): i for i, number in enumerate(plan.number)}
        differs = {number for number in leaf if number % 11 == 10}
        # A prompt that differs is known to be another one when it arrives.
        differs -= set(self.to_arrive)
        away = differs | self.over | {r.req.number for r in self.running}
        nodes = [n for n in range(1, len(plan.parent)) if uses.length[n]]
        for node in nodes:
            below = range(int(plan.leaf_begin[node]), int(plan.leaf_end[node]))
            numbers = {int(plan.number[at]) for at in below}
            assert uses.uses_left[node] == len(numbers - away)
            users = [r for r in self.running if r.leaf in below]
            assert uses.running[node] == len(users)
        locked = [n for n in nodes if uses.running[n]]
        assert uses.locked_tokens == sum(int(uses.length[n]) for n in locked)
        idle = [n for n in uses.pins if not uses.running[n]]
        assert uses.idle_tokens == sum(int(uses.length[n]) for n in idle)
        # No lock is lost, and each is of the prefix that its node stands for.
        assert sorted(map(str, uses.pins.values())) == sorted(map(str, self.locks))
        for node, lock in uses.pins.items():
            number = int(plan.number[plan.leaf_begin[node]])
            assert lock == self.prompts[number][: int(uses.depth[node])]
        for node, request in uses.computing.items():
            assert request in self.running
            assert node in request.leading
            assert uses.depth[node] > request.req.prefix_len
        for request in self.running:
            assert all(uses.computing[node] is request for node in request.leading)
        for node, followers in job._followers.items():
            assert node in uses.computing
            assert all(node in uses.path(r.node) for r in followers)
        waiting = [
            r
            for r in self.requests.values()
            if not r.running and r not in self.offloaded
        ]
        assert set(waiting_of(job)) == set(waiting)
        assert job.num_waiting == len(waiting)
        backlog = [r for r in waiting if r.waiting]
        first = min(backlog, key=lambda r: (r.position, r.arrival), default=None)
        assert job.backlog.first() is first
        for request in self.requests.values():
            if request.leaf >= 0:
                assert plan.position[request.leaf] == request.position
                own = request.input_len - int(uses.depth[plan.node[request.leaf]])
                assert request.own == own
        clock = self.books.clock
        held = sum(r.own + r.steps_done(clock) for r in self.running)
        assert sum(self.books.kv) == held
        furthest = uses.furthest()
        assert not furthest or furthest in idle

    def steps(self) -> list[Callable[[], None]]:
        often = [self.arrive, self.start, self.start, self.compute, self.leave]
        return [*often, self.resume, self.decode, self.skip, self.extend]


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_nothing_is_lost_when_a_plan_grows(page_size: int, dual: bool) -> None:
    for seed in range(120):
        random = Random(seed)
        drive = Drive(random, page_size, dual=dual)
        weights = [5, 6, 6, 8, 4, 2, 2, random.choice([0, 1]), random.choice([1, 3])]
        for _ in range(90):
            random.choices(drive.steps(), weights)[0]()
            drive.check()


PAIRS: list[Prompt] = [(1, 1, 0), (1, 1, 1), (2, 2, 0), (2, 2, 1)]


def grown(job: JobState, plan: JobPlan) -> list[ScheduledRequest]:
    return job.extend(plan, lambda request: request.req.prefix_len).running


def add(job: JobState, number: int, prompt: Prompt) -> ScheduledRequest:
    return job.add(Req(f"r{number}", number), number, len(prompt), 100)


def test_what_arrived_unplanned_finds_its_place() -> None:
    job = job_of(plan_of([]))
    requests = [add(job, number, prompt) for number, prompt in enumerate(PAIRS)]
    assert job.backlog.first() is requests[0]
    grown(job, plan_of(PAIRS, position=[3, 1, 2, 0], est_decode_steps=5.0))
    assert job.backlog.first() is requests[3]
    assert [(r.own, r.est_decode_steps) for r in requests] == [(1, 5)] * 4


def test_one_that_runs_alone_leads_those_who_come() -> None:
    """Its prefix is shared only since the plan grew, and it has not computed it."""
    job = job_of(plan_of(PAIRS[:1]))
    first = add(job, 0, PAIRS[0])
    job.backlog.remove(first)
    first.running = True
    job.uses.start(first, 0)
    assert first.leading == []
    assert grown(job, plan_of(PAIRS)) == [first]
    second = add(job, 1, PAIRS[1])
    assert first.leading == [job.uses.blocked_by(second.node)]
    first.req.prefix_len = len(PAIRS[0])
    grown(job, plan_of([*PAIRS, (3, 3)]))
    assert first.leading == []
    assert job.uses.blocked_by(second.node) == 0
    assert job.uses.kept_depth(second.node) == 2


def test_a_follower_goes_on_waiting_for_the_same_prefix() -> None:
    job = job_of(plan_of(PAIRS))
    leader, follower = add(job, 0, PAIRS[0]), add(job, 1, PAIRS[1])
    job.backlog.remove(leader)
    leader.running = True
    job.uses.start(leader, 0)
    job.follow(follower, job.uses.blocked_by(follower.node))
    grown(job, plan_of([(0, 0, 1), (0, 0, 2), *PAIRS], numbers=[8, 9, 0, 1, 2, 3]))
    assert job.num_followers == 1
    assert not job.backlog.count
    job.release_followers(job.uses.computed(leader, 3))
    assert job.backlog.first() is follower


def test_numbers_of_an_open_ended_job_grow_and_its_plan_does_not() -> None:
    job = job_of(plan_of([]))
    for begin in range(0, 4000, 4):
        numbers = range(begin, begin + 4)
        requests = [add(job, n, PAIRS[n % 4]) for n in numbers]
        grown(job, plan_of(PAIRS, numbers=list(numbers)))
        for request in requests:
            job.take(request)
            job.forget(request)
    assert len(job.plan.number) == 4
    assert len(job._leaves._leaf) == 4
    assert len(job._ended) <= 4


def test_time_is_linear_in_the_plan() -> None:
    n = 50_000
    prompts = [(i // 2, 1, i) for i in range(n)]
    job = job_of(plan_of(prompts[: n // 2]))
    for number in range(1000):
        add(job, number, prompts[number])
    plan = plan_of(prompts)
    begin = time.process_time()
    grown(job, plan)
    # Measured: 15 milliseconds.
    assert time.process_time() - begin < 0.5
