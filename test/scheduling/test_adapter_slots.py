"""Adapters in few slots: who joins, who waits aside, and who makes room."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import pytest
from scheduling_jobs import MACHINE, Req, waiting_of

from sglang_batch.planner.requests import ONLINE
from sglang_batch.scheduling.adapter_slots import AdapterSlots
from sglang_batch.scheduling.job_plan import unplanned
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.next_step import EngineNow, choose
from sglang_batch.scheduling.open_jobs import OpenJobs
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

SLOTS = 3
STEPS = 4  # that each request runs


class Engine:
    """Runs requests of jobs and online ones, each for a few steps.

    loads: adapters in the order in which they came into memory.
    """

    def __init__(self, slots: int = SLOTS, rows: int = 6) -> None:
        self.jobs = OpenJobs()
        self.kv_accounting = KvAccounting(100_000, 1, mixed=True)
        self.memory: list[str | None] = []
        self.loads: list[str | None] = []
        self.most, self.rows = slots, rows
        self.slots = AdapterSlots(
            self.jobs,
            lambda adapters: len(adapters) <= slots,
            lambda: self.kv_accounting.requests,
            self.make_room,
        )
        self.left: dict[ScheduledRequest, int] = {}
        self.job_of: dict[ScheduledRequest, JobState] = {}
        self.online: list[ScheduledRequest] = []

    def make_room(self, needed: Collection[str | None]) -> None:
        missing = sum(each not in self.memory for each in needed)
        for each in [each for each in self.memory if each not in needed]:
            if missing > self.most - len(self.memory):
                self.memory.remove(each)

    def open(
        self, name: str, adapters: list[str | None], priority: int = 0
    ) -> JobState:
        job = JobState(name, unplanned(MACHINE), 1)
        self.jobs.add(job)
        self.jobs.set_priority(job, priority)
        for number, adapter in enumerate(adapters):
            request = job.add(Req(f"{name}-{number}"), number, 10, 8, adapter=adapter)
            self.job_of[request] = job
        return job

    def arrive_online(self, adapter: str | None) -> None:
        req = Req(f"online-{len(self.left)}-{len(self.online)}")
        self.online.append(
            ScheduledRequest(req, -1, 0, 0, 10, 10, 8, 8, ONLINE, adapter=adapter)
        )

    def step(self) -> int:
        """The number of requests that run in it."""
        self.slots.begin_step()
        while self.online and self.slots.online_may_join(self.online[0]):
            request = self.online.pop(0)
            self.kv_accounting.admit(request)
            self.left[request] = STEPS
        for jobs in self.jobs.by_priority():
            now = EngineNow(
                step_tokens=1000,
                decode_rows=len(self.left),
                chunk=None,
                chunk_left=0,
                rows=self.rows - len(self.left),
                room=50_000,
                page_size=1,
                has_adapter=self.slots.may_join,
            )
            choice = choose(jobs, self.kv_accounting, now, self.jobs.scan)
            self.left |= dict.fromkeys(choice.requests, STEPS)
            if any(job.backlog.count for job in jobs):
                break
        running = {request.adapter for request in self.left}
        assert len(running) <= self.most
        for adapter in running:
            if adapter not in self.memory:
                self.loads.append(adapter)
                self.memory.append(adapter)
        assert len(self.memory) <= self.most
        ran = len(self.left)
        for request in list(self.left):
            self.left[request] -= 1
            if not self.left[request]:
                self.end(request)
        return ran

    def end(self, request: ScheduledRequest) -> None:
        del self.left[request]
        self.kv_accounting.remove(request)
        if request in self.job_of:
            self.job_of.pop(request).forget(request)

    def run(self) -> None:
        idle = 0
        while self.left or self.job_of or self.online:
            idle = 0 if self.step() else idle + 1
            assert idle < 3, "nothing runs, though requests wait"


def mixed(random: Random, *adapters: str | None, each: int = 20) -> list[str | None]:
    return random.sample([*adapters] * each, len(adapters) * each)


@pytest.mark.parametrize("seed", range(5))
def test_an_adapter_is_loaded_once_whatever_the_order(seed: int) -> None:
    engine = Engine()
    names = [f"a{i}" for i in range(8)]
    engine.open("job", mixed(Random(seed), None, *names))
    engine.run()
    assert sorted(map(str, engine.loads)) == sorted(["None", *names])


def test_an_online_request_gets_the_next_slot() -> None:
    engine = Engine()
    engine.open("job", mixed(Random(1), "a", "b", "c", each=200))
    for _ in range(5):
        engine.step()
    engine.arrive_online("d")
    steps = 0
    while engine.online:
        engine.step()
        steps += 1
    assert steps <= STEPS + 2
    engine.run()
    # One made room, and came back.
    assert len(engine.loads) == 5


def test_a_drained_adapter_goes_on_if_the_online_request_is_gone() -> None:
    engine = Engine()
    engine.open("job", mixed(Random(1), "a", "b", "c", "d", each=50))
    for _ in range(3):
        engine.step()
    engine.arrive_online("e")
    engine.step()
    engine.step()
    engine.online.clear()  # aborted
    engine.run()


def test_a_job_without_a_slot_gets_one_of_a_job_with_several() -> None:
    engine = Engine()
    engine.open("first", mixed(Random(1), "a", "b", "c", "d", each=200))
    for _ in range(5):
        engine.step()
    second = engine.open("second", ["z"] * 10)
    for _ in range(2 * STEPS):
        engine.step()
    assert "z" in engine.loads
    while len(second):
        engine.step()
    assert len(engine.job_of) > 500  # the first job is far from its end
    engine.run()
    assert len(engine.loads) == 6


def test_a_job_of_higher_priority_gets_slots_of_others() -> None:
    engine = Engine()
    engine.open("low", mixed(Random(1), "a", "b", "c", each=300))
    for _ in range(5):
        engine.step()
    high = engine.open("high", mixed(Random(2), "x", "y", "z", each=10), priority=1)
    steps = 0
    while len(high):
        engine.step()
        steps += 1
    assert steps <= 30 // engine.rows * STEPS + 4 * STEPS
    engine.run()


def test_requests_that_wait_for_an_adapter_can_be_taken() -> None:
    engine = Engine(slots=1)
    job = engine.open("job", ["a", "b", "b"])
    engine.step()
    assert job.num_waiting == job.num_without_adapter == 2
    assert job.waiting_tokens == 20 and len(waiting_of(job)) == 2
    for request in waiting_of(job):
        job.take(request)
        engine.job_of.pop(request).forget(request)
    assert job.num_waiting == 0 and job.adapters == {"a": 1}
    engine.run()
    assert engine.loads == ["a"]


@pytest.mark.parametrize("seed", range(30))
def test_everything_ends(seed: int) -> None:
    random = Random(seed)
    engine = Engine(slots=random.randint(1, 3), rows=random.randint(1, 6))
    names = [None, *(f"a{i}" for i in range(6))]
    for number in range(random.randint(1, 3)):
        some = random.sample(names, random.randint(1, len(names)))
        engine.open(f"job{number}", mixed(random, *some, each=8), random.randint(0, 1))
    idle = 0
    while engine.left or engine.job_of or engine.online:
        if random.random() < 0.1:
            engine.arrive_online(random.choice(names))
        if random.random() < 0.05:
            engine.online.clear()
        idle = 0 if engine.step() else idle + 1
        assert idle < 4
