"""In which order, how many at a time and to which replica a job's requests are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from builders import CHAT, FakeEngine, make_body, make_machine, run
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch import job_planning, learning
from sglang_batch.config import POLICIES, OfflineBatchConfig
from sglang_batch.engine import PreparedRequest
from sglang_batch.job import Job
from sglang_batch.job_planning import JobPlanner
from sglang_batch.learning import MAX_REPLANS, Learning
from sglang_batch.planner.order import OrderSettings
from sglang_batch.planner.plan import Observed, make_plan
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.request import BatchRequestInput, RequestOutput
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.scheduling.line import LEFT, RIGHT
from sglang_batch.windows import Unsent, shares

DUAL = "dual-scan"


class Engine(FakeEngine):
    """Keeps every plan it was told of, and can be slow or broken when it is told."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.openings: list[list[JobPlan]] = []
        self.slow: dict[int, asyncio.Event] = {}
        self.broken: dict[int, Exception] = {}
        self.routed: dict[str, int | None] = {}

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        nth = len(self.openings)
        self.openings.append(list(plans))
        self._note()
        if nth in self.slow:
            await self.slow[nth].wait()
        if nth in self.broken:
            raise self.broken[nth]
        await super().open_job(job_id, plans)

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        self.routed[prepared.custom_id] = replica
        return await super().execute(prepared, replica)

    def side(self, custom_id: str) -> int:
        plan = self.openings[-1][0]
        turn = plan.turn[plan.leaf[number_of(custom_id)]]
        return RIGHT if plan.density is not None and turn >= plan.num_left else LEFT

    def running_on(self, side: int) -> list[str]:
        return [each for each in self.running if self.side(each) == side]


class Answers(dict[str, RequestOutput]):
    def __call__(self, request: BatchRequestInput, output: RequestOutput) -> None:
        assert request.custom_id not in self
        self[request.custom_id] = output


def number_of(custom_id: str) -> int:
    return int(custom_id[1:])


def make_request(index: int, text: str, **fields: Any) -> BatchRequestInput:
    body = json.dumps(make_body(text, **fields)).encode()
    return BatchRequestInput(index, f"r{index}", CHAT, body)


def unknown(count: int, *, longest: int = 40) -> list[BatchRequestInput]:
    """Requests whose answers, as long as their prompts, are not known."""
    return [
        make_request(i, f"{i % 7} {'y' * (i * 11 % longest)} {i}") for i in range(count)
    ]


def two_kinds(count: int, *, known: bool = True) -> list[BatchRequestInput]:
    """Every second one long and answered at once, the others short with long answers."""
    requests = []
    for i in range(count):
        text = f"{i} " + "x" * 3000 if i % 2 else f"short {i}"
        most = 1 if i % 2 else 900
        requests.append(make_request(i, text, max_tokens=most, ignore_eos=known))
    return requests


def make_job(
    engine: FakeEngine,
    answers: Any,
    requests: Sequence[BatchRequestInput],
    *,
    policy: str = DUAL,
    render_lookahead: int = 1,
    **config: Any,
) -> Job:
    settings = OfflineBatchConfig(
        policy=policy, render_lookahead=render_lookahead, **config
    )
    return Job("batch_1", requests, range(len(requests)), engine, settings, answers)


