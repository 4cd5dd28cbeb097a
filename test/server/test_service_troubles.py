"""Trouble at the worst moment: servers that die, disks that fill, engines that break."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from batch_service import (
    batch_row,
    check_results,
    counts_of,
    custom_ids,
    result_lines,
    running_service,
    submit,
    until_over,
)
from builders import ids_of, make_line, make_lines, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.server import batch_run, result_saver
from sglang_batch.server.access.keys import change_allowance
from sglang_batch.server.batch_run import Suspects
from sglang_batch.store.batch_store import BatchStore
from sglang_batch.store.files import FileLock

pytestmark = pytest.mark.usefixtures("quick_polling")


def test_a_server_that_died_while_a_batch_expired_lets_it_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2, 6)))
        writing = asyncio.Event()
        loop = asyncio.get_running_loop()

        def die(*_: Any) -> Any:
            loop.call_soon_threadsafe(writing.set)
            raise asyncio.CancelledError

        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=2
        ) as service:
            batch_id = submit(service, make_lines(6))
            await engine.until_stalled(2, 2)
            with monkeypatch.context() as patch:
                patch.setattr(result_saver, "_write", die)
                service.store.update_batch(batch_id, expires_at=int(time.time()) - 1)
                await writing.wait()
                await service.stop()
            assert batch_row(service, batch_id)["status"] == api.FINALIZING
        after = FakeEngine()
        async with running_service(tmp_path, after) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert (row["status"], len(outputs), len(errors)) == (api.EXPIRED, 2, 4)
            assert after.executed == []

    run(scenario())


def test_a_copy_of_the_input_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    full = True
    copied = batch_run.shutil.copyfileobj  # type: ignore[attr-defined]

    def cut(source: Any, target: Any, length: int) -> None:
        if not full:
            copied(source, target, length)
            return
        target.write(source.read(200))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(batch_run.os, "link", no_links)  # type: ignore[attr-defined]
    monkeypatch.setattr(batch_run.shutil, "copyfileobj", cut)  # type: ignore[attr-defined]

    async def scenario() -> None:
        nonlocal full
        full = False
        async with running_service(tmp_path) as service:
            accepted = submit(service, make_lines(12))
            full = True
            while batch_row(service, accepted)["paused_reason"] is None:
                await asyncio.sleep(0.002)
            assert "No space left" in batch_row(service, accepted)["paused_reason"]
            full = False
            row = await until_over(service, accepted)
            assert counts_of(row) == (12, 12, 0)
            check_results(service, row)

    run(scenario())


def test_troubles_with_progress_between_them_do_not_add_up(tmp_path: Path) -> None:
    class Hiccups(FakeEngine):
        async def execute(self, prepared: Any, replica: int | None = None) -> Any:
            broken = prepared.custom_id in self.raising
            try:
                return await super().execute(prepared, replica)
            finally:
                if broken:
                    del self.raising[prepared.custom_id]

    async def scenario() -> None:
        raising = {f"r{i}": RuntimeError("hiccup") for i in (2, 5, 8, 10)}
        engine = Hiccups(raising=raising)  # type: ignore[arg-type]
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=1
        ) as service:
            row = await until_over(service, submit(service, make_lines(12)))
            assert row["status"] == api.COMPLETED
            assert len(check_results(service, row)[0]) == 12

    run(scenario())


def test_a_batch_that_the_server_fails_still_gives_its_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(raising={"r3": RuntimeError("broken for good")})
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=1
        ) as service:
            row = await until_over(service, submit(service, make_lines(5)))
            assert row["status"] == api.FAILED
            assert "broken for good" in row["errors"]
            outputs = result_lines(service, row, "output")
            errors = result_lines(service, row, "error")
            assert custom_ids(outputs) == ids_of(range(3))
            assert custom_ids(errors) == ids_of(range(3, 5))
            assert {line["error"]["code"] for line in errors} == {"batch_failed"}
            assert counts_of(row) == (5, 3, 0)

    run(scenario())


def test_a_reason_of_an_earlier_server_does_not_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r1"])
        async with running_service(tmp_path, engine, max_inflight=1) as service:
            batch_id = submit(service, make_lines(2))
            await engine.until_stalled(1, 1)
            service.store.pause(batch_id, "The disk was full.", (api.IN_PROGRESS,))
        async with running_service(tmp_path) as service:
            row = await until_over(service, batch_id)
            assert (row["status"], row["paused_reason"]) == (api.COMPLETED, None)

    run(scenario())


@pytest.mark.parametrize("lines", [make_lines(2), ["{}"]], ids=["run", "refused"])
def test_a_batch_may_be_deleted_as_it_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lines: list[str],
) -> None:
    transition = BatchStore.transition

    def then_delete(
        store: BatchStore, batch_id: str, old: Any, status: str, **fields: Any
    ) -> bool:
        moved = transition(store, batch_id, old, status, **fields)
        if moved and status not in api.ACTIVE_STATUSES:
            store.delete_batch(batch_id, (status,))
        return moved

    async def scenario() -> None:
        async with running_service(tmp_path, policy="fcfs") as service:
            assert service.runner is not None
            monkeypatch.setattr(BatchStore, "transition", then_delete)
            batch_id = submit(service, lines)
            service.runner._urgent.add(batch_id)
            while batch_id in service.runner._urgent or service.runner._runs:
                await asyncio.sleep(0.002)
            assert service.store.get_batch(batch_id) is None
            assert not service.store.work_dir(batch_id).exists()

    run(scenario())
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


def test_a_batch_that_is_over_is_not_paused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path, policy="fcfs") as service:
            assert service.runner is not None
            change_allowance(service.store, "ann", {"tokens": 1})
            batch_id = submit(service, make_lines(1), owner="ann")
            while not service.runner._runs:
                await asyncio.sleep(0)
            [pauses] = [each.pauses for each in service.runner._runs.values()]
            row = await until_over(service, batch_id)
            assert (row["status"], row["paused_reason"]) == (api.COMPLETED, None)
            pauses.set("limit", "A poll that read the batch before its end.")
            assert batch_row(service, batch_id)["paused_reason"] is None

    run(scenario())


def test_a_batch_that_waits_to_be_alone_can_be_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        async with running_service(tmp_path, engine) as service:
            other = submit(service, [make_line("r0")])
            await engine.until(lambda: "r0" in engine.running)
            suspect = submit(service, [make_line("r9")])
            work_dir = service.store.work_dir(suspect)
            work_dir.mkdir()
            Suspects(work_dir / "suspects.json").blame([0], 2)
            while batch_row(service, suspect)["status"] != api.IN_PROGRESS:
                await asyncio.sleep(0.002)
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert engine.running == {"r0"}
            service.cancel_batch(suspect)
            row = await until_over(service, suspect)
            assert row["status"] == api.CANCELLED
            engine.release()
            await until_over(service, other)

    run(scenario())


def test_a_server_that_is_told_to_go_blames_no_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(4)))
        closing: list[bool] = []
        async with running_service(
            tmp_path, engine, closing=lambda: bool(closing)
        ) as service:
            assert service.runner is not None
            batch_id = submit(service, make_lines(4))
            await engine.until_stalled(0, 4)
            path = service.store.work_dir(batch_id) / "suspects.json"
            closing.append(True)
            service.runner.engine_died()
            assert not path.exists()
            closing.clear()
            service.runner.engine_died()
            assert len(Suspects(path).groups()) == 4

    run(scenario())


def test_a_suspect_alongside_online_requests_gets_one_more_attempt(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        async with running_service(tmp_path, engine) as service:
            assert service.runner is not None
            batch_id = submit(service, make_lines(1))
            await engine.until_stalled(0, 1)
            path = service.store.work_dir(batch_id) / "suspects.json"
            own = f"{batch_id}-00000000"
            for _ in range(2):
                service.runner.engine_died([own, f"{own}.000001", "online-1"])
            assert Suspects(path).never() == []
            service.runner.engine_died([own, "online-2"])
            assert Suspects(path).never() == [0]

    run(scenario())


def test_a_lock_whose_holder_cannot_be_named_is_held_and_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert lock.acquire("me") is None
    assert other.acquire("you") is not None
    lock.release()
    assert other.acquire("you") is None
    other.release()
