"""Full disks: the batch waits, gives the reason, and loses nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from batch_service import batch_row, check_results, running_service, submit, until_over
from builders import ids_of, make_lines, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.batch_api.objects import batch_object
from sglang_batch.server.service import BatchService

pytestmark = pytest.mark.usefixtures("quick_polling")


class Disk:
    """Refuses writes to result logs, and optionally to the database, while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
        self.error = 0
        self._full = error
        pwrite = os.pwrite

        def limited(fd: int, data: bytes, offset: int) -> int:
            if self.error and os.readlink(f"/proc/self/fd/{fd}").endswith("s.jsonl"):
                raise OSError(self.error, os.strerror(self.error))
            return pwrite(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", limited)

    def fill(self, service: BatchService | None = None) -> None:
        self.error = self._full
        if service is not None:
            service.store.update_batch = self._refuse  # type: ignore[method-assign]

    def empty(self, service: BatchService | None = None) -> None:
        self.error = 0
        if service is not None:
            del service.store.update_batch

    @staticmethod
    def _refuse(*args: Any, **fields: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")


async def until_paused(service: BatchService, batch_id: str) -> str:
    while (reason := batch_row(service, batch_id)["paused_reason"]) is None:
        await asyncio.sleep(0.002)
    return str(reason)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("database_too", [False, True])
def test_a_batch_waits_for_space_and_loses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, database_too: bool
) -> None:
    disk = Disk(monkeypatch, error)

    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2, 12)))
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=3
        ) as service:
            batch_id = submit(service, make_lines(12))
            await engine.until_stalled(2, 3)
            disk.fill(service if database_too else None)
            engine.release()
            reason = await until_paused(service, batch_id)
            assert os.strerror(error) in reason or "disk is full" in reason
            for _ in range(20):
                await asyncio.sleep(0.002)
            # The lines in flight have ended, and no more are sent meanwhile.
            assert len(engine.executed) <= 6
            row = batch_row(service, batch_id)
            assert row["status"] == api.IN_PROGRESS
            assert batch_object(row)["paused_reason"] == row["paused_reason"]
            disk.empty(service if database_too else None)
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert (len(outputs), errors, row["paused_reason"]) == (12, [], None)
            assert sorted(engine.executed) == sorted(ids_of(range(12)))

    run(scenario())


def test_result_files_wait_for_space_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    fsync = os.fsync

    def limited(fd: int) -> None:
        if full and "file-output" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", limited)

    async def scenario() -> None:
        nonlocal full
        async with running_service(tmp_path) as service:
            batch_id = submit(service, make_lines(3))
            assert "No space left" in await until_paused(service, batch_id)
            assert batch_row(service, batch_id)["status"] == api.FINALIZING
            full = False
            outputs, _ = check_results(service, await until_over(service, batch_id))
            assert len(outputs) == 3

    run(scenario())


def test_a_server_stopped_with_a_full_disk_runs_unsaved_lines_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, errno.ENOSPC)

    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2, 6)))
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=2
        ) as service:
            batch_id = submit(service, make_lines(6))
            await engine.until_stalled(2, 2)
            disk.fill()
            engine.release()
            await until_paused(service, batch_id)
        disk.empty()
        after = FakeEngine()
        async with running_service(tmp_path, after) as service:
            row = await until_over(service, batch_id)
            assert len(check_results(service, row)[0]) == 6
            assert sorted(after.executed) == ids_of(range(2, 6))

    run(scenario())


def test_a_cancel_on_a_full_disk_counts_the_lines_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, errno.ENOSPC)

    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2, 12)))
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=3
        ) as service:
            batch_id = submit(service, make_lines(12))
            await engine.until_stalled(2, 3)
            disk.fill()
            engine.release(ids_of(range(2, 5)))
            await until_paused(service, batch_id)
            service.cancel_batch(batch_id)
            for _ in range(20):
                await asyncio.sleep(0.002)
            disk.empty()
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert (row["status"], len(outputs), len(errors)) == (api.CANCELLED, 5, 7)
            assert row["paused_reason"] is None

    run(scenario())