def run_job(
    engine: FakeEngine, requests: Sequence[BatchRequestInput], **config: Any
) -> Answers:
    answers = Answers()
    run(make_job(engine, answers, requests, **config).run())
    assert len(answers) == len(requests)
    return answers


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the planner before anything waits for it."""
    for policy in ("auto", DUAL):
        for shards in (1, 2):
            planner_of(two_kinds(8), policy, shards).plans()


async def settle() -> None:
    """Let everything that can happen now happen."""
    for _ in range(30):
        await asyncio.sleep(0)


async def until_planned(engine: Engine, count: int) -> None:
    """Until so many plans were made, in threads, and adopted."""
    await engine.until(lambda: len(engine.openings) == count)
    await settle()


def everything(requests: Sequence[BatchRequestInput]) -> list[str]:
    return [request.custom_id for request in requests]


# Two windows ----------------------------------------------------------------------


@pytest.mark.parametrize(("max_inflight", "left", "right"), [(6, 3, 3), (7, 4, 3)])
def test_an_order_with_two_ends_has_both_sides_in_the_engine(
    max_inflight: int, left: int, right: int
) -> None:
    requests = two_kinds(30)
    engine = Engine()
    engine.hold(everything(requests))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, max_inflight=max_inflight)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, max_inflight)
        for num_answered in range(1, 8):
            assert len(engine.running_on(LEFT)) == left
            assert len(engine.running_on(RIGHT)) == right
            # Whichever side an answer is of, the next one is of the same.
            side = num_answered % 2
            engine.release([min(engine.running_on(side), key=number_of)])
            await engine.until_stalled(num_answered, max_inflight)
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 30
    assert engine.max_running == max_inflight


def test_each_side_is_sent_from_its_end_of_the_order() -> None:
    engine = Engine()
    run_job(engine, two_kinds(30), max_inflight=2)
    plan = engine.openings[0][0]
    turns = [int(plan.turn[plan.leaf[number_of(each)]]) for each in engine.executed]
    assert [t for t in turns if t < plan.num_left] == list(range(plan.num_left))
    right = [t for t in turns if t >= plan.num_left]
    assert right == list(range(29, plan.num_left - 1, -1))
    assert 0 < plan.num_left < 30


def test_a_side_that_is_exhausted_leaves_its_window_to_the_other() -> None:
    requests = two_kinds(30)
    engine = Engine()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, max_inflight=6)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 6)
        num_answered = 0
        while engine.running_on(RIGHT):
            engine.release(engine.running_on(RIGHT)[:1])
            num_answered += 1
            await engine.until_stalled(num_answered, 6)
        assert len(engine.running_on(LEFT)) == 6
        engine.release()
        await work

    run(scenario())


def test_by_default_each_side_has_the_engines_window() -> None:
    engine = Engine(default_max_inflight=4)
    run_job(engine, two_kinds(30), render_lookahead=8)
    assert engine.max_running == 8
    engine = Engine(default_max_inflight=4)
    run_job(engine, two_kinds(30), policy="dfs", render_lookahead=8)
    assert engine.max_running == 4


@pytest.mark.parametrize("policy", [DUAL, "dfs", "auto"])
def test_requests_that_are_too_large_come_last(policy: str) -> None:
    requests = two_kinds(20)
    requests[3] = make_request(3, "x" * 200, max_tokens=99_990, ignore_eos=True)
    requests[4] = make_request(4, "x" * 100_001)
    engine = Engine()
    run_job(engine, requests, policy=policy, max_inflight=2)
    assert engine.executed[-2:] == ["r3", "r4"]
    assert engine.openings[0][0].leaf[[3, 4]].tolist() == [-1, -1]


@pytest.mark.parametrize("lookahead", [1, 2, 9])
def test_no_more_is_rendered_ahead_than_allowed(lookahead: int) -> None:
    requests = two_kinds(40)
    engine = Engine()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(
            engine, Answers(), requests, max_inflight=4, render_lookahead=lookahead
        )
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 4)
        await settle()
        ahead = engine.num_prepared - len(requests) - 4
        assert ahead <= max(2, lookahead)  # one for each side at least
        engine.release()
        await work

    run(scenario())


def test_the_stock_scheduler_gets_the_order_of_a_simulated_run() -> None:
    requests = two_kinds(30)
    engine = Engine()
    run_job(engine, requests, scheduler="stock", max_inflight=4)
    assert engine.openings[0][0].density is None
    planned = plan_requests(requests)
    expected = make_plan(planned, engine.machine, DUAL)
    assert [number_of(each) for each in engine.executed] == expected.order.tolist()


# The sample -----------------------------------------------------------------------


def plan_requests(requests: Sequence[BatchRequestInput]) -> PlanRequests:
    """What the fake engine renders them to."""
    prompts, most, known = [], [], []
    for request in requests:
        body = json.loads(request.body)
        prompts.append(list(body["messages"][0]["content"].encode()))
        most.append(body.get("max_tokens", 1 << 24))
        known.append(most[-1] if body.get("ignore_eos") else UNKNOWN)
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in prompts])])
    return PlanRequests(
        np.array([t for p in prompts for t in p], np.int32),
        offsets.astype(np.int64),
        np.array(most, np.int32),
        np.array(known, np.int32),
    )


def planner_of(
    requests: Sequence[BatchRequestInput], policy: str = DUAL, num_shards: int = 1
) -> JobPlanner:
    return JobPlanner(
        plan_requests(requests),
        np.arange(len(requests)),
        make_machine(),
        OfflineBatchConfig(policy=policy),
        num_shards,
    )


@pytest.mark.parametrize("policy", [DUAL, "lpt", "prefix-groups", "auto"])
def test_the_sample_is_sent_first_and_the_rest_does_not_wait_for_it(
    policy: str,
) -> None:
    requests = unknown(100)
    sample = {f"r{i}" for i in planner_of(requests, policy).sample}
    assert 5 <= len(sample) <= 10
    engine = Engine()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy=policy, max_inflight=40)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 40)
        first = [each for each in engine.executed if engine.side(each) == LEFT]
        assert set(first[: len(sample)]) == sample
        engine.release(list(sample)[1:])
        await engine.until_stalled(len(sample) - 1, 40)
        await settle()
        assert len(engine.openings) == 1
        engine.release(list(sample)[:1])
        await until_planned(engine, 2)
        engine.release()
        await work

    run(scenario())
    first, second = engine.openings[0][0], engine.openings[1][0]
    assert first.same_requests(second)
    # Answers are as long as prompts here, some 30 tokens, and not the default 256.
    assert first.steps.mean() > 200
    assert second.steps.mean() < 60
    if policy == "auto":
        assert first.policy == "dfs"
        assert {each[0].policy for each in engine.openings[1:]} == {second.policy}
    else:
        assert first.policy == second.policy == policy


@pytest.mark.parametrize("policy", ["dfs", "dfs-weight", "lof", "random"])
def test_orders_that_do_not_look_at_lengths_have_no_sample(policy: str) -> None:
    requests = unknown(100)
    engine = Engine()
    run_job(engine, requests, policy=policy, max_inflight=1)
    assert planner_of(requests, policy).sample.tolist() == []
    plan = make_plan(plan_requests(requests), engine.machine, policy)
    assert [number_of(each) for each in engine.executed] == plan.order.tolist()


def test_what_is_not_sent_follows_the_new_plan() -> None:
    requests = unknown(300)
    engine = Engine()
    sample = [f"r{i}" for i in planner_of(requests, "lpt").sample]
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="lpt", max_inflight=40)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 40)
        engine.release(sample)
        await until_planned(engine, 2)
        await engine.until_stalled(len(sample), 40)
        num_sent = len(engine.executed)
        # What was sent before the plan came keeps its place.
        before, after = engine.openings[0][0], engine.openings[1][0]
        for each in engine.executed[num_sent - 40 :]:
            engine.release([each])
        await engine.until_stalled(len(sample) + 40, 40)
        fresh = engine.executed[num_sent : num_sent + 40]
        for plan, sorted_by_it in ((before, False), (after, True)):
            turns = [int(plan.turn[plan.leaf[number_of(each)]]) for each in fresh]
            assert (turns == sorted(turns)) is sorted_by_it
        engine.release()
        await work

    run(scenario())


@pytest.mark.parametrize("policy", [DUAL, "lpt", "auto"])
def test_a_sample_that_fails_teaches_nothing_and_is_not_waited_for(policy: str) -> None:
    requests = unknown(100)
    sample = [f"r{i}" for i in planner_of(requests, policy).sample]
    engine = Engine(failing=dict.fromkeys(sample, 500))
    engine.hold(set(everything(requests)) - set(sample))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=10)
        work = asyncio.ensure_future(job.run())
        await until_planned(engine, 2)
        engine.release()
        await work

    run(scenario())
    assert {i for i in answers if not answers[i].ok} == set(sample)
    assert np.all(engine.openings[1][0].steps > 200)
    if policy == "auto":
        assert engine.openings[0][0].policy == "dfs"


def test_a_sample_that_cannot_be_rendered_a_second_time_is_not_waited_for() -> None:
    requests = unknown(100)
    sample = [f"r{i}" for i in planner_of(requests).sample]

    class Forgetful(Engine):
        async def prepare(
            self, request: BatchRequestInput, rid: str, *, tokenize: bool
        ) -> PreparedRequest | RequestOutput:
            if not tokenize:
                self._rejected = set(sample)
            return await super().prepare(request, rid, tokenize=tokenize)

    engine = Forgetful()
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, max_inflight=4)
        work = asyncio.ensure_future(job.run())
        await until_planned(engine, 2)
        engine.release()
        await work

    run(scenario())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_of_known_lengths_is_planned_once(policy: str) -> None:
    engine = Engine()
    run_job(engine, two_kinds(200), policy=policy, max_inflight=10)
    assert len(engine.openings) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_job_is_planned_once(policy: str) -> None:
    engine = Engine()
    run_job(engine, unknown(63), policy=policy, max_inflight=10)
    assert len(engine.openings) == 1
    assert engine.openings[0][0].policy != "auto"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_of_one_request(policy: str) -> None:
    engine = Engine(num_replicas=2)
    run_job(engine, unknown(1), policy=policy)
    assert engine.closed == ["batch_1"]


# Later plans ----------------------------------------------------------------------


def test_estimates_follow_the_answers_at_doubling_distances() -> None:
    requests = unknown(1200)
    engine = Engine()
    run_job(engine, requests, policy="dfs", max_inflight=4)
    assert 3 <= len(engine.openings) - 1 <= MAX_REPLANS
    means = [plans[0].steps.mean() for plans in engine.openings]
    true = np.mean([len(p) for p in prompts_of(requests)]) - 1
    assert abs(means[-1] - true) < abs(means[0] - true) / 10
    first = engine.openings[0][0]
    assert all(first.same_requests(plans[0]) for plans in engine.openings)


def prompts_of(requests: Sequence[BatchRequestInput]) -> list[bytes]:
    return [
        json.loads(request.body)["messages"][0]["content"].encode()
        for request in requests
    ]


def test_answers_after_one_that_is_missing_are_not_learnt_from() -> None:
    requests = unknown(400)
    engine = Engine()
    order = make_plan(plan_requests(requests), engine.machine, "dfs").order
    slowest = f"r{order[1]}"
    engine.hold([slowest])

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="dfs", max_inflight=4)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(399, 1)
        await settle()
        assert len(engine.openings) == 1
        engine.release()
        await work

    run(scenario())


def test_one_plan_is_made_at_a_time() -> None:
    requests = unknown(600)
    engine = Engine()
    engine.slow[1] = asyncio.Event()

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests, policy="dfs", max_inflight=4)
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(engine.answered) > 590)
        assert len(engine.openings) == 2
        engine.slow[1].set()
        await work

    run(scenario())


def test_a_job_whose_last_answer_comes_does_not_wait_for_a_plan() -> None:
    requests = unknown(100)
    sample = [f"r{i}" for i in planner_of(requests).sample]
    engine = Engine()
    engine.slow[1] = asyncio.Event()
    engine.hold(set(everything(requests)) - set(sample))
    answers = Answers()

    async def scenario() -> None:
        work = asyncio.ensure_future(make_job(engine, answers, requests).run())
        await engine.until(lambda: len(engine.openings) == 2)
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 100
    assert engine.closed == ["batch_1"]


def test_stopping_while_a_plan_is_made() -> None:
    requests = unknown(100)
    engine = Engine()
    engine.slow[1] = asyncio.Event()
    sample = [f"r{i}" for i in planner_of(requests).sample]
    engine.hold(set(everything(requests)) - set(sample))

    async def scenario() -> None:
        stop = asyncio.Event()
        work = asyncio.ensure_future(
            make_job(engine, Answers(), requests, max_inflight=20).run(stop)
        )
        await engine.until(
            lambda: len(engine.openings) == 2 and len(engine.running) == 20
        )
        stop.set()
        await work

    run(scenario())
    assert engine.running == set()
    assert engine.closed == ["batch_1"]
    assert len(engine.aborted) == 20


def test_stopping_while_the_job_is_opened_closes_it() -> None:
    engine = Engine()
    engine.slow[0] = asyncio.Event()

    async def scenario() -> None:
        stop = asyncio.Event()
        job = make_job(engine, Answers(), unknown(10))
        work = asyncio.ensure_future(job.run(stop))
        await engine.until(lambda: len(engine.openings) == 1)
        stop.set()
        await work

    run(scenario())
    assert engine.executed == []
    assert engine.closed == ["batch_1"]


@pytest.mark.parametrize("nth", [0, 1])
def test_an_error_of_opening_a_job_is_raised_as_it_is(nth: int) -> None:
    requests = unknown(100)
    engine = Engine()
    engine.broken[nth] = ConnectionError("the scheduler died")
    sample = [f"r{i}" for i in planner_of(requests).sample]
    engine.hold(set(everything(requests)) - set(sample))
    with pytest.raises(ConnectionError, match="the scheduler died"):
        run(make_job(engine, Answers(), requests, max_inflight=20).run())
    assert engine.running == set()
    assert bool(engine.executed) is bool(nth)


@pytest.mark.parametrize("policy", [DUAL, "auto", "dfs"])
def test_the_same_answers_make_the_same_plans(policy: str) -> None:
    runs = []
    for _ in range(2):
        engine = Engine()
        run_job(engine, unknown(300), policy=policy, max_inflight=1, seed=5)
        runs.append(engine)
    first, second = (engine.openings for engine in runs)
    # When a plan is ready is a matter of time. Where it changes the order, what is
    # answered after it does too.
    same = None if policy == "dfs" else 2
    for a, b in zip(first[:same], second[:same], strict=False):
        for x, y in zip(a, b, strict=True):
            assert np.array_equal(x.turn, y.turn)
            assert np.array_equal(x.steps, y.steps)
            assert x.policy == y.policy


# Replicas -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dfs", DUAL, "lpt", "auto"])
def test_each_replica_is_given_a_shard_and_sent_that(policy: str) -> None:
    requests = unknown(120)
    engine = Engine(num_replicas=3)
    engine.hold(everything(requests))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=30)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, 30)
        plans = engine.openings[0]
        assert len(plans) == 3
        for each in engine.executed:
            leaves = [int(padded(plan.leaf, 120)[number_of(each)]) for plan in plans]
            assert [leaf >= 0 for leaf in leaves].index(True) == engine.routed[each]
        routed = [engine.routed[each] for each in engine.executed]
        assert [routed.count(replica) for replica in range(3)] == [10, 10, 10]
        engine.release()
        await work
        whole = planner_of(requests).tree.prefix_sharing_ratio
        assert job.optimal_prefix_sharing_ratio == whole

    run(scenario())
    assert len(answers) == 120
    for plans in engine.openings:
        planned = sum(padded(plan.leaf, 120) >= 0 for plan in plans)
        assert planned.tolist() == [1] * 120
        for plan, first in zip(plans, engine.openings[0], strict=True):
            assert plan.same_requests(first)


def padded(leaf: Any, length: int) -> Any:
    return np.concatenate([leaf, np.full(length - len(leaf), -1)])


@pytest.mark.parametrize("policy", ["dfs", DUAL])
def test_a_replica_without_work_takes_the_far_end_of_anothers(policy: str) -> None:
    requests = two_kinds(80)
    engine = Engine(num_replicas=2)
    shards = [
        {f"r{i}" for i in np.flatnonzero(shard.for_scheduler(make_machine()).leaf >= 0)}
        for shard in planner_of(requests, policy, 2).plans()
    ]
    engine.hold(shards[0])
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, requests, policy=policy, max_inflight=8)
        work = asyncio.ensure_future(job.run())
        await engine.until(lambda: len(engine.running) == 8)
        await settle()
        assert shards[1] <= set(engine.answered)
        assert all(engine.routed[each] == 1 for each in shards[1])
        stolen = [each for each in engine.executed if engine.routed[each] == 1]
        stolen = stolen[len(shards[1]) :]
        assert len(stolen) == 4 and set(stolen) <= shards[0]
        # In one piece, the last of a side.
        plan = engine.openings[0][0]
        turns = sorted(int(plan.turn[plan.leaf[number_of(each)]]) for each in stolen)
        assert turns == list(range(turns[0], turns[0] + 4))
        middle = plan.num_left if policy == DUAL else plan.num_requests
        assert middle in (turns[0], turns[-1] + 1)
        # The replica that is stuck has its share and no more.
        held = [each for each in engine.running if engine.routed[each] == 0]
        assert len(held) == 4
        engine.release(stolen)
        await engine.until(lambda: set(stolen) <= set(engine.answered))
        engine.release()
        await work

    run(scenario())
    assert len(answers) == 80
    assert sorted(engine.executed) == sorted(everything(requests))


def test_the_input_order_leaves_the_replica_to_the_engine() -> None:
    engine = Engine(num_replicas=3)
    run_job(engine, unknown(30), policy="fcfs", max_inflight=7, render_lookahead=8)
    assert set(engine.routed.values()) == {None}
    assert engine.max_running == 7
    assert engine.executed == [f"r{i}" for i in range(30)]


def test_a_window_smaller_than_the_replicas_is_not_passed() -> None:
    requests = unknown(60)
    engine = Engine(num_replicas=4)
    run_job(engine, requests, policy="dfs", max_inflight=2)
    assert engine.max_running == 2


def test_fewer_requests_than_replicas() -> None:
    engine = Engine(num_replicas=4)
    run_job(engine, unknown(2), policy="dfs")
    assert len(engine.openings[0]) == 4


# Whatever happens ------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small jobs have samples and new plans too."""
    monkeypatch.setattr(job_planning, "MIN_SAMPLED", 4)
    monkeypatch.setattr(learning, "_MIN_ANSWERS", 2)
    yield


