"""Files and batches in SQLite: transitions, paging, migrations."""

from __future__ import annotations

import itertools
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sglang_batch.errors import StoreError
from sglang_batch.store import batch_store, database
from sglang_batch.store.batch_store import BatchStore, Row


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path / "store")
    yield store
    store.close()


def make_batch_row(batch_id: str = "batch_1", **fields: Any) -> Row:
    return {
        "id": batch_id,
        "status": "in_progress",
        "endpoint": "/v1/embeddings",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "created_at": 1,
        "expires_at": 2,
        **fields,
    }


def make_file_row(file_id: str = "file-1", **fields: Any) -> Row:
    return {
        "id": file_id,
        "purpose": "batch",
        "filename": "in.jsonl",
        "bytes": 3,
        "created_at": 1,
        "expires_at": None,
        **fields,
    }


def ids_of(rows: list[Row]) -> list[str]:
    return [row["id"] for row in rows]


# Transitions --------------------------------------------------------------------


def test_a_transition_names_where_it_may_come_from(store: BatchStore) -> None:
    store.insert("batches", make_batch_row(status="validating"))
    assert not store.transition("batch_1", ("in_progress",), "finalizing")
    assert store.transition(
        "batch_1", ("validating", "in_progress"), "failed", failed_at=9
    )
    row = store.get_batch("batch_1")
    assert row is not None
    assert (row["status"], row["failed_at"]) == ("failed", 9)


def test_a_transition_that_fails_changes_no_field(store: BatchStore) -> None:
    store.insert("batches", make_batch_row(status="completed"))
    before = store.get_batch("batch_1")
    assert not store.transition(
        "batch_1", ("in_progress",), "cancelling", cancelling_at=9
    )
    assert store.get_batch("batch_1") == before


def test_a_transition_of_no_batch_is_none(store: BatchStore) -> None:
    assert not store.transition("batch_0", ("in_progress",), "failed")


def test_of_two_processes_that_race_one_wins(tmp_path: Path) -> None:
    # For SQLite, two connections are like two processes.
    stores = [BatchStore(tmp_path), BatchStore(tmp_path)]
    ends = ("cancelling", "finalizing")
    barrier = threading.Barrier(2)

    def move(store: BatchStore, batch_id: str, end: str) -> bool:
        barrier.wait()
        return store.transition(batch_id, ("in_progress",), end)

    with ThreadPoolExecutor(2) as threads:
        for i in range(30):
            batch_id = f"batch_{i}"
            stores[0].insert("batches", make_batch_row(batch_id))
            won = list(threads.map(move, stores, [batch_id] * 2, ends))
            assert sorted(won) == [False, True]
            row = stores[0].get_batch(batch_id)
            assert row is not None
            assert row["status"] == ends[won.index(True)]
    for store in stores:
        store.close()


def test_a_status_is_never_set_but_by_a_transition(store: BatchStore) -> None:
    store.insert("batches", make_batch_row())
    with pytest.raises(AssertionError):
        store.update_batch("batch_1", status="completed")


def test_batches_in_a_status_come_oldest_first(store: BatchStore) -> None:
    for i, status in enumerate(["failed", "in_progress", "validating", "in_progress"]):
        store.insert("batches", make_batch_row(f"batch_{i}", status=status))
    found = store.batches_in(("validating", "in_progress"))
    assert ids_of(found) == ["batch_1", "batch_2", "batch_3"]


def test_a_file_is_kept_for_exactly_its_lifetime(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000)  # a new second at each look
    monkeypatch.setattr(batch_store, "now", lambda: next(clock))
    store.file_path("file-1").write_bytes(b"x")
    row = store.record_file("file-1", "x", "batch", 3600)
    assert row["expires_at"] - row["created_at"] == 3600


def test_an_atomic_block_that_fails_leaves_nothing(store: BatchStore) -> None:
    with pytest.raises(ZeroDivisionError), store.atomic():
        store.insert("files", make_file_row())
        store.insert("batches", make_batch_row())
        raise ZeroDivisionError
    assert store.get_file("file-1") is None
    assert store.get_batch("batch_1") is None
    store.insert("batches", make_batch_row())  # and the store still works


def test_other_processes_see_an_atomic_block_whole_or_not_at_all(
    tmp_path: Path, store: BatchStore
) -> None:
    other = BatchStore(store.directory)
    with store.atomic():
        store.insert("files", make_file_row())
        assert other.get_file("file-1") is None
    assert other.get_file("file-1") is not None
    other.close()


# Files --------------------------------------------------------------------------


