"""Backups of a server at work: the server that is made of one goes on with every batch."""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from batch_service import (
    batch_row,
    check_results,
    custom_ids,
    result_lines,
    run_part,
    running_service,
    submit,
    until_over,
)
from builders import PATIENCE_S, ids_of, make_lines, run
from example_counts import SHARE
from fake_engine import FakeEngine

from sglang_batch.__main__ import main
from sglang_batch.batch_api import protocol as api
from sglang_batch.errors import ConfigError, InputError, StoreError
from sglang_batch.server.service import BatchService
from sglang_batch.store.backup import restore_backup, write_backup
from sglang_batch.store.batch_store import BatchStore

pytestmark = pytest.mark.usefixtures("quick_polling")

ROUNDS = max(3, round(20 * SHARE))


def backup(directory: Path) -> bytes:
    file = io.BytesIO()
    write_backup(directory, file)
    return file.getvalue()


def names_in(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


class Load:
    """Clients that make batches, cancel some and delete some, until they are stopped."""

    def __init__(self, service: BatchService, seed: int) -> None:
        self._service = service
        self._random = random.Random(seed)
        self.lines: dict[str, int] = {}

    async def make(self) -> None:
        while True:
            num_lines = self._random.randrange(1, 60) if self.lines else 60
            batch_id = submit(self._service, make_lines(num_lines))
            self.lines[batch_id] = num_lines
            await asyncio.sleep(self._random.uniform(0, 0.01))
            if self._random.random() < 0.1:
                self._service.cancel_batch(batch_id)
            if self._random.random() < 0.1:
                old = self._random.choice([*self.lines])
                row = self._service.store.get_batch(old)
                ended = (api.COMPLETED, api.CANCELLED)
                if row is not None and self._service.store.delete_batch(old, ended):
                    del self.lines[old]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_backup_under_load_loses_no_batch(tmp_path: Path, seed: int) -> None:
    async def scenario() -> None:
        live, restored = tmp_path / "live", tmp_path / "restored"
        engine = FakeEngine()
        engine.hold(["r59"])  # of the first batch
        async with running_service(live, engine) as service:
            load = Load(service, seed)
            making = asyncio.create_task(load.make())
            while len(load.lines) < 4 + 2 * seed:
                await asyncio.sleep(0.002)
            before = set(load.lines)
            data = await asyncio.to_thread(backup, live)
            after, num_lines = set(load.lines), dict(load.lines)
            making.cancel()
        restore_backup(restored, io.BytesIO(data))
        store = BatchStore(restored)
        active = {row["id"] for row in store.batches_in(api.ACTIVE_STATUSES)}
        store.close()
        assert active
        for path in (restored / "batches").iterdir():
            if path.name not in active:  # it had just ended: removed once it is old
                shutil.rmtree(path)
        async with running_service(restored) as service:
            rows = service.store.list_batches(after=None, limit=10_000)
            for row in rows:
                row = await until_over(service, row["id"])
                assert row["status"] in (api.COMPLETED, api.CANCELLED)
                assert row["total"] == num_lines.get(row["id"], row["total"])
                outputs, errors = check_results(service, row)
                if row["status"] == api.COMPLETED:
                    assert not errors
                    assert custom_ids(outputs) == ids_of(range(row["total"]))
            # All that were there before it began, unless a client deleted them since.
            assert before & after <= {row["id"] for row in rows}

    run(scenario())


def test_finished_lines_do_not_run_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        batch_id = await run_part(tmp_path / "live", 20, 7, FakeEngine())
        restore_backup(tmp_path / "new", io.BytesIO(backup(tmp_path / "live")))
        engine = FakeEngine()
        async with running_service(tmp_path / "new", engine) as service:
            check_results(service, await until_over(service, batch_id))
        assert sorted(engine.executed) == sorted(ids_of(range(7, 20)))

    run(scenario())


def test_calls_wait_for_the_moment_of_a_backup_only(tmp_path: Path) -> None:
    """Whatever a batch needs is in it, even if the batch ends while it is written."""

    class Slow(io.BytesIO):
        def write(self, data: object) -> int:
            asyncio.run_coroutine_threadsafe(ended(), loop).result(PATIENCE_S)
            return super().write(data)  # type: ignore[arg-type]

    async def ended() -> None:
        engine.release()
        row = await until_over(service, batch_id)
        service.store.delete_file(row["input_file_id"])
        service.store.delete_file(row["output_file_id"] or "")

    async def scenario() -> None:
        nonlocal service, loop, batch_id
        loop, file = asyncio.get_running_loop(), Slow()
        async with running_service(tmp_path / "live", engine) as service:
            batch_id = submit(service, make_lines(6))
            await engine.until(lambda: len(engine.answered) == 2)
            await asyncio.to_thread(write_backup, tmp_path / "live", file)
        restore_backup(tmp_path / "new", io.BytesIO(file.getvalue()))
        async with running_service(tmp_path / "new") as other:
            row = await until_over(other, batch_id)
            assert len(result_lines(other, row, "output")) == 6

    service: BatchService
    loop: asyncio.AbstractEventLoop
    batch_id = ""
    engine = FakeEngine()
    engine.hold(ids_of(range(2, 6)))
    run(scenario())


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live, new, file = tmp_path / "live", tmp_path / "new", tmp_path / "backup.tar"
    store = BatchStore(live)
    store.insert("clients", {"name": "ann", "role": "client"})
    old_umask = os.umask(0o022)
    try:
        assert main(["backup", str(file), f"--offline-batch-dir={live}"]) == 0
        assert main(["restore", str(file), f"--offline-batch-dir={new}"]) == 0
    finally:
        os.umask(old_umask)
    store.close()
    assert file.stat().st_mode & 0o077 == 0
    restored = BatchStore(new)
    assert restored.rows("SELECT name FROM clients") == [{"name": "ann"}]
    restored.close()
    assert main(["restore", str(file), f"--offline-batch-dir={new}"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"live", "new", "backup.tar"}


def test_a_backup_through_a_pipe_and_at_a_url(tmp_path: Path) -> None:
    BatchStore(tmp_path / "live").close()
    command = [sys.executable, "-m", "sglang_batch"]
    piped = subprocess.run(
        [*command, "backup", "-", "--offline-batch-dir", tmp_path / "live"],
        check=True,
        capture_output=True,
    )
    assert names_in(piped.stdout) == ["batches.sqlite3"]
    url = f"file://{tmp_path}/at-url.tar"
    assert main(["backup", url, f"--offline-batch-dir={tmp_path / 'live'}"]) == 0
    before = Path(tmp_path / "at-url.tar").read_bytes()
    # One that fails leaves the last one as it is.
    assert main(["backup", url, f"--offline-batch-dir={tmp_path / 'none'}"]) == 2
    assert Path(tmp_path / "at-url.tar").read_bytes() == before
    assert main(["restore", url, f"--offline-batch-dir={tmp_path / 'new'}"]) == 0


@pytest.mark.parametrize("target", ["", ".", "http://127.0.0.1:9/batches.tar"])
def test_a_backup_to_what_is_no_file_is_refused_before_it_is_made(
    tmp_path: Path,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    BatchStore(tmp_path / "live").close()
    monkeypatch.chdir(tmp_path)
    assert main(["backup", target, f"--offline-batch-dir={tmp_path / 'live'}"]) == 2
    said = capsys.readouterr().err
    assert f"error: {target!r} is " in said and "name a file" in said
    assert [path.name for path in tmp_path.iterdir()] == ["live"]


@pytest.mark.parametrize("cut", [0, 100, 5000, -11_000])
def test_part_of_a_backup_is_refused(tmp_path: Path, cut: int) -> None:
    BatchStore(tmp_path / "live").close()
    (tmp_path / "live" / "files" / "file-1").write_bytes(b"x" * 5000)
    data = backup(tmp_path / "live")
    with pytest.raises(InputError, match="no whole backup"):
        restore_backup(tmp_path / "new", io.BytesIO(data[:cut]))
    assert not (tmp_path / "new").exists()


def _no_database(path: Path) -> None:
    path.write_bytes(b"x" * 5000)


def _half_of_one(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _somebody_elses(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE others (name TEXT)")


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO migrations VALUES ('m999_newer')")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_database, "file is not a database"),
        (_half_of_one, "malformed"),
        (_somebody_elses, "no such table: migrations"),
        (
            _newer,
            "newer release of sglang-batch, to install instead: it has m999_newer",
        ),
    ],
)
def test_a_backup_with_an_unusable_database_is_refused(
    tmp_path: Path,
    change: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    BatchStore(tmp_path / "live").close()
    database, file = tmp_path / "live" / "batches.sqlite3", tmp_path / "backup.tar"
    change(database)
    with tarfile.open(file, "w") as tar:
        tar.add(database, database.name)
    assert main(["restore", str(file), f"--offline-batch-dir={tmp_path / 'new'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file} is no whole backup") and said in error
    assert not (tmp_path / "new").exists()


def test_a_server_does_not_use_the_database_of_a_newer_release(tmp_path: Path) -> None:
    BatchStore(tmp_path).close()
    _newer(tmp_path / "batches.sqlite3")
    with pytest.raises(StoreError, match=r"newer release .* m999_newer"):
        BatchStore(tmp_path)


def test_another_tar_file_is_refused(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../../outside"), io.BytesIO())
    with pytest.raises(InputError, match="outside"):
        restore_backup(tmp_path / "new", io.BytesIO(data.getvalue()))
    with pytest.raises(ConfigError, match="has no batches"):
        backup(tmp_path / "new")


def test_a_backup_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "backup" / "files").mkdir(parents=True)
        (tmp_path / "backup" / "files" / "file-old").write_bytes(b"old")
        async with running_service(tmp_path) as service:
            batch_id = submit(service, make_lines(3))
            await until_over(service, batch_id)
            data = backup(tmp_path)
            assert batch_row(service, batch_id)["output_file_id"] in str(names_in(data))
            assert "file-old" not in str(names_in(data))
            assert not (tmp_path / "backup").exists()

    run(scenario())