@pytest.mark.usefixtures("eager")
def test_every_request_is_answered_once_whatever_happens() -> None:
    @settings(deadline=None, max_examples=80)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        count = data.draw(st.integers(2, 30))
        known = data.draw(st.booleans())
        requests = data.draw(
            st.sampled_from([unknown(count), two_kinds(count, known=known)])
        )
        ids = everything(requests)
        window = data.draw(st.integers(1, 9))
        rejected = data.draw(st.sets(st.sampled_from(ids), max_size=3))
        failing = dict.fromkeys(data.draw(st.sets(st.sampled_from(ids))), 500)
        engine = Engine(
            rejected=rejected,
            failing=failing,
            num_replicas=data.draw(st.integers(1, 3)),
        )
        engine.hold(ids)
        answers = Answers()

        async def scenario() -> None:
            job = make_job(
                engine,
                answers,
                requests,
                policy=data.draw(st.sampled_from(POLICIES)),
                max_inflight=window,
                render_lookahead=data.draw(st.integers(1, 5)),
            )
            work = asyncio.ensure_future(job.run())
            num_sent = count - len(rejected)
            for num_answered in range(num_sent):
                expected = min(window, num_sent - num_answered)
                await engine.until_stalled(num_answered, expected)
                engine.release([data.draw(st.sampled_from(sorted(engine.running)))])
            await work

        run(scenario())
        assert set(answers) == set(ids)
        assert engine.max_running <= window
        assert engine.closed == ["batch_1"]

    check()


