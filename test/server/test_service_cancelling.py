"""Batches that clients cancel."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from batch_service import (
    UNRUN,
    batch_row,
    check_results,
    counts_of,
    custom_ids,
    make_service,
    running_service,
    submit,
    until_over,
)
from builders import ids_of, make_lines, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api

pytestmark = pytest.mark.usefixtures("quick_polling")


def test_a_cancelled_batch_keeps_its_answers_and_lists_unrun_lines(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine(failing={"r1": 400})
        engine.hold(ids_of(range(4, 10)))
        async with running_service(tmp_path, engine, policy="fcfs") as service:
            batch_id = submit(service, make_lines(10))
            await engine.until_stalled(4, 4)
            asked = service.cancel_batch(batch_id)
            assert asked is not None
            assert asked["status"] == api.CANCELLING
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.CANCELLED
            assert row["cancelled_at"] >= row["cancelling_at"]
            assert row["completed_at"] is None
            # Lines that never ran are no failures.
            assert counts_of(row) == (10, 3, 1)
            assert custom_ids(outputs) == ["r0", "r2", "r3"]
            assert custom_ids(errors) == ["r1", *ids_of(range(4, 10))]
            assert errors[0]["response"]["status_code"] == 400
            for line in errors[1:]:
                assert (line["response"], line["error"]) == (None, UNRUN)
            assert sorted(engine.aborted) == ids_of(range(4, 8))
            assert engine.running == set()

    run(scenario())


def test_a_batch_cancelled_in_the_queue_never_reaches_the_engine(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        async with running_service(tmp_path, engine, max_batches=1) as service:
            first = submit(service, make_lines(1))
            await engine.until_stalled(0, 1)
            second = submit(service, make_lines(3))
            while batch_row(service, second)["status"] != api.IN_PROGRESS:
                await asyncio.sleep(0.002)
            service.cancel_batch(second)
            row = await until_over(service, second)  # while the first still runs
            engine.release()
            assert (await until_over(service, first))["status"] == api.COMPLETED
            outputs, errors = check_results(service, row)
            assert row["status"] == api.CANCELLED
            assert counts_of(row) == (3, 0, 0)
            assert (outputs, row["output_file_id"]) == ([], None)
            assert [line["error"] for line in errors] == [UNRUN] * 3
            assert engine.executed == ["r0"]

    run(scenario())


@pytest.mark.parametrize("lines", [make_lines(2), ["bad"], []])
def test_a_batch_cancelled_before_validation_ends_cancelled(
    tmp_path: Path, lines: list[str]
) -> None:
    async def scenario() -> None:
        early = make_service(tmp_path)
        batch_id = submit(early, lines)
        early.cancel_batch(batch_id)
        early.store.close()
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, batch_id)
            assert row["status"] == api.CANCELLED
            assert row["failed_at"] is None
            assert row["cancelled_at"] >= row["cancelling_at"]
            assert engine.executed == []
            if lines == make_lines(2):
                check_results(service, row)

    run(scenario())


def test_a_batch_that_is_over_cannot_be_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path) as service:
            row = await until_over(service, submit(service, make_lines(1)))
            assert service.cancel_batch(row["id"]) == row
            assert service.cancel_batch("batch_0") is None

    run(scenario())


def test_cancelling_twice_is_cancelling_once(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    batch_id = submit(service, make_lines(1))
    assert service.cancel_batch(batch_id) == service.cancel_batch(batch_id)
    service.store.close()
