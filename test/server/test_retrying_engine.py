"""Lines that are sent again, that take too long, and that take the engine down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_service import (
    check_results,
    counts_of,
    custom_ids,
    running_service,
    submit,
    until_over,
)
from builders import ids_of, make_line, make_lines, make_requests, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job import retrying_engine
from sglang_batch.request import RequestOutput
from sglang_batch.server import batch_run as suspects_module
from sglang_batch.server.batch_run import ALONE, IN_GROUPS, Suspects

pytestmark = pytest.mark.usefixtures("quick_polling")


class Shaky(FakeEngine):
    """Answers some lines with an error for the first few times."""

    def __init__(self, times: dict[str, int], status_code: int = 503) -> None:
        super().__init__()
        self._times = dict(times)
        self._status_code = status_code

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        output = await super().execute(prepared, replica)
        if self._times.get(prepared.custom_id, 0) > 0:
            self._times[prepared.custom_id] -= 1
            return RequestOutput(self._status_code, prepared.rid, b'{"error": {}}')
        return output


async def result_of(
    directory: Path, engine: FakeEngine, num_lines: int, **config: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    async with running_service(directory, engine, **config) as service:
        row = await until_over(service, submit(service, make_lines(num_lines)))
        return *check_results(service, row), row


@pytest.mark.parametrize("status_code", sorted(retrying_engine.TRANSIENT))
def test_a_transient_error_is_retried(tmp_path: Path, status_code: int) -> None:
    async def scenario() -> None:
        engine = Shaky({"r1": 2, "r2": 1}, status_code)
        outputs, errors, _ = await result_of(tmp_path, engine, 4)
        assert (custom_ids(outputs), errors) == (ids_of(range(4)), [])
        assert len(engine.executed) == 7
        # For the scheduler the first attempt has ended: another id, of the same line.
        attempts = [rid for rid in engine.rids if "-00000001" in rid]
        assert [rid.partition("-")[2] for rid in attempts] == [
            "00000001", "00000001.try000001", "00000001.try000002",
        ]  # fmt: skip

    run(scenario())


@pytest.mark.parametrize("most", [1, 2, 4])
def test_it_is_not_retried_forever(tmp_path: Path, most: int) -> None:
    async def scenario() -> None:
        engine = Shaky({"r0": 99})
        outputs, errors, row = await result_of(
            tmp_path, engine, 2, max_line_attempts=most
        )
        assert custom_ids(outputs) == ["r1"]
        assert errors[0]["response"]["status_code"] == 503
        assert engine.executed.count("r0") == most
        assert counts_of(row) == (2, 1, 1)

    run(scenario())


def test_pauses_between_attempts_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def scenario() -> None:
        monkeypatch.setattr(retrying_engine.asyncio, "sleep", sleep)
        monkeypatch.setattr(retrying_engine, "BACK_OFF_S", 1.0)
        engine = retrying_engine.RetryingEngine(
            Shaky({"r0": 9}), OfflineBatchConfig(max_line_attempts=5)
        )
        [request] = make_requests(["text"])
        prepared = await engine.prepare(request, "rid-00000000", tokenize=False)
        await engine.execute(prepared)
        assert [pause for pause in pauses if pause] == [1.0, 2.0, 4.0, 8.0]

    run(scenario())


@pytest.mark.parametrize("status_code", [400, 404, 413, 501])
def test_the_lines_own_fault_is_not_retried(tmp_path: Path, status_code: int) -> None:
    async def scenario() -> None:
        engine = Shaky({"r0": 1}, status_code)
        _, errors, _ = await result_of(tmp_path, engine, 1)
        assert errors[0]["response"]["status_code"] == status_code
        assert engine.executed == ["r0"]

    run(scenario())


def test_a_line_that_takes_too_long_is_aborted_and_the_rest_answered(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r1"])
        outputs, errors, row = await result_of(tmp_path, engine, 3, line_timeout_s=0.05)
        assert custom_ids(outputs) == ["r0", "r2"]
        error = errors[0]["response"]["body"]["error"]
        assert errors[0]["response"]["status_code"] == 408
        assert error["code"] == "line_timeout"
        assert "0.05 seconds" in error["message"]
        assert engine.aborted == ["r1"]
        assert engine.executed.count("r1") == 1
        assert json.loads(row["line_errors"]) == {"line_timeout": 1}

    run(scenario())


def test_the_time_of_a_line_does_not_run_while_it_waits(tmp_path: Path) -> None:
    limit_s = 0.2

    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0", "r1"])
        engine.queued = {"r0", "r1"}
        config = {"line_timeout_s": limit_s}
        async with running_service(tmp_path, engine, **config) as service:
            batch = submit(service, make_lines(2))
            await engine.until_stalled(0, 2)
            await asyncio.sleep(3 * limit_s)
            assert engine.running == {"r0", "r1"}
            began = asyncio.get_running_loop().time()
            engine.begin(["r1"])
            await engine.until(lambda: "r1" in engine.aborted)
            took_s = asyncio.get_running_loop().time() - began
            assert took_s >= limit_s * 0.99
            engine.release(["r0"])
            outputs, errors = check_results(service, await until_over(service, batch))
            assert custom_ids(outputs) == ["r0"]
            assert errors[0]["response"]["body"]["error"]["code"] == "line_timeout"

    run(scenario())


def test_an_answer_while_the_engine_is_asked_is_kept(tmp_path: Path) -> None:
    class Busy(FakeEngine):
        async def running_s(self) -> dict[str, float]:
            seconds = await super().running_s()
            self.release(["r1"])
            await self.until(lambda: "r1" in self.answered)
            return seconds

    async def scenario() -> None:
        engine = Busy()
        engine.hold(["r1"])
        outputs, errors, _ = await result_of(tmp_path, engine, 2, line_timeout_s=0.05)
        assert (custom_ids(outputs), errors) == (["r0", "r1"], [])

    run(scenario())


# Lines that take the engine down ------------------------------------------------------


class Deadly(FakeEngine):
    """Dies as SGLang does, with all that is in it, when it gets certain lines."""

    def __init__(self, deadly: set[str]) -> None:
        super().__init__(default_max_inflight=8)
        self._deadly = deadly
        self.died = asyncio.Event()
        self.on_death: Callable[[], None] = lambda: None

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        if prepared.custom_id in self._deadly and not self.died.is_set():
            self.executed.append(prepared.custom_id)
            await asyncio.sleep(0.005)  # others are in flight by now
            self.on_death()
            self.died.set()
        if self.died.is_set():
            await asyncio.Event().wait()
        await asyncio.sleep(0.02)
        return await super().execute(prepared, replica)


async def run_until_done(
    directory: Path, deadly: set[str], num_lines: int
) -> tuple[Any, list[Deadly]]:
    """Start servers one after the other, as the engine dies, until the batch is over."""
    engines: list[Deadly] = []
    batch_id = ""
    for _ in range(12):
        engine = Deadly(deadly)
        engines.append(engine)
        async with running_service(directory, engine, policy="fcfs") as service:
            assert service.runner is not None
            engine.on_death = service.runner.engine_died
            batch_id = batch_id or submit(service, make_lines(num_lines))
            over = asyncio.ensure_future(until_over(service, batch_id))
            died = asyncio.ensure_future(engine.died.wait())
            await asyncio.wait({over, died}, return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if over.done():
                return (check_results(service, over.result()), over.result()), engines
            over.cancel()
    raise AssertionError("the batch never ended")


def test_a_poisoned_line_runs_twice_and_the_rest_is_answered(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        ((outputs, errors), row), engines = await run_until_done(tmp_path, {"r5"}, 30)
        assert row["status"] == api.COMPLETED
        assert len(engines) == 3
        assert [engine.executed.count("r5") for engine in engines] == [1, 1, 0]
        assert custom_ids(errors) == ["r5"]
        assert errors[0]["response"]["body"]["error"]["code"] == "engine_died"
        assert len(outputs) == 29
        # The second time it was alone, and after all that were not suspect.
        assert engines[1].executed[-1] == "r5"

    run(scenario())


def test_where_many_are_suspect_groups_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects_module, "FEW", 2)

    async def scenario() -> None:
        ((outputs, errors), _), engines = await run_until_done(tmp_path, {"r3"}, 20)
        assert custom_ids(errors) == ["r3"]
        assert len(outputs) == 19
        assert [engine.executed.count("r3") for engine in engines] == [1, 1, 1, 0]

    run(scenario())


def test_several_poisoned_lines_are_all_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        ((outputs, errors), _), _ = await run_until_done(
            tmp_path, {"r0", "r7", "r29"}, 30
        )
        assert custom_ids(errors) == ["r0", "r7", "r29"]
        assert len(outputs) == 27

    run(scenario())


def test_nothing_of_another_batch_runs_with_a_suspect(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Deadly({"r1"})
        async with running_service(tmp_path, engine) as service:
            assert service.runner is not None
            engine.on_death = service.runner.engine_died
            first = submit(service, make_lines(2))
            await engine.died.wait()
        engine = Deadly(set())
        engine.hold(["r1", "r99"])
        async with running_service(tmp_path, engine) as service:
            await engine.until(lambda: "r1" in engine.running)
            second = submit(service, [make_line("r98"), make_line("r99")])
            for _ in range(30):
                await asyncio.sleep(0.002)
            assert engine.running == {"r1"}
            engine.release()
            rows = [await until_over(service, each) for each in (first, second)]
            assert [len(check_results(service, row)[0]) for row in rows] == [2, 2]

    run(scenario())


def test_suspects_outlive_the_server_and_get_more_suspect(tmp_path: Path) -> None:
    path = tmp_path / "suspects.json"
    first = Suspects(path)
    first.blame(range(100), 100)
    again = Suspects(path)
    assert (again.num_deaths, again.never()) == (1, [])
    assert [len(group) for group in again.groups()] == [10] * 10
    again.blame(again.groups()[3], 10)
    assert [again._how[i] for i in (29, 30, 39, 40)] == [
        IN_GROUPS, ALONE, ALONE, IN_GROUPS,
    ]  # fmt: skip
    again.blame([30], 2)  # with one of another batch in flight
    assert again.never() == []
    again.blame([30], 1)
    assert Suspects(path).never() == [30]
