"""A worker carries out what its head asks, and ends it with the session."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import opentelemetry.propagate  # noqa: F401 - without it there are no traces
import pytest
from builders import make_body, run
from example_counts import examples
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.errors import InputError
from sglang_batch.fleet import messages, plan_bytes
from sglang_batch.fleet.messages import (
    AbortLine,
    About,
    Broken,
    CloseJob,
    Command,
    EndLine,
    Event,
    Exchange,
    Leaving,
    LineAnswer,
    LinesJoined,
    OpenJob,
    RenderCall,
    RenderedLine,
    Reply,
    RunLine,
    Session,
    SessionRefused,
    SetPriority,
    encode,
)
from sglang_batch.fleet.worker_host import WorkerHost
from sglang_batch.job import traces
from sglang_batch.request import BatchRequestInput, RequestOutput, named_job_id
from sglang_batch.scheduling.job_plan import unplanned


def line(number: int, custom_id: str | None = None) -> BatchRequestInput:
    body = json.dumps(make_body(f"prompt {number}")).encode()
    return BatchRequestInput(
        number, custom_id or f"r{number}", "/v1/chat/completions", body
    )


def run_line(number: int, custom_id: str | None = None) -> RunLine:
    return RunLine("job", f"job-{number:08d}", line(number, custom_id))


class Head:
    """A head with one worker, without a network."""

    def __init__(
        self, engine: FakeEngine, lease_s: float = 60.0, **options: bool
    ) -> None:
        self.engine = engine
        self.host = WorkerHost(engine, "worker", lease_s, **options)  # type: ignore[arg-type]
        self.session = Session(1, 0)
        self.sent = self.received = 0
        self.events: list[Event] = []

    async def attach(self) -> About:
        self.session = Session(1, self.session.number + 1)
        self.sent = self.received = 0
        about = await self.host.attach(self.session)
        assert isinstance(about, About)
        return about

    async def send(self, *commands: Command, wait_s: float = 0.0) -> list[Event]:
        """Exchange one call. Returns the new events."""
        call = Exchange(
            self.session, self.sent + 1, list(commands), self.received, wait_s
        )
        self.sent += len(commands)
        reply = await self.host.exchange(call)
        assert isinstance(reply, Reply)
        new = reply.events[self.received + 1 - reply.first :]
        self.received += len(new)
        self.events += new
        return new

    async def until_answers(self, count: int) -> list[LineAnswer]:
        while True:
            answers = [e for e in self.events if isinstance(e, LineAnswer)]
            if len(answers) >= count:
                return answers
            await self.send(wait_s=5.0)

    def open(self) -> OpenJob:
        plan = plan_bytes.to_bytes(unplanned(self.engine.machine))
        return OpenJob("job", [plan])


def test_a_job_is_opened_before_its_lines_run_and_closed() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        head = Head(engine)
        about = await head.attach()
        assert about.model_names == engine.model_names
        await head.send(head.open(), SetPriority("job", 3), run_line(0), run_line(1))
        answers = await head.until_answers(2)
        assert [answer.rid for answer in answers] == ["job-00000000", "job-00000001"]
        assert engine.priorities == {"job": 3}
        assert list(engine.opened) == ["job"]
        await head.send(CloseJob("job"))
        await asyncio.sleep(0.01)
        assert engine.closed == ["job"]

    run(scenario())


class Tracing(FakeEngine):
    """Notes the span that each request belongs to."""

    parents: dict[str, str | None]  # by custom id

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        self.parents[prepared.custom_id] = traces.headers().get("traceparent")
        return await super().execute(prepared, replica)


def test_only_lines_of_a_trace_are_traced() -> None:
    """SGLang would make a trace of each request without a parent."""
    job, trace = named_job_id("traced"), f"00-{7:032x}-{8:016x}-01"

    async def scenario() -> None:
        engine = Tracing()
        engine.parents = {}
        head = Head(engine)
        await head.attach()
        traces.enter(
            {"traceparent": f"00-{9:032x}-{9:016x}-01"}
        )  # the call's, not theirs
        within = RunLine(job, f"{job}-00000000", line(0), trace={"traceparent": trace})
        await head.send(within, RunLine(job, f"{job}-00000001", line(1)))
        await head.until_answers(2)
        assert engine.parents.pop("r0") == trace
        assert engine.parents == {"r1": f"00-{job[-32:]}-{1:016x}-00"}

    run(scenario())


def test_lines_that_begin_to_run_are_told() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        head = Head(engine)
        await head.attach()
        await head.send(head.open())
        while "job" not in engine.watching:
            await asyncio.sleep(0)
        engine.watching["job"]([4, 5])
        assert await head.send(wait_s=1.0) == [LinesJoined("job", [4, 5])]

    run(scenario())


def test_an_aborted_line_has_no_answer() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        head = Head(engine)
        await head.attach()
        await head.send(head.open(), run_line(0), run_line(1))
        await head.until_answers(1)
        await head.send(AbortLine("job-00000000"))
        await asyncio.sleep(0.01)
        assert engine.aborted == ["r0"]
        assert not head.host.is_busy or await head.send() == []

    run(scenario())


def test_a_sample_that_is_ended_is_answered() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        head = Head(engine)
        await head.attach()
        await head.send(head.open(), run_line(0), EndLine("job-00000000"))
        await head.until_answers(1)
        assert engine.ended_early == {"job-00000000"}

    run(scenario())


def test_a_new_session_ends_all_of_the_last_one() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        head = Head(engine)
        await head.attach()
        await head.send(head.open(), run_line(0))
        await engine.until(lambda: len(engine.running) == 1)
        old = head.session
        await head.attach()
        assert engine.aborted == ["r0"]
        assert engine.closed == ["job"]
        late = await head.host.exchange(Exchange(old, 2, [run_line(1)], 0, 0.0))
        assert late == SessionRefused(head.session)
        assert engine.executed == ["r0"]

    run(scenario())


def test_without_a_word_of_its_head_a_worker_stops_within_the_lease() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        head = Head(engine, lease_s=0.2)
        await head.attach()
        await head.send(head.open(), run_line(0))
        await engine.until(lambda: len(engine.running) == 1)
        begun = asyncio.get_running_loop().time()
        await engine.until(lambda: engine.aborted == ["r0"])
        assert 0.1 < asyncio.get_running_loop().time() - begun < 1.0
        assert not head.host.is_attached
        late = await head.host.exchange(Exchange(head.session, 3, [], 0, 0.0))
        assert isinstance(late, SessionRefused)

    run(scenario())


def test_an_engine_that_fails_is_told_apart_from_a_line_that_does() -> None:
    async def scenario() -> None:
        engine = FakeEngine(
            failing={"r0": 400}, raising={"r1": RuntimeError("out of memory")}
        )
        head = Head(engine)
        await head.attach()
        await head.send(head.open(), run_line(0), run_line(1))
        while len(head.events) < 2:
            await head.send(wait_s=1.0)
        (answer,) = [e for e in head.events if isinstance(e, LineAnswer)]
        assert answer.status_code == 400
        assert Broken("RuntimeError: out of memory") in head.events

    run(scenario())


def test_lines_are_rendered_or_answered() -> None:
    async def scenario() -> None:
        head = Head(FakeEngine(rejected=["r1"]))
        await head.attach()
        rids = ["job-00000000", "job-00000001"]
        found = await head.host.render(RenderCall(rids, [line(0), line(1)]))
        assert isinstance(found[0], RenderedLine)
        assert found[0].input_ids is not None
        assert found[0].stored is not None
        assert isinstance(found[1], LineAnswer)
        assert found[1].status_code == 400

    run(scenario())


def test_a_worker_that_does_not_trust_its_head_reads_no_rendered_requests() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        head = Head(engine, trusts=False)
        await head.attach()
        found = await head.host.render(RenderCall(["job-00000000"], [line(0)]))
        assert isinstance(found[0], RenderedLine)
        assert found[0].stored is None
        sent = RunLine("job", "job-00000000", line(0), stored=b"evil", input_ids=b"")
        await head.send(head.open(), sent)
        (answer,) = await head.until_answers(1)
        assert answer.status_code == 200

    run(scenario())


def test_a_worker_that_leaves_tells_each_head() -> None:
    async def scenario() -> None:
        head = Head(FakeEngine())
        await head.attach()
        head.host.leave("SIGTERM")
        assert await head.send() == [Leaving("SIGTERM")]
        await head.attach()
        assert await head.send() == [Leaving("SIGTERM")]

    run(scenario())


@pytest.mark.parametrize(
    "plan", [b"", b"plan", b"\0" + b"\x91" * 100_000, b"\x80\x04K."]
)
def test_a_broken_plan_is_told_and_the_worker_goes_on(plan: bytes) -> None:
    async def scenario() -> None:
        head = Head(FakeEngine())
        await head.attach()
        found = await head.send(OpenJob("job", [plan]), wait_s=5.0)
        assert [type(event) for event in found] == [Broken]
        assert "JobPlan" in str(found[0])
        await head.send(head.open(), run_line(0))
        (answer,) = await head.until_answers(1)
        assert answer.status_code == 200

    run(scenario())


_NO_MESSAGES = {
    "empty": b"",
    "junk": b"\xc1\xff",
    "nested": b"\x91" * 100_000,
    "nested in an unknown field": b"\x81\xa1x" + b"\x91" * 100_000,
    "pickle": b"\x80\x04K\x01.",
    "no ids": encode({"type": "run", "input_ids": b"123"}),
}
_READERS = [
    *messages.READ_CALL.values(),
    *(messages.READ_ANSWER[name] for name in ("attach", "exchange", "render")),
]


@pytest.mark.parametrize("read", _READERS, ids=range(len(_READERS)))
@pytest.mark.parametrize("data", _NO_MESSAGES.values(), ids=_NO_MESSAGES.keys())
def test_other_bytes_are_no_message(read: Any, data: bytes) -> None:
    with pytest.raises(InputError):
        read(data)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for read in _READERS:
        with suppress(InputError):
            read(data)
