"""Several batches in one server: which go first, which wait, which become urgent."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from batch_service import (
    batch_row,
    check_results,
    custom_ids,
    running_service,
    submit,
    until_over,
)
from builders import ids_of, make_line, make_lines, make_request, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.request import engine_request_id
from sglang_batch.server import runner as runner_module
from sglang_batch.server.access.keys import change_allowance
from sglang_batch.server.batch_run import Suspects
from sglang_batch.server.runner import URGENT
from sglang_batch.server.service import BatchService

pytestmark = pytest.mark.usefixtures("quick_polling")


async def until_in_progress(service: BatchService, batch_id: str) -> None:
    while batch_row(service, batch_id)["status"] != api.IN_PROGRESS:
        await asyncio.sleep(0.002)


async def some_polls() -> None:
    for _ in range(20):
        await asyncio.sleep(0.002)


def set_fields(service: BatchService, batch_id: str, **fields: Any) -> None:
    service.store.update_batch(batch_id, **fields)


def test_batches_run_side_by_side_and_one_over_the_limit_waits(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0", "r1"])
        async with running_service(tmp_path, engine, max_batches=2) as service:
            ids = [submit(service, [make_line(f"r{i}")]) for i in range(2)]
            await engine.until(lambda: engine.running == {"r0", "r1"})
            ids.append(submit(service, [make_line("r2")]))
            await until_in_progress(service, ids[2])
            await some_polls()
            assert sorted(engine.executed) == ["r0", "r1"]
            engine.release(["r1"])
            await until_over(service, ids[2])
            engine.release()
            for row in [await until_over(service, each) for each in ids]:
                check_results(service, row)

    run(scenario())


def test_an_important_batch_starts_at_once_and_the_engine_is_told(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2)))
        async with running_service(tmp_path, engine, max_batches=1) as service:
            low = submit(service, make_lines(2))
            await engine.until(lambda: len(engine.running) == 2)
            waiting = submit(service, [make_line("r5")])
            high = submit(service, [make_line("r6"), make_line("r7")], priority=3)
            row = await until_over(service, high)
            assert custom_ids(check_results(service, row)[0]) == ["r6", "r7"]
            assert engine.priorities == {high: 3}
            assert "r5" not in engine.executed
            engine.release()
            for row in [await until_over(service, each) for each in (low, waiting)]:
                check_results(service, row)

    run(scenario())


def test_a_batch_in_danger_of_missing_its_window_becomes_urgent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(1, 4)))
        async with running_service(tmp_path, engine, max_inflight=1) as service:
            assert service.runner is not None
            rates = {}
            service.runner.rate_of = rates.get  # type: ignore[assignment]
            batch_id = submit(service, make_lines(4))
            await engine.until_stalled(1, 1)
            await some_polls()
            assert engine.priorities == {}
            rates[batch_id] = runner_module.Rate(1e-5, 1.0, 0.5, None)
            while engine.priorities.get(batch_id) != URGENT:
                await asyncio.sleep(0.002)
            engine.release()
            check_results(service, await until_over(service, batch_id))

    run(scenario())
    assert "may miss its window" in caplog.text


# Windows --------------------------------------------------------------------------


def test_an_expired_batch_keeps_its_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(failing={"r1": 400})
        engine.hold(ids_of(range(3, 8)))
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=2
        ) as service:
            batch_id = submit(service, make_lines(8))
            await engine.until_stalled(3, 2)
            set_fields(service, batch_id, expires_at=int(time.time()) - 1)
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.EXPIRED
            assert row["expired_at"] >= row["created_at"]
            assert custom_ids(outputs) == ["r0", "r2"]
            assert [line["error"] for line in errors[1:]] == 5 * [
                {
                    "code": "batch_expired",
                    "message": "This request could not be executed before the "
                    "completion window expired.",
                }
            ]
            assert (row["total"], row["completed"], row["failed"]) == (8, 2, 1)
            assert sorted(engine.aborted) == ["r3", "r4"]

    run(scenario())


def test_a_batch_expires_while_it_waits_to_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        async with running_service(tmp_path, engine, max_batches=1) as service:
            first = submit(service, [make_line("r0")])
            await engine.until(lambda: bool(engine.running))
            second = submit(service, [make_line("r1")])
            await until_in_progress(service, second)
            set_fields(service, second, expires_at=int(time.time()) - 1)
            row = await until_over(service, second)
            assert (row["status"], row["output_file_id"]) == (api.EXPIRED, None)
            check_results(service, row)
            engine.release()
            check_results(service, await until_over(service, first))
            assert engine.executed == ["r0"]

    run(scenario())


def test_a_batch_that_was_done_in_time_does_not_expire(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path) as service:
            batch_id = submit(service, make_lines(3))
            row = await until_over(service, batch_id)
            set_fields(service, batch_id, expires_at=1)
            await some_polls()
            assert (
                batch_row(service, batch_id)["status"] == row["status"] == "completed"
            )

    run(scenario())


# Hours and shares -----------------------------------------------------------------


def test_outside_of_its_hours_a_server_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minute = 12 * 60
    monkeypatch.setattr(runner_module, "local_minute", lambda: minute)

    async def scenario() -> None:
        nonlocal minute
        engine = FakeEngine()
        async with running_service(
            tmp_path, engine, batch_hours="22:00-06:00", max_inflight=1
        ) as service:
            batch_id = submit(service, make_lines(4))
            while (reason := batch_row(service, batch_id)["paused_reason"]) is None:
                await asyncio.sleep(0.002)
            assert reason == "Batches of this server run from 22:00-06:00 only."
            await some_polls()
            assert len(engine.executed) <= 1  # before the runner set its limits
            minute = 23 * 60
            row = await until_over(service, batch_id)
            assert row["paused_reason"] is None
            check_results(service, row)

    run(scenario())


def test_a_share_of_the_engine_is_divided_among_batches(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(default_max_inflight=20)
        engine.hold(ids_of(range(60)))
        async with running_service(tmp_path, engine, batch_share=0.5) as service:
            first = submit(service, make_lines(30))
            await engine.until(lambda: len(engine.running) >= 10)
            second = submit(service, [make_line(f"r{i}") for i in range(30, 60)])
            await until_in_progress(service, second)
            engine.release(ids_of(range(30)))
            await engine.until(lambda: len(engine.running) >= 5)
            await some_polls()
            assert engine.max_running <= 15  # one poll late for the second
            engine.release()
            for row in [await until_over(service, each) for each in (first, second)]:
                check_results(service, row)

    run(scenario())


def test_a_wave_has_its_part_of_the_share_and_runs_at_any_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minute = 12 * 60
    monkeypatch.setattr(runner_module, "local_minute", lambda: minute)

    async def scenario() -> None:
        nonlocal minute
        engine = FakeEngine(default_max_inflight=20)
        engine.hold(ids_of(range(60)))
        hours = "22:00-06:00"
        async with running_service(
            tmp_path, engine, policy="fcfs", batch_share=0.5, batch_hours=hours
        ) as service:
            wave = service.run_requests("wave_1", [make_request(i) for i in range(30)])
            first = asyncio.ensure_future(anext(wave))
            await engine.until(lambda: len(engine.running) >= 10)
            await some_polls()
            assert len(engine.running) == 10
            batch_id = submit(service, [make_line(f"r{i}") for i in range(30, 60)])
            minute = 23 * 60
            while len(engine.running) < 15:
                await asyncio.sleep(0.002)
            await some_polls()
            assert len(engine.running) == 15  # those that ran before are not stopped
            engine.release(ids_of(range(30)))
            await first
            assert len([answer async for answer in wave]) == 29
            while len(engine.running) < 10:
                await asyncio.sleep(0.002)
            engine.release()
            check_results(service, await until_over(service, batch_id))

    run(scenario())


def test_ids_of_lines_tell_batches_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            ids = [submit(service, make_lines(2)) for _ in range(2)]
            for row in [await until_over(service, each) for each in ids]:
                check_results(service, row)
            assert sorted(engine.rids) == sorted(
                engine_request_id(batch_id, i) for batch_id in ids for i in range(2)
            )

    run(scenario())


# Limits of clients ----------------------------------------------------------------


def limit_tokens(service: BatchService, name: str, tokens: int | None) -> None:
    change_allowance(service.store, name, {"tokens": tokens})


async def until_paused(service: BatchService, batch_id: str, reason: str) -> None:
    while reason not in (batch_row(service, batch_id)["paused_reason"] or ""):
        await asyncio.sleep(0.002)


def test_a_client_without_tokens_keeps_no_other_client_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=1, max_batches=1
        ) as service:
            limit_tokens(service, "ann", 1)
            engine.hold(["r1"])
            running = submit(service, make_lines(4), owner="ann")
            await engine.until_stalled(1, 1)
            await until_paused(service, running, "1 tokens per day")
            waiting = submit(service, [make_line("r7")], owner="ann")
            await until_paused(service, waiting, "1 tokens per day")
            engine.release()
            other = await until_over(service, submit(service, [make_line("r8")]))
            check_results(service, other)
            assert engine.executed == ["r0", "r1", "r8"]
            # With tokens again, it needs a place again.
            engine.hold(["r9"])
            last = submit(service, [make_line("r9")], owner="bob")
            await engine.until(lambda: engine.running == {"r9"})
            limit_tokens(service, "ann", None)
            await until_paused(service, running, "There are tokens again")
            assert batch_row(service, waiting)["paused_reason"] is None
            await some_polls()
            assert engine.running == {"r9"}
            engine.release()
            ids = (last, running, waiting)
            for row in [await until_over(service, each) for each in ids]:
                assert row["paused_reason"] is None
                check_results(service, row)

    run(scenario())


def test_a_client_without_tokens_gives_the_engine_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r2"])
        async with running_service(tmp_path, engine, policy="fcfs") as service:
            with service.store.atomic():
                suspect = submit(service, make_lines(6), owner="ann")
                work_dir = service.store.work_dir(suspect)
                work_dir.mkdir()
                # Groups of two lines each.
                Suspects(work_dir / "suspects.json").blame(range(4), 100)
            await engine.until(lambda: engine.running == {"r2"})
            other = submit(service, [make_line("r8")])
            await until_in_progress(service, other)
            await some_polls()
            assert engine.running == {"r2"}
            limit_tokens(service, "ann", 1)
            await until_paused(service, suspect, "1 tokens per day")
            await some_polls()
            assert engine.running == {"r2"}  # until it has ended
            engine.release()
            check_results(service, await until_over(service, other))
            engine.hold(["r9"])
            last = submit(service, [make_line("r9")])
            await engine.until(lambda: engine.running == {"r9"})
            num_executed = len(engine.executed)
            limit_tokens(service, "ann", None)
            await until_resumed(service, suspect)
            await some_polls()
            assert len(engine.executed) == num_executed  # not beside another line
            engine.release()
            for row in [await until_over(service, each) for each in (last, suspect)]:
                check_results(service, row)

    run(scenario())


async def until_resumed(service: BatchService, batch_id: str) -> None:
    while batch_row(service, batch_id)["paused_reason"] is not None:
        await asyncio.sleep(0.002)
