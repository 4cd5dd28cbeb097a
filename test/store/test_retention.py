"""Which data is removed, and which is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.server.http.idempotency import keep_answer
from sglang_batch.server.retention import collect
from sglang_batch.store import batch_store
from sglang_batch.store.batch_store import BatchStore
from sglang_batch.store.batch_store import now as clock
from sglang_batch.store.incoming import UploadStore

CONFIG = OfflineBatchConfig(file_days=2)
NAME = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path / "store")
    yield store
    store.close()


def add_file(store: BatchStore, file_id: str, kept_s: int | None) -> Path:
    path = store.file_path(file_id)
    path.write_bytes(b"abc")
    store.record_file(file_id, "x", "batch", kept_s)
    return path


def add_batch(store: BatchStore, batch_id: str, status: str, **fields: Any) -> Path:
    store.insert(
        "batches",
        {
            "id": batch_id,
            "status": status,
            "endpoint": "/v1/embeddings",
            "input_file_id": "file-1",
            "completion_window": "24h",
            "created_at": 1,
            "expires_at": 2,
            **fields,
        },
    )
    path = store.work_dir(batch_id)
    path.mkdir()
    (path / "results.jsonl").write_bytes(b"x")
    return path


def add_upload(store: BatchStore, upload_id: str, created_at: int) -> Path:
    uploads = UploadStore(store)
    uploads.add(
        {
            "id": upload_id,
            "purpose": "batch",
            "filename": "x",
            "mime_type": "x",
            "bytes": 3,
            "created_at": created_at,
        }
    )
    source = store.incoming / "source"
    source.write_bytes(b"abc")
    uploads.add_part(upload_id, f"part_{upload_id}", source, lambda: None)
    return uploads.directory(upload_id)


def test_a_store_without_anything_old_stays_as_it_is(store: BatchStore) -> None:
    paths = [add_file(store, "file-1", None), add_file(store, "file-2", 60)]
    paths += [add_batch(store, "batch_1", "in_progress")]
    paths += [add_upload(store, "upload_1", clock())]
    assert collect(store, CONFIG, clock()) == {}
    assert all(path.exists() for path in paths)


def test_files_go_when_they_expire(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = clock()
    monkeypatch.setattr(batch_store, "now", lambda: at)
    gone, kept = add_file(store, "file-1", 0), add_file(store, "file-2", 1)
    assert collect(store, CONFIG, at) == {"files": 1}
    assert (gone.exists(), kept.exists()) == (False, True)
    assert [row["id"] for row in store.rows("SELECT id FROM files")] == ["file-2"]
    assert collect(store, CONFIG, at) == {}


def test_uploads_go_with_their_parts_and_are_forgotten_a_day_later(
    store: BatchStore,
) -> None:
    at = clock()
    path, young = (
        add_upload(store, "upload_1", at),
        add_upload(store, "upload_2", at + 1),
    )
    assert store.bytes_stored() == 6
    assert collect(store, CONFIG, at + 3600) == {"uploads": 1}
    assert (path.exists(), young.exists(), store.bytes_stored()) == (False, True, 3)
    upload = UploadStore(store).get("upload_1")
    assert upload is not None
    assert upload["status"] == "expired"
    assert collect(store, CONFIG, at + 3600) == {}
    collect(store, CONFIG, at + 3600 + 86_400)
    assert UploadStore(store).get("upload_1") is None


def test_answers_go_after_a_day(store: BatchStore) -> None:
    keep_answer(store, "", "k", "0", {})
    assert collect(store, CONFIG, clock() + 86_390) == {}
    assert len(store.rows("SELECT * FROM idempotent_answers")) == 1
    assert collect(store, CONFIG, clock() + 86_410) == {"answers": 1}
    assert store.rows("SELECT * FROM idempotent_answers") == []


def test_orphans_are_removed_after_an_hour(store: BatchStore) -> None:
    paths = [
        store.directory / name
        for name in (
            "files/file-x",
            "files/.file-x.7.tmp",
            "incoming/tmp1",
            "uploads/u",
        )
    ]
    for path in paths[:3]:
        path.write_bytes(b"x")
    paths[3].mkdir()
    (paths[3] / "part").write_bytes(b"x")
    paths.append(store.work_dir("batch_0"))
    paths[4].mkdir()
    assert collect(store, CONFIG, clock() + 3500) == {}
    assert all(path.exists() for path in paths)
    assert collect(store, CONFIG, clock() + 3700) == {"orphans": 5}
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize("status", ["in_progress", "finalizing", "cancelling"])
def test_results_that_are_being_written_belong_to_their_batch(
    store: BatchStore, status: str
) -> None:
    work = add_batch(store, f"batch_{NAME}", status)
    paths = [
        store.file_path(name)
        for name in (f"file-output-{NAME}", f".file-error-{NAME}.7.tmp")
    ]
    for path in paths:
        path.write_bytes(b"x")
        os.utime(path, (1, 1))
    os.utime(work, (1, 1))
    assert collect(store, CONFIG, clock()) == {}
    store.transition(f"batch_{NAME}", (status,), "completed")
    assert collect(store, CONFIG, clock()) == {"orphans": 3}


def test_the_finished_lines_of_a_failed_batch_are_kept_as_long_as_files(
    store: BatchStore,
) -> None:
    at = clock()
    work = add_batch(store, "batch_1", "failed", failed_at=at)
    done = add_batch(store, "batch_2", "completed", completed_at=at)
    assert collect(store, CONFIG, at + 2 * 86_400 - 1) == {"orphans": 1}
    assert (work.exists(), done.exists()) == (True, False)
    assert collect(store, CONFIG, at + 2 * 86_400) == {"orphans": 1}
    assert not work.exists()
