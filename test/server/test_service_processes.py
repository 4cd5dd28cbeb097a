"""Several processes and servers on one directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from batch_service import (
    check_results,
    counts_of,
    make_service,
    running_service,
    submit,
    until_over,
)
from builders import make_line, make_lines, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.errors import StoreError
from sglang_batch.server import runner as runner_module

pytestmark = pytest.mark.usefixtures("quick_polling")


def test_a_second_server_on_a_directory_is_refused_by_the_first_ones_name(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path, server_name="pid 1"):
            other = make_service(tmp_path, server_name="pid 2")
            with pytest.raises(StoreError, match=rf"{tmp_path} .*\(pid 1\)"):
                await other.start(FakeEngine())
            await other.stop()
            other.store.close()

    run(scenario())


def test_a_server_waits_for_the_one_before_it_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LOCK_PATIENCE_S", 5.0)

    async def scenario() -> None:
        async with running_service(tmp_path, server_name="pid 1"):
            after = make_service(tmp_path, server_name="pid 2")
            starting = asyncio.ensure_future(after.start(FakeEngine()))
            await asyncio.sleep(0)
            assert not starting.done()
        await starting
        row = await until_over(after, submit(after, make_lines(1)))
        assert row["status"] == api.COMPLETED
        await after.stop()
        after.store.close()

    run(scenario())


def test_of_one_servers_processes_one_runs_and_any_can_cancel(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        for engine in (first, second):
            engine.hold(["r2"])
        async with running_service(tmp_path, second) as other:
            async with running_service(tmp_path, first) as service:
                batch_id = submit(service, make_lines(3))
                # The process that was first has the lock, and the batch.
                await second.until_stalled(2, 1)
                service.cancel_batch(batch_id)
                row = await until_over(service, batch_id)
                assert row["status"] == api.CANCELLED
                assert counts_of(row) == (3, 2, 0)
                assert first.executed == []
            row = await until_over(other, submit(other, [make_line("r9")]))
            assert row["status"] == api.COMPLETED

    run(scenario())


def test_another_process_takes_over_when_the_running_one_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        first.hold(["r1", "r2"])
        async with running_service(tmp_path, first, policy="fcfs") as runner:
            heir = make_service(tmp_path)
            await heir.start(second)
            batch_id = submit(heir, make_lines(3))
            await first.until_stalled(1, 2)
            await runner.stop()
            row = await until_over(heir, batch_id)
            check_results(heir, row)
            assert sorted(second.executed) == ["r1", "r2"]
            await heir.stop()
            heir.store.close()

    run(scenario())
