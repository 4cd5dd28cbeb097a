"""Stores of earlier versions, which a server takes up where the earlier one was.

``old_stores/`` has a backup of a store for each version of the schema, named by the commit
that wrote it. Each has a completed batch with a failed line, one in progress with 2 of 6
answers, and one that was just created. From 4ccd512 on, it has the key ``sk-batch-1`` of
ann, and her usage.
"""

from __future__ import annotations

import gzip
import io
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from batch_service import (
    check_results,
    counts_of,
    custom_ids,
    result_lines,
    running_service,
    until_over,
)
from builders import ids_of, run
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry

from sglang_batch.batch_api import protocol as api
from sglang_batch.batch_api.objects import batch_object
from sglang_batch.server.access.keys import digest, find_caller
from sglang_batch.server.access.usage import usage_since
from sglang_batch.server.metrics import BatchMetrics
from sglang_batch.store.backup import restore_backup
from sglang_batch.store.database import MIGRATIONS

pytestmark = pytest.mark.usefixtures("quick_polling")

STORES = sorted(Path(__file__).with_name("old_stores").glob("*.tar.gz"))


def names(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM migrations ORDER BY name")]


@pytest.mark.parametrize("path", STORES, ids=lambda path: path.name.partition(".")[0])
def test_an_old_store_is_taken_up(tmp_path: Path, path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            rows = service.store.list_batches(after=None, limit=10)
            made, part, done = [await until_over(service, row["id"]) for row in rows]
            assert {row["status"] for row in (made, part, done)} == {api.COMPLETED}
            assert counts_of(done) == (5, 4, 1)
            assert custom_ids(result_lines(service, done, "error")) == ["r2"]
            for row in (part, made):
                check_results(service, row)
            assert counts_of(part) == (6, 6, 0)
            assert counts_of(made) == (3, 3, 0)
            assert sorted(engine.executed) == sorted(
                [*ids_of(range(3)), *ids_of(range(2, 6))]
            )
            for row in (made, part, done):
                assert batch_object(row)["status"] == "completed"
            caller = find_caller(service.store.rows, digest(b"sk-batch-1"))
            if not path.name.startswith("9d1cace"):
                assert caller is not None
                assert caller.name == "ann"
                assert usage_since(service.store, "", "ann")[0]["lines"] == 5
            metrics = BatchMetrics(service, registry=CollectorRegistry())
            await metrics.sample()
            metrics.close()
            assert service.store.delete_batch(done["id"], (api.COMPLETED,))

    restore_backup(tmp_path, io.BytesIO(gzip.decompress(path.read_bytes())))
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as db:
        before = names(db)
    assert before == list(MIGRATIONS)[: len(before)]
    run(scenario())
    with closing(sqlite3.connect(tmp_path / "batches.sqlite3")) as db:
        assert names(db) == list(MIGRATIONS)


def test_no_version_of_the_schema_is_left_out() -> None:
    """A newer one gets its store when the next migration is added."""
    versions = []
    for path in STORES:
        data = gzip.decompress(path.read_bytes())
        versions.append([name for name in MIGRATIONS if name.encode() in data])
    assert sorted(versions)[-1] == list(MIGRATIONS)[: len(max(versions))]
    assert max(map(len, versions)) >= len(MIGRATIONS) - 1
