"""Jobs that are planned bucket by bucket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from builders import CHAT, Answers, make_request, make_requests, run
from dispatcher_jobs import everything
from fake_engine import FakeEngine

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import EngineError
from sglang_batch.job.bucketed_job import BucketedJob, deal_requests, prompt_text
from sglang_batch.request import BatchRequestInput, RequestOutput

pytestmark = pytest.mark.usefixtures("compiled")

SYSTEM = "You are helpful. " * 6


def families(count: int, size: int = 8) -> list[BatchRequestInput]:
    """Requests that share a system prompt, and a document with ``size`` others. In an order
    in which none is next to one of its family."""
    texts = [
        f"{SYSTEM}document {i % (count // size):04d} {'d' * 50} question {i}"
        for i in range(count)
    ]
    return make_requests(texts)


def make_job(
    engine: FakeEngine,
    answers: Any,
    requests: Sequence[BatchRequestInput],
    todo: Sequence[int] | None = None,
    **config: Any,
) -> BucketedJob:
    return BucketedJob(
        "batch_1",
        requests,
        range(len(requests)) if todo is None else todo,
        engine,
        OfflineBatchConfig(**{"bucket_requests": 100} | config),
        answers,
    )


def bucket_of(rid: str) -> int:
    return int(rid.split("-")[1])


# Dealing ----------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1 << 26, 2000])
def test_families_stay_together(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_batch.job.bucketed_job.MAX_BYTES", block)
    if block == 2000:  # the sample is of a few requests
        requests = families(800, 400)
        buckets = deal_requests(requests, 400, 0)
    else:
        requests = families(800)
        buckets = deal_requests(requests, 100, 0)
        assert 8 <= len(buckets) <= 17
        assert max(map(len, buckets)) <= 100
    assert sorted(np.concatenate(buckets).tolist()) == list(range(800))
    documents = [
        {requests[i].body.split(b"document ")[1][:4] for i in numbers}
        for numbers in buckets
    ]
    divided = sum(map(len, documents)) - len(set.union(*documents))
    assert divided <= (1 if block == 2000 else 0)
    for numbers in buckets:
        assert np.all(np.diff(numbers) > 0)


def test_a_family_that_is_larger_than_a_bucket_is_divided() -> None:
    requests = make_requests(
        [f"{SYSTEM}{i * 7919 % 1000:03d} and more" for i in range(1000)]
    )
    buckets = deal_requests(requests, 100, 0)
    assert len(buckets) >= 10
    assert max(map(len, buckets)) <= 110


def test_equal_prompts_are_in_one_bucket() -> None:
    assert [len(x) for x in deal_requests(make_requests(["a"] * 500), 100, 0)] == [500]


def test_the_text_has_what_comes_first_in_a_prompt() -> None:
    def text(**body: Any) -> bytes:
        return prompt_text(BatchRequestInput(0, "a", CHAT, json.dumps(body).encode()))

    assert text(temperature=1, prompt="p", model="m") == b'"p"'
    assert text(messages=[1], tools=["t"], system="s") == b'"s"["t"][1]'
    assert text(max_tokens=1, input=["a", "b"]) == b'["a", "b"]'
    assert text(documents=["d"], query="q") == b'"q"["d"]'
    assert text(model="m") == b""
    assert prompt_text(BatchRequestInput(0, "a", CHAT, b"[]")) == b""


# Running ----------------------------------------------------------------------------


def test_each_request_is_answered_once_by_its_own_number() -> None:
    requests, engine, answers = families(800), FakeEngine(), Answers()
    numbers = {}

    def sink(request: BatchRequestInput, output: RequestOutput) -> None:
        numbers[request.custom_id] = request.index
        answers(request, output)

    job = make_job(engine, sink, requests)
    run(job.run())
    assert numbers == {request.custom_id: request.index for request in requests}
    assert len(engine.closed) == job.num_buckets >= 8
    assert len(set(engine.rids)) == 800
    assert len({len(rid) for rid in engine.rids}) == 1
    # The earlier of two buckets goes first.
    assert all(
        engine.priorities[f"batch_1-{i:06d}"]
        > engine.priorities[f"batch_1-{i + 1:06d}"]
        > 0
        for i in range(job.num_buckets - 1)
    )
    whole = make_job(FakeEngine(), Answers(), requests, bucket_requests=1000)
    run(whole.run())
    assert whole.num_buckets == 1
    assert whole.prefix_sharing_ratio is not None
    assert job.prefix_sharing_ratio == pytest.approx(
        whole.prefix_sharing_ratio, abs=0.015
    )


def test_two_buckets_are_in_the_engine() -> None:
    requests, engine = families(800), FakeEngine(default_max_inflight=3)
    engine.hold(everything(requests))

    async def scenario() -> None:
        job = make_job(engine, Answers(), requests)
        work = asyncio.ensure_future(job.run())
        for done in range(0, 800, 50):
            await engine.until(lambda: len(engine.running) >= 3)
            open_buckets = {
                bucket_of(rid) for rid in engine.rids[len(engine.answered) :]
            }
            assert len(open_buckets) <= 2
            for _ in range(50):
                await engine.until(lambda: bool(engine.running))
                engine.release([min(engine.running)])
                await asyncio.sleep(0)
            assert len(engine.closed) + 2 >= max(map(bucket_of, engine.rids))
            if done >= 700:
                break
        engine.release()
        await work

    run(scenario())


def test_a_resumed_job_has_the_same_buckets() -> None:
    requests = families(400)
    first, again = FakeEngine(), FakeEngine()
    run(make_job(first, Answers(), requests).run())
    answers = Answers()
    todo = list(range(0, 400, 3))
    run(make_job(again, answers, requests, todo).run())
    assert sorted(answers) == sorted(f"r{i}" for i in todo)
    assert set(again.rids) < set(first.rids)
    ids = dict(zip(first.rids, first.executed, strict=True))
    assert all(
        ids[rid] == name for rid, name in zip(again.rids, again.executed, strict=True)
    )


@pytest.mark.parametrize("inflight", [1, 2, 7])
def test_the_limit_is_one_of_both_buckets(inflight: int) -> None:
    requests, engine = families(400), FakeEngine()
    run(make_job(engine, Answers(), requests, max_inflight=inflight).run())
    assert engine.max_running <= max(2, inflight)


def test_a_stopped_job_opens_no_bucket() -> None:
    requests, engine, answers = families(400), FakeEngine(), Answers()
    engine.hold(everything(requests))

    async def scenario() -> None:
        stop = asyncio.Event()
        work = asyncio.ensure_future(make_job(engine, answers, requests).run(stop))
        await engine.until(lambda: len(engine.running) >= 4)
        stop.set()
        await work

    run(scenario())
    assert not answers and len(engine.closed) <= 2
    assert len(engine.aborted) == len(engine.executed)


def test_an_error_of_the_engine_ends_the_job() -> None:
    requests = families(400)
    broken = EngineError("broken")
    engine = FakeEngine(
        raising={request.custom_id: broken for request in requests[100:]}
    )
    with pytest.raises(EngineError, match="broken"):
        run(make_job(engine, Answers(), requests, max_line_attempts=1).run())


def test_a_policy_without_a_plan_needs_no_buckets() -> None:
    requests = [make_request(i, f"{9 - i}") for i in range(10)]
    engine = FakeEngine(default_max_inflight=1)
    job = make_job(engine, Answers(), requests, policy="fcfs", bucket_requests=2)
    run(job.run())
    assert job.num_buckets == 1
    assert engine.executed == everything(requests)
