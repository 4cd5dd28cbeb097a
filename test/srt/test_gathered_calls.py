"""Groups of single calls: what their plans have, and that no call is lost."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from builders import make_machine

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.planner.machine_model import Machine
from sglang_batch.srt.calls import gathered_calls
from sglang_batch.srt.calls.call_items import abort_unsent


class Engine:
    """Notes the plans that it is given."""

    is_connected = True

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.opened: list[tuple[str, list[int], tuple[str, ...], int]] = []
        self.closed: list[str] = []

    async def open_job(self, job_id: str, plans: Any, names: Any, first: int) -> None:
        [plan] = plans
        assert plan.open_ended
        self.opened.append((job_id, sorted(map(int, plan.number)), names, first))

    async def set_priority(self, job_id: str, priority: int) -> None:
        assert priority > 0

    async def close_job(self, job_id: str) -> None:
        self.closed.append(job_id)


class Manager:
    """A tokenizer manager whose scheduler answers when it is told to."""

    def __init__(self, engine: Engine) -> None:
        self.server_args = SimpleNamespace(
            offline_config=OfflineBatchConfig(gather_s=0.01)
        )
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[str] = []
        self.offline_engine = engine
        self.offline_unsent: dict[str, Any] = {}

    async def call(self, rid: str, prompt: list[int]) -> None:
        await self._send_one_request(self._message(rid, prompt))

    async def call_with_list(self, rid: str, prompt: list[int]) -> None:
        messages: Any = [self._message(rid, prompt)]
        await gathered_calls.gather_one(_send_list, self, messages)

    def _message(self, rid: str, prompt: list[int]) -> Any:
        self.rid_to_state[rid] = SimpleNamespace(
            rid=rid, input_ids=array("q", prompt), mm_inputs=None,
            sampling_params=SimpleNamespace(max_new_tokens=4, ignore_eos=True),
        )  # fmt: skip
        return self.rid_to_state[rid]

    async def _send_one_request(self, message: Any) -> None:
        await gathered_calls.gather(_send, self, message)

    def answer(self, *rids: str) -> None:
        for rid in rids:
            del self.rid_to_state[rid]

    def _result_dispatcher(self, request: Any) -> None:
        self.answer(request.rid)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


async def _send(manager: Any, message: Any) -> None:
    manager.sent.append(message.rid)


async def _send_list(manager: Any, messages: Any) -> None:
    for message in messages:
        await _send(manager, message)


PROMPT = [1] * 20


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(gathered_calls, "_CHECK_S", 0.02)
    return Engine(make_machine())


def test_a_group_is_planned_with_all_that_have_no_answer(engine: Engine) -> None:
    async def scenario() -> None:
        manager = Manager(engine)
        for rid in "abc":
            await manager.call(rid, PROMPT)
        await manager.until(lambda: manager.sent == ["a", "b", "c"])
        manager.answer("a")
        await manager.call("d", PROMPT)
        await manager.until(lambda: "d" in manager.sent)
        job_id = engine.opened[0][0]
        # Those with an answer stay, as their siblings may still come.
        assert engine.opened == [
            (job_id, [0, 1, 2], ("a", "b", "c"), 0),
            (job_id, [0, 1, 2, 3], ("d",), 3),
        ]
        manager.answer("b", "c", "d")
        await manager.until(lambda: engine.closed == [job_id])

    asyncio.run(scenario())


def test_another_job_knows_nothing_of_the_last_one(engine: Engine) -> None:
    async def scenario() -> None:
        manager = Manager(engine)
        for number, rid in enumerate("ab"):
            await manager.call(rid, PROMPT)
            await manager.until(lambda rid=rid: rid in manager.sent)
            manager.answer(rid)
            await manager.until(lambda number=number: len(engine.closed) > number)
        assert [numbers for _, numbers, _, _ in engine.opened] == [[0], [1]]
        assert len({job_id for job_id, *_ in engine.opened}) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_arrives_while_the_last_job_is_closed_is_sent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def scenario() -> None:
        manager = Manager(engine)
        closing = engine.close_job

        async def slowly(job_id: str) -> None:
            if not engine.closed:
                await manager.call("b", PROMPT)
            await closing(job_id)
            if fails:
                raise OSError("the scheduler is busy")

        monkeypatch.setattr(engine, "close_job", slowly)
        await manager.call("a", PROMPT)
        await manager.until(lambda: manager.sent == ["a"])
        manager.answer("a")
        await manager.until(lambda: manager.sent == ["a", "b"])
        manager.answer("b")
        await manager.until(lambda: len(engine.closed) == 2)

    asyncio.run(scenario())


def test_calls_that_are_given_up_are_neither_sent_nor_planned(engine: Engine) -> None:
    async def scenario() -> None:
        manager = Manager(engine)
        for rid in "abc":
            await manager.call(rid, PROMPT)
        manager.answer("a")  # its client has left
        abort_unsent(manager, "b")
        await manager.until(lambda: manager.sent == ["c"])
        await manager.call("d", PROMPT)
        await manager.until(lambda: "d" in manager.sent)
        assert [numbers for _, numbers, _, _ in engine.opened] == [[2], [2, 3]]
        assert not manager.offline_unsent

    asyncio.run(scenario())


def test_calls_without_a_plan_are_sent_all_the_same(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        manager = Manager(engine)
        engine.machine = None  # type: ignore[assignment]
        await manager.call("a", PROMPT)
        await manager.until(lambda: manager.sent == ["a"])

    asyncio.run(scenario())
    assert "1 calls could not be planned" in caplog.text


def test_a_list_of_one_is_a_single_call(engine: Engine) -> None:
    async def scenario() -> None:
        manager = Manager(engine)
        await manager.call_with_list("a", PROMPT)
        await manager.until(lambda: manager.sent == ["a"])
        assert [names for _, _, names, _ in engine.opened] == [("a",)]

    asyncio.run(scenario())


@pytest.mark.parametrize(("gather_s", "count"), [(0.01, 2), (None, 1)])
def test_other_lists_are_sent_as_they_are(
    engine: Engine, gather_s: float | None, count: int
) -> None:
    manager = Manager(engine)
    manager.server_args.offline_config = OfflineBatchConfig(gather_s=gather_s)
    messages: Any = [SimpleNamespace(rid=rid) for rid in "ab"[:count]]
    asyncio.run(gathered_calls.gather_one(_send_list, manager, messages))
    assert manager.sent == ["a", "b"][:count]
    assert not engine.opened
