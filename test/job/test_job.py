"""A job over an engine that records its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from builders import CHAT, Answers, answer_text, ids_of, make_requests, run
from example_counts import examples
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.batch_api.lines import result_line
from sglang_batch.config import POLICIES, OfflineBatchConfig
from sglang_batch.job import rendering
from sglang_batch.job.job import Job, JobOptions
from sglang_batch.request import BatchRequestInput, RequestOutput, engine_request_id

TEXTS = ["b x", "a 1", "b", "", "a 1", "a", "c", "b y"]
DFS_ORDER = ["r3", "r5", "r1", "r4", "r2", "r0", "r7", "r6"]


def make_job(
    engine: FakeEngine,
    answers: Any,
    texts: Sequence[str] = TEXTS,
    todo: Sequence[int] | None = None,
    **config: Any,
) -> Job:
    return Job(
        "batch_1",
        make_requests(texts),
        range(len(texts)) if todo is None else todo,
        engine,
        OfflineBatchConfig(**config),
        answers,
    )


def run_job(engine: FakeEngine, *args: Any, **config: Any) -> Answers:
    answers = Answers()
    run(make_job(engine, answers, *args, **config).run())
    return answers


# Order --------------------------------------------------------------------------


def test_dfs_sends_prompts_in_the_order_of_their_tokens() -> None:
    engine = FakeEngine()
    answers = run_job(engine, max_inflight=1)
    assert engine.executed == DFS_ORDER
    assert len(answers) == len(TEXTS)


def test_the_order_of_sending_holds_with_many_in_flight() -> None:
    engine = FakeEngine()
    run_job(engine, max_inflight=5, render_lookahead=3)
    assert engine.executed == DFS_ORDER


def test_fcfs_sends_in_the_order_of_the_input_and_renders_once() -> None:
    engine = FakeEngine()
    run_job(engine, policy="fcfs")
    assert engine.executed == ids_of(range(len(TEXTS)))
    assert engine.num_prepared == len(TEXTS)


@pytest.mark.parametrize("lookahead", [1, 2, 100])
def test_lookahead_does_not_change_the_order(lookahead: int) -> None:
    engine = FakeEngine()
    run_job(engine, max_inflight=2, render_lookahead=lookahead)
    assert engine.executed == DFS_ORDER


@pytest.mark.parametrize("policy", POLICIES)
def test_only_what_is_to_do_is_run(policy: str) -> None:
    engine = FakeEngine()
    answers = run_job(engine, TEXTS, [6, 1, 4], policy=policy)
    assert set(answers) == {"r1", "r4", "r6"}
    assert sorted(engine.executed) == ["r1", "r4", "r6"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_with_nothing_to_do_ends(policy: str) -> None:
    engine = FakeEngine()
    assert run_job(engine, TEXTS, [], policy=policy) == {}
    assert engine.num_prepared == 0


@pytest.mark.parametrize("limits", [{}, {"KEPT_REQUESTS": 3}, {"KEPT_TOKENS": 5}])
def test_each_request_is_rendered_once(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(rendering, name, value)
    engine = FakeEngine()
    answers = run_job(engine, ["aaaa", *"bcdefgh"])
    assert engine.num_prepared == 8
    assert all(answer.ok for answer in answers.values())


def test_what_an_engine_cannot_store_is_rendered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendering, "KEPT_REQUESTS", 3)
    monkeypatch.setattr(FakeEngine, "stored", lambda *_: None)
    engine = FakeEngine()
    run_job(engine, ["aaaa", *"bcdefgh"])
    assert engine.num_prepared == 8 + 5


def test_the_ratio_of_shareable_tokens_is_known_after_planning() -> None:
    job = make_job(FakeEngine(), Answers(), ["same"] * 4)
    assert job.prefix_sharing_ratio is None
    run(job.run())
    assert job.prefix_sharing_ratio == 0.75


def test_every_request_rendered_for_the_plan_is_reported() -> None:
    rendered = []
    job = Job(
        "batch_1",
        make_requests(TEXTS),
        range(5),
        FakeEngine(rejected=["r2"]),
        OfflineBatchConfig(),
        Answers(),
        JobOptions(on_rendered=lambda: rendered.append(1)),
    )
    run(job.run())
    assert len(rendered) == 5


# The window -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_inflight", [1, 3, 64])
def test_the_window_is_filled_and_never_overfilled(
    policy: str, max_inflight: int
) -> None:
    texts = [f"prompt {i}" for i in range(20)]
    engine = FakeEngine()
    engine.hold(ids_of(range(20)))
    answers = Answers()

    async def scenario() -> None:
        job = make_job(engine, answers, texts, policy=policy, max_inflight=max_inflight)
        work = asyncio.ensure_future(job.run())
        await engine.until_stalled(0, min(max_inflight, 20))
        # Run all other ready tasks. The window does not change.
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engine.executed) == min(max_inflight, 20)
        engine.release()
        await work

    run(scenario())
    assert engine.max_running == min(max_inflight, 20)
    assert len(answers) == 20


def test_the_engine_sizes_the_window_where_the_settings_do_not() -> None:
    engine = FakeEngine(default_max_inflight=7)
    run_job(engine, [f"prompt {i}" for i in range(30)])
    assert engine.max_running == 7


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_every_request_is_answered_once_whatever_order_they_end_in(
    data: st.DataObject,
) -> None:
    num_requests = data.draw(st.integers(0, 12))
    ids = ids_of(range(num_requests))
    window = data.draw(st.integers(1, 5))
    rejected = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    engine = FakeEngine(rejected=rejected)
    engine.hold(ids)
    answers = Answers()
    texts = [data.draw(st.text("ab", max_size=3)) for _ in ids]

    async def scenario() -> None:
        job = make_job(engine, answers, texts, max_inflight=window)
        work = asyncio.ensure_future(job.run())
        num_sent = num_requests - len(rejected)
        for num_answered in range(num_sent):
            num_running = min(window, num_sent - num_answered)
            await engine.until_stalled(num_answered, num_running)
            engine.release([data.draw(st.sampled_from(sorted(engine.running)))])
        await work

    run(scenario())
    assert set(answers) == set(ids)
    assert engine.max_running <= window
    assert {i for i in answers if not answers[i].ok} == rejected


# Answers --------------------------------------------------------------------------


def test_each_answer_goes_to_the_request_that_asked() -> None:
    requests = make_requests(TEXTS)
    answers = run_job(FakeEngine())
    for request in requests:
        line = result_line(request, "batch_1", answers[request.custom_id])
        assert answer_text(json.loads(line)) == TEXTS[request.index]


def test_engine_ids_are_the_jobs_own_and_unique() -> None:
    engine = FakeEngine()
    run_job(engine, policy="fcfs")
    assert engine.rids == [engine_request_id("batch_1", i) for i in range(len(TEXTS))]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_cannot_be_rendered_is_answered_and_the_rest_go_on(
    policy: str,
) -> None:
    engine = FakeEngine(rejected=["r1", "r6"])
    answers = run_job(engine, policy=policy)
    assert {i for i in answers if answers[i].status_code == 400} == {"r1", "r6"}
    assert sorted(engine.executed) == ["r0", "r2", "r3", "r4", "r5", "r7"]


def test_a_job_of_nothing_but_rejections_ends() -> None:
    engine = FakeEngine(rejected=ids_of(range(8)))
    assert {answer.status_code for answer in run_job(engine).values()} == {400}
    assert engine.executed == []


def test_a_request_that_fails_is_answered_and_the_rest_go_on() -> None:
    engine = FakeEngine(failing={"r0": 500, "r5": 400})
    answers = run_job(engine)
    assert [engine.executed.count(each) for each in ("r0", "r5", "r6")] == [3, 1, 1]
    assert {i: answers[i].status_code for i in answers if not answers[i].ok} == {
        "r0": 500,
        "r5": 400,
    }
    assert len(answers) == len(TEXTS)


# Stopping and breaking ------------------------------------------------------------


def test_stopping_aborts_what_runs_and_leaves_the_rest_unanswered() -> None:
    engine = FakeEngine()
    engine.hold(DFS_ORDER[2:])
    answers = Answers()

    async def scenario() -> None:
        stop = asyncio.Event()
        work = asyncio.ensure_future(
            make_job(engine, answers, max_inflight=3).run(stop)
        )
        await engine.until_stalled(2, 3)
        stop.set()
        await work

    run(scenario())
    assert set(answers) == set(DFS_ORDER[:2])
    assert engine.executed == DFS_ORDER[:5]
    assert sorted(engine.aborted) == sorted(DFS_ORDER[2:5])
    assert engine.running == set()


def test_a_job_that_is_stopped_before_it_starts_answers_nothing() -> None:
    engine = FakeEngine()
    answers = Answers()

    async def scenario() -> None:
        stop = asyncio.Event()
        stop.set()
        await make_job(engine, answers).run(stop)

    run(scenario())
    assert answers == {}
    assert engine.executed == []


def test_a_job_that_is_never_stopped_ends_by_itself() -> None:
    answers = Answers()

    async def scenario() -> None:
        await make_job(FakeEngine(), answers).run(asyncio.Event())

    run(scenario())
    assert len(answers) == len(TEXTS)


@pytest.mark.parametrize("stoppable", [False, True])
def test_cancelling_the_caller_aborts_and_is_not_swallowed(stoppable: bool) -> None:
    engine = FakeEngine()
    engine.hold(DFS_ORDER)

    async def scenario() -> None:
        job = make_job(engine, Answers(), max_inflight=2)
        work = asyncio.ensure_future(job.run(asyncio.Event() if stoppable else None))
        await engine.until_stalled(0, 2)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run(scenario())
    assert sorted(engine.aborted) == sorted(DFS_ORDER[:2])


class FullDisk(Exception):
    pass


@pytest.mark.parametrize("stoppable", [False, True])
@pytest.mark.parametrize("rejected", [[], ["r1"]])
@pytest.mark.parametrize("policy", ["dfs", "fcfs"])
def test_an_error_of_the_sink_ends_the_job_and_is_raised_as_it_is(
    policy: str, rejected: list[str], stoppable: bool
) -> None:
    engine = FakeEngine(rejected=rejected)
    engine.hold(set(DFS_ORDER) - {"r1"})

    def sink(request: BatchRequestInput, output: RequestOutput) -> None:
        raise FullDisk(request.custom_id)

    job = make_job(engine, sink, policy=policy)
    with pytest.raises(FullDisk, match="r1"):
        run(job.run(asyncio.Event() if stoppable else None))
    assert engine.running == set()


def test_an_error_of_the_engine_ends_the_job_and_is_raised_as_it_is() -> None:
    engine = FakeEngine(raising={"r4": ConnectionError("the scheduler died")})
    engine.hold(set(DFS_ORDER) - {"r4"})
    with pytest.raises(ConnectionError, match="the scheduler died"):
        run(make_job(engine, Answers()).run())
    assert engine.running == set()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_of_rendering_ends_the_job_and_is_raised_as_it_is(policy: str) -> None:
    requests = make_requests(TEXTS)
    requests[2] = BatchRequestInput(2, "r2", CHAT, b"no JSON")
    job = Job(
        "batch_1",
        requests,
        range(len(TEXTS)),
        FakeEngine(),
        OfflineBatchConfig(policy=policy),
        Answers(),
    )
    with pytest.raises(ValueError):
        run(job.run())