# Plans ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [unknown, two_kinds])
@pytest.mark.parametrize("observed", [False, True])
def test_a_job_is_planned_as_the_planner_does(
    policy: str, kind: Any, observed: bool
) -> None:
    requests = kind(50)  # too few for a sample
    planner = planner_of(requests, policy)
    answers = None
    if observed:
        numbers = np.arange(0, 50, 2)
        answers = Observed(numbers, np.full(25, 17, np.int32))
        planner.observe(numbers, answers.output_len)
    expected = make_plan(
        plan_requests(requests),
        make_machine(),
        policy,
        settings=OrderSettings(seed=0),
        observed=answers,
    )
    (found,) = planner.plans()
    assert found.plan.policy == expected.policy
    assert np.array_equal(found.plan.scan.requests, expected.scan.requests)
    assert found.plan.scan.num_left == expected.scan.num_left
    assert np.array_equal(
        found.plan.estimates.est_output_len, expected.estimates.est_output_len
    )
    left, right = found.sides
    assert sorted([*left, *right]) == list(range(50))


def test_answers_of_several_sequences_teach_nothing() -> None:
    requests = [make_request(i, f"prompt {i}", max_tokens=10) for i in range(100)]
    planner = planner_of(requests)
    planner.observe(np.arange(100), np.full(100, 40, np.int32))
    assert planner.plans()[0].plan.estimates.est_output_len.max() == 10
    planner.observe(np.arange(100), np.full(100, 4, np.int32))
    assert planner.plans()[0].plan.estimates.est_output_len.max() == 4