def test_a_deleted_file_is_gone_from_rows_and_disk(store: BatchStore) -> None:
    store.file_path("file-1").write_bytes(b"abc")
    store.insert("files", make_file_row())
    assert store.delete_file("file-1")
    assert store.get_file("file-1") is None
    assert not store.file_path("file-1").exists()
    assert not store.delete_file("file-1")


def test_deletions_work_on_a_full_disk_each_time(tmp_path: Path) -> None:
    """On a real one: a tmpfs of 4 MB in a mount namespace of its own."""
    isolated = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*isolated, "true"], check=False).returncode:
        pytest.skip("this machine has no mount namespaces for users")
    script = Path(__file__).with_name("deletes_on_full_disk.py")
    done = subprocess.run(
        [*isolated, sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_path_that_is_no_file_of_the_store_is_not_removed(store: BatchStore) -> None:
    path = store.directory / "mine"
    path.write_bytes(b"abc")
    assert not store.delete_file("../mine")
    assert path.exists()
    store.insert("files", make_file_row(owner="ann"))
    assert not store.delete_file("file-1", "bob")
    assert store.delete_file("file-1", "ann")


def test_an_id_is_given_once(store: BatchStore) -> None:
    store.insert("files", make_file_row())
    with pytest.raises(sqlite3.IntegrityError):
        store.insert("files", make_file_row())


# Paging -------------------------------------------------------------------------


def place(store: BatchStore, kind: str, after: str | None) -> int | None:
    return None if after is None else store.place(after, kind)


def pages(list_page: Callable[[str | None], list[Row]]) -> list[list[str]]:
    """All pages, each asked for after the last of the one before."""
    found: list[list[str]] = []
    while rows := list_page(found[-1][-1] if found else None):
        found.append(ids_of(rows))
    return found


def test_pages_of_batches_are_newest_first_without_gap_or_repeat(
    store: BatchStore,
) -> None:
    for i in range(7):  # all in the same second
        store.insert("batches", make_batch_row(f"batch_{i}"))
    assert pages(
        lambda after: store.list_batches(after=place(store, "openai", after), limit=3)
    ) == [
        ["batch_6", "batch_5", "batch_4"],
        ["batch_3", "batch_2", "batch_1"],
        ["batch_0"],
    ]


@pytest.mark.parametrize("descending", [True, False])
def test_pages_of_files_go_both_ways(store: BatchStore, descending: bool) -> None:
    for i in range(5):
        store.insert("files", make_file_row(f"file-{i}"))
    expected = [f"file-{i}" for i in range(5)]
    if descending:
        expected.reverse()
    assert pages(
        lambda after: store.list_files(
            after=place(store, "files", after),
            limit=2,
            descending=descending,
            purpose=None,
        )
    ) == [expected[:2], expected[2:4], expected[4:]]


def test_files_of_one_purpose_are_paged_among_themselves(store: BatchStore) -> None:
    for i in range(6):
        purpose = "batch" if i % 2 else "batch_output"
        store.insert("files", make_file_row(f"file-{i}", purpose=purpose))
    assert pages(
        lambda after: store.list_files(
            after=place(store, "files", after),
            limit=2,
            descending=False,
            purpose="batch",
        )
    ) == [["file-1", "file-3"], ["file-5"]]


def test_a_row_deleted_or_added_between_pages_shifts_no_other(
    store: BatchStore,
) -> None:
    for i in range(4):
        store.insert("files", make_file_row(f"file-{i}"))

    def page(after: str | None) -> list[str]:
        return ids_of(
            store.list_files(
                after=place(store, "files", after),
                limit=2,
                descending=True,
                purpose=None,
            )
        )

    assert page(None) == ["file-3", "file-2"]
    store.delete_file("file-3")
    store.insert("files", make_file_row("file-4"))
    assert page("file-2") == ["file-1", "file-0"]


# Schema -------------------------------------------------------------------------

COLUMNS = {
    "files": "seq id purpose filename bytes created_at expires_at owner",
    "batches": (
        "seq id status endpoint input_file_id completion_window created_at expires_at "
        "metadata model errors output_file_id error_file_id in_progress_at "
        "finalizing_at completed_at failed_at cancelling_at cancelled_at total "
        "completed failed input_tokens cached_tokens output_tokens reasoning_tokens "
        "optimal_cached_share owner api priority expired_at output_expires_after "
        "paused_reason line_errors error_reasons dedupe enough merged "
        "merged_input_tokens merged_cached_tokens merged_output_tokens engine_s "
        "truncated trace_context"
    ),
    "webhooks": "id endpoint type batch_id created_at attempts due_at",
    "uploads": (
        "seq id owner status purpose filename mime_type bytes created_at expires_at "
        "file_expires_after file_id completed_with"
    ),
    "upload_parts": "seq id upload_id bytes created_at",
    "idempotent_answers": "owner key request_sha256 status_code body created_at",
    "clients": "name role models batches lines tokens enqueued_tokens",
    "keys": "id name sha256 hint created_at revoked_at",
    "usage": (
        "day name batches lines calls input_tokens cached_tokens output_tokens "
        "merged_tokens engine_s"
    ),
    "deleted": "id kind seq owner deleted_at",
    "migrations": "name",
}


def columns_of(db: sqlite3.Connection) -> dict[str, str]:
    tables = db.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND name NOT LIKE 'sqlite_%'"
    ).fetchall()
    return {
        table: " ".join(row[1] for row in db.execute(f"PRAGMA table_info({table})"))
        for (table,) in tables
    }


def test_a_new_database_has_the_final_schema() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        database.migrate(db)
        assert columns_of(db) == COLUMNS


def test_migrating_again_changes_nothing(store: BatchStore) -> None:
    store.insert("batches", make_batch_row())
    store.insert("files", make_file_row())
    before = (store.get_batch("batch_1"), store.get_file("file-1"))
    again = BatchStore(store.directory)
    assert (again.get_batch("batch_1"), again.get_file("file-1")) == before
    again.close()
    with closing(sqlite3.connect(store.directory / "batches.sqlite3")) as db:
        assert columns_of(db) == COLUMNS
        applied = [name for (name,) in db.execute("SELECT name FROM migrations")]
    assert applied == list(database.MIGRATIONS)


def test_a_new_migration_is_applied_once_to_an_old_database(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.insert("files", make_file_row())
    more = ("ALTER TABLE files ADD COLUMN more TEXT DEFAULT 'x'",)
    monkeypatch.setitem(database.MIGRATIONS, "m999_more", more)
    for _ in range(2):
        newer = BatchStore(store.directory)
        row = newer.get_file("file-1")
        newer.close()
        assert row is not None
        assert row["more"] == "x"


def test_a_migration_that_fails_leaves_the_old_schema(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ("ALTER TABLE files ADD COLUMN more TEXT", "nonsense")
    monkeypatch.setitem(database.MIGRATIONS, "m999_bad", bad)
    with pytest.raises(StoreError, match="nonsense"):
        BatchStore(store.directory)
    with closing(sqlite3.connect(store.directory / "batches.sqlite3")) as db:
        assert columns_of(db) == COLUMNS


def test_many_processes_may_open_a_new_store_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def open_store(directory: Path) -> int:
        barrier.wait()
        store = BatchStore(directory)
        num_batches = len(store.list_batches(after=None, limit=1))
        store.close()
        return num_batches

    with ThreadPoolExecutor(8) as threads:
        for i in range(40):
            directory = tmp_path / str(i)
            assert list(threads.map(open_store, [directory] * 8)) == [0] * 8


# Directories that cannot be used ---------------------------------------------------


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"a file")
    directory = tmp_path / "taken" / "store"
    with pytest.raises(StoreError, match=rf"{directory}.*--offline-batch-dir"):
        BatchStore(directory)


def test_a_database_that_is_none_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite3").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=str(tmp_path)):
        BatchStore(tmp_path)


def test_an_input_counts_after_its_file_is_deleted(store: BatchStore) -> None:
    store.file_path("file-1").write_bytes(b"abc")
    store.record_file("file-1", "in.jsonl", "batch", None)
    copy = store.work_dir("batch_1") / "input.jsonl"
    copy.parent.mkdir()
    os.link(store.file_path("file-1"), copy)
    assert store.bytes_stored() == 3
    assert store.delete_file("file-1")
    assert store.bytes_stored() == 3
    copy.unlink()
    assert store.bytes_stored() == 0


def test_a_search_finds_no_names_of_other_clients_files(store: BatchStore) -> None:
    store.insert("files", make_file_row(filename="secret.jsonl", owner="ann"))
    store.insert("batches", make_batch_row("batch_1", owner="ann"))
    store.insert("batches", make_batch_row("batch_2", owner="bob", status="failed"))
    assert store.search_batches("secret", limit=9, owner="bob") == []
    assert ids_of(store.search_batches("secret", limit=9, owner="ann")) == ["batch_1"]
    assert ids_of(store.search_batches("secret", limit=9)) == ["batch_1"]
