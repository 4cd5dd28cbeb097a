"""A server that starts on a disk with no byte left: a small file system of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from batch_service import (
    batch_row,
    check_results,
    running_service,
    submit,
    until_over,
)
from builders import make_line, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.errors import StoreError
from sglang_batch.server.service import BatchService
from sglang_batch.store.batch_store import BatchStore

pytestmark = pytest.mark.usefixtures("quick_polling")

# Long enough that few fit into the unused part of a file's last block.
IDS = [f"r{i:0400d}" for i in range(60)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 1 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a disk of a test's own needs the right to mount one")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(disk: Path) -> None:
    """Leave not a byte."""
    with open(disk / "filling", "ab", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)
    room = os.statvfs(disk)
    assert room.f_bavail == 0


def test_batches_wait_for_space_that_was_missing_at_the_start(disk: Path) -> None:
    directory = disk / "batches"

    @asynccontextmanager
    async def running_on_a_full_disk() -> AsyncIterator[BatchService]:
        fill(disk)
        engine = FakeEngine()
        engine.hold(IDS[2:])
        async with running_service(directory, engine, policy="fcfs") as service:
            fill(disk)
            engine.release()
            yield service

    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(IDS[2:])
        async with running_service(
            directory, engine, policy="fcfs", max_inflight=1, min_free_bytes=0
        ) as service:
            batch_id = submit(service, [make_line(custom_id) for custom_id in IDS])
            await engine.until_stalled(2, 1)
        for _ in range(2):  # each frees the space that the next one needs
            async with running_on_a_full_disk() as service:
                reason = await until_paused(service, batch_id)
                assert "cannot be written" in reason
                assert batch_row(service, batch_id)["status"] == api.IN_PROGRESS
        async with running_on_a_full_disk() as service:
            await until_paused(service, batch_id)
            (disk / "filling").unlink()
            row = await until_over(service, batch_id)
            assert len(check_results(service, row)[0]) == len(IDS)
            assert row["paused_reason"] is None

    run(scenario())


async def until_paused(service: BatchService, batch_id: str) -> str:
    while (reason := batch_row(service, batch_id)["paused_reason"]) is None:
        await asyncio.sleep(0.002)
    return str(reason)


def test_if_even_the_spare_file_is_gone_the_error_names_a_remedy(
    disk: Path,
) -> None:
    directory = disk / "batches"
    BatchStore(directory).close()
    (directory / "spare").unlink()
    fill(disk)
    with pytest.raises(StoreError) as raised:
        BatchStore(directory)
    said = str(raised.value)
    assert f"cannot keep batches in {directory}: " in said
    assert "its disk has 0 bytes left: free 262144, or name a writable" in said
    (disk / "filling").unlink()
    BatchStore(directory).close()
    assert (directory / "spare").stat().st_size == 262144


def test_a_disk_full_from_the_beginning_is_reported_too(disk: Path) -> None:
    fill(disk)
    with pytest.raises(StoreError, match="its disk has 0 bytes left"):
        BatchStore(disk / "batches")
