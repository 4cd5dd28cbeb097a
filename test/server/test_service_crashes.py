"""Batches of a server that died, whenever it did."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batch_service import (
    check_results,
    custom_ids,
    make_service,
    run_part,
    running_service,
    submit,
    until_over,
)
from builders import ids_of, make_lines, parse_lines, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.server import batch_run
from sglang_batch.server import runner as runner_module

pytestmark = pytest.mark.usefixtures("quick_polling")


SERVER_TO_KILL = """
import asyncio, sys
from pathlib import Path
from batch_service import running_service
from fake_engine import FakeEngine
from sglang_batch.server import runner

runner.POLL_S = 0.002


async def main():
    engine = FakeEngine()
    engine.hold([f"r{i}" for i in range(7, 20)])
    settings = {"policy": "fcfs", "max_inflight": 3}
    async with running_service(Path(sys.argv[1]), engine, **settings):
        await engine.until_stalled(7, 3)
        print("stalled", flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
"""


def test_a_killed_server_loses_no_line_and_repeats_none(tmp_path: Path) -> None:
    accepting = make_service(tmp_path)
    batch_id = submit(accepting, make_lines(20))
    accepting.store.close()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER_TO_KILL, str(tmp_path)],
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"stalled\n"
        server.send_signal(signal.SIGKILL)

    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(
            tmp_path, engine, server_name="another server"
        ) as service:
            row = await until_over(service, batch_id)
            outputs, _ = check_results(service, row)
            assert custom_ids(outputs) == ids_of(range(20))
            assert sorted(engine.executed) == sorted(ids_of(range(7, 20)))

    run(scenario())


def submit_through(directory: Path, lines: list[str]) -> str:
    """Submit through another process of the server."""
    service = make_service(directory)
    batch_id = submit(service, lines)
    service.store.close()
    return batch_id


def set_status(directory: Path, batch_id: str, status: str) -> None:
    service = make_service(directory)
    assert service.store.transition(batch_id, api.ACTIVE_STATUSES, status)
    service.store.close()


@pytest.mark.parametrize("num_answered", [6, 4])
def test_a_server_that_died_finalizing_is_completed_by_the_next(
    tmp_path: Path, num_answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead(*_: Any) -> None:
        await asyncio.Event().wait()

    # With fewer answers than lines: the log's end was lost with the machine's power.
    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(batch_run, "finish", dead)
            batch_id = await run_part(tmp_path, 6, num_answered, FakeEngine())
        set_status(tmp_path, batch_id, api.FINALIZING)
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.COMPLETED
            assert custom_ids(outputs) == ids_of(range(6))
            assert errors == []
            assert sorted(engine.executed) == ids_of(range(num_answered, 6))

    run(scenario())


def test_a_server_that_died_after_writing_the_results_leaves_no_stray_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        dead = asyncio.Event()

        def die(*_: Any) -> None:
            dead.set()
            raise asyncio.CancelledError

        async with running_service(tmp_path, FakeEngine(failing={"r1": 400})) as first:
            monkeypatch.setattr(first.store, "record_file", die)
            batch_id = submit_through(tmp_path, make_lines(3))
            await dead.wait()
            end = batch_id.removeprefix("batch_")
            for name in ("output", "error"):
                assert first.store.file_path(f"file-{name}-{end}").exists()
        async with running_service(tmp_path) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert (len(outputs), len(errors)) == (2, 1)

    run(scenario())


def test_results_are_on_disk_before_a_batch_is_finalizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status that survives a power cut must not promise lines that do not."""
    synced: list[bytes] = []
    monkeypatch.setattr(
        os,
        "fdatasync",
        lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").read_bytes()),
    )
    monkeypatch.setattr(runner_module, "POLL_S", 0.05)

    async def scenario() -> None:
        async with running_service(tmp_path) as service:
            transition = service.store.transition
            at_finalizing: list[bytes] = []

            def spy(batch_id: str, *args: Any, **fields: Any) -> bool:
                if api.FINALIZING in args:
                    at_finalizing.extend(synced[-1:])
                return transition(batch_id, *args, **fields)

            monkeypatch.setattr(service.store, "transition", spy)
            await until_over(service, submit(service, make_lines(5)))
            assert [len(parse_lines(data)) for data in at_finalizing] == [5]

    run(scenario())
