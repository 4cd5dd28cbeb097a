"""Batches of a stopped server are resumed by the next one."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from batch_service import (
    UNRUN,
    batch_row,
    check_results,
    counts_of,
    custom_ids,
    make_service,
    run_part,
    running_service,
    submit,
    until_over,
)
from builders import PATIENCE_S, ids_of, make_lines, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.server import result_saver, runner
from sglang_batch.server.access.usage import queued_tokens
from sglang_batch.store.files import FileLock

pytestmark = pytest.mark.usefixtures("quick_polling")


def test_a_stopped_batch_is_resumed_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = FakeEngine(failing={"r2": 400})
        batch_id = await run_part(tmp_path, 20, 7, first)
        assert sorted(first.aborted) == ["r7", "r8", "r9"]
        second = FakeEngine()
        async with running_service(tmp_path, second) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.COMPLETED
            assert counts_of(row) == (20, 19, 1)
            assert custom_ids(errors) == ["r2"]
            assert len(outputs) == 19
            assert sorted(second.executed) == sorted(ids_of(range(7, 20)))
            # Answers of both servers are in the sum.
            texts = [f"prompt {i}" for i in range(20) if i != 2]
            assert row["input_tokens"] == len("".join(texts))

    run(scenario())


def test_enqueued_tokens_are_counted_across_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        batch_id = await run_part(tmp_path, 20, 4, FakeEngine())
        engine = FakeEngine()
        engine.hold(ids_of(range(20)))
        between = make_service(tmp_path)
        # By the four lines that have an answer.
        left = round(queued_tokens(between.store, batch_row(between, batch_id)))
        between.store.close()
        limit = left + 10
        async with running_service(
            tmp_path, engine, max_enqueued_tokens=limit
        ) as service:
            refused = await until_over(service, submit(service, make_lines(1)))
            assert refused["status"] == api.FAILED
            [error] = json.loads(refused["errors"])["data"]
            assert error["code"] == "token_limit_exceeded"
            assert f"Limit: {limit:,} " in error["message"]
            assert f"about {left:,} and" in error["message"]
            engine.release()
            row = await until_over(service, batch_id)
            assert row["status"] == api.COMPLETED
            again = await until_over(service, submit(service, make_lines(1)))
            assert again["status"] == api.COMPLETED

    run(scenario())


def test_a_batch_may_be_stopped_again_and_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        executed: list[str] = []
        batch_id = await run_part(tmp_path, 12, 2, FakeEngine())
        for before, after in pairwise((2, 5, 6, 11)):
            engine = FakeEngine()
            engine.hold(ids_of(range(after, 12)))
            async with running_service(tmp_path, engine, policy="fcfs", max_inflight=2):
                await engine.until_stalled(after - before, min(2, 12 - after))
            executed += engine.answered
        async with running_service(tmp_path) as service:
            check_results(service, await until_over(service, batch_id))
        assert executed == ids_of(range(2, 11))

    run(scenario())


def test_a_batch_cancelled_while_no_server_runs_keeps_its_answers(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        batch_id = await run_part(tmp_path, 8, 5, FakeEngine())
        between = make_service(tmp_path)
        between.cancel_batch(batch_id)
        # Neither the client's file nor the model need be there any more.
        between.store.delete_file(batch_row(between, batch_id)["input_file_id"])
        between.store.close()
        engine = FakeEngine(model_names=("another-model",))
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.CANCELLED
            assert custom_ids(outputs) == ids_of(range(5))
            assert [line["error"] for line in errors] == [UNRUN] * 3
            assert engine.executed == []

    run(scenario())


def test_stopping_waits_for_results_being_written_before_it_releases_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        writing, go_on = threading.Event(), threading.Event()
        async with running_service(tmp_path) as service:
            write_results = result_saver._write

            def slow(*args: Any) -> Any:
                writing.set()
                assert go_on.wait(PATIENCE_S)
                return write_results(*args)

            monkeypatch.setattr(result_saver, "_write", slow)
            batch_id = submit(service, make_lines(3))
            await asyncio.to_thread(writing.wait, PATIENCE_S)
            stopping = asyncio.ensure_future(service.stop())
            for _ in range(50):
                await asyncio.sleep(0)
            assert FileLock(tmp_path / "lock").acquire("other") == "server"
            assert not stopping.done()
            go_on.set()
            await stopping
        async with running_service(tmp_path) as service:
            check_results(service, await until_over(service, batch_id))

    run(scenario())


def test_a_server_that_ends_waits_for_lines_that_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine, closing = FakeEngine(), asyncio.Event()
        engine.hold(ids_of(range(2, 6)))
        async with running_service(
            tmp_path, engine, closing=closing.is_set, policy="fcfs", max_inflight=2
        ) as service:
            batch_id = submit(service, make_lines(6))
            await engine.until_stalled(2, 2)
            closing.set()
            stopping = asyncio.create_task(service.stop())
            await asyncio.sleep(0.05)
            assert not stopping.done()
            engine.release(ids_of(range(2, 4)))
            await stopping
            assert engine.aborted == []
            assert engine.answered == ids_of(range(4))
        after = FakeEngine()
        async with running_service(tmp_path, after) as service:
            check_results(service, await until_over(service, batch_id))
            assert sorted(after.executed) == ids_of(range(4, 6))

    run(scenario())


def test_a_server_that_ends_waits_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine, closing = FakeEngine(), asyncio.Event()
        engine.hold(ids_of(range(2)))
        async with running_service(tmp_path, engine, closing=closing.is_set) as service:
            submit(service, make_lines(2))
            await engine.until_stalled(0, 2)
            closing.set()
        assert sorted(engine.aborted) == ids_of(range(2))

    monkeypatch.setattr(runner, "DRAIN_S", 0.05)
    run(scenario())


def test_a_server_going_down_leaves_the_rest_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2, 6)))
        closing: list[bool] = []
        async with running_service(
            tmp_path,
            engine,
            closing=lambda: bool(closing),
            policy="fcfs",
            max_inflight=2,
        ) as service:
            batch_id = submit(service, make_lines(6))
            await engine.until_stalled(2, 2)
            closing.append(True)
            waiting = submit(service, make_lines(1))
            await engine.until(lambda: not engine.running)
            for _ in range(10):  # polls
                await asyncio.sleep(0.002)
            assert batch_row(service, batch_id)["status"] == api.IN_PROGRESS
            assert batch_row(service, waiting)["status"] == api.VALIDATING
            assert engine.executed == ids_of(range(4))
        after = FakeEngine()
        async with running_service(tmp_path, after) as service:
            await until_over(service, waiting)
            check_results(service, await until_over(service, batch_id))
            assert sorted(after.executed) == ["r0", *ids_of(range(2, 6))]

    monkeypatch.setattr(runner, "DRAIN_S", 0.01)
    run(scenario())