# What may be learnt from ------------------------------------------------------------


def test_only_complete_beginnings_of_each_way_are_taken(eager: None) -> None:
    heard = Learning(np.zeros(0, np.int64), 10)
    for number in range(4):
        heard.sent("left", number)
        heard.sent("right", 10 + number)
    for number, length in ((1, 5), (10, 7), (11, None), (13, 9)):
        heard.ended("left" if number < 10 else "right", number, length)
    assert heard.due  # two ended at the beginning of the right
    numbers, lengths = heard.take()
    assert numbers.tolist() == [10] and lengths.tolist() == [7]
    assert not heard.due
    heard.ended("left", 0, 4)
    assert heard.due  # twice as many as then
    numbers, lengths = heard.take()
    assert numbers.tolist() == [0, 1] and lengths.tolist() == [4, 5]


def test_a_sample_is_waited_for_and_no_longer(eager: None) -> None:
    heard = Learning(np.array([3, 4, 5]), 10)
    for number in (3, 4, 6, 7, 8):
        heard.sent(0, number)
    for number in (3, 6, 7, 8):
        heard.ended(0, number, 1)
    heard.never_sent(5)
    assert not heard.due
    heard.ended(0, 4, None)
    assert heard.due
    assert heard.take()[0].tolist() == [3, 6, 7, 8]


def test_nothing_is_learnt_where_all_is_known(eager: None) -> None:
    heard = Learning(np.zeros(0, np.int64), 0)
    for number in range(100):
        heard.sent(0, number)
        heard.ended(0, number, 1)
    assert not heard.due


# Windows --------------------------------------------------------------------------


def test_what_is_unsent_is_taken_from_both_ends() -> None:
    unsent = Unsent(np.arange(5))
    assert unsent.first(2) == [0, 1]
    unsent.drop_first()
    assert unsent.take_last(2).tolist() == [3, 4]
    assert unsent.first(9) == [1, 2] and len(unsent) == 2
    assert unsent.take_last(9).tolist() == [1, 2]
    assert not unsent


def test_a_window_is_divided_fairly() -> None:
    assert shares(7, 3) == [3, 2, 2]
    assert shares(1, 2) == [1, 0]
