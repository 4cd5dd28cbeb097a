"""Batches from upload to result files, and requests without a file."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from batch_service import (
    add_input,
    batch_row,
    check_results,
    counts_of,
    custom_ids,
    leftovers,
    make_service,
    running_service,
    submit,
    until_over,
)
from builders import answer_text, make_line, make_lines, make_requests, run
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.batch_api.objects import batch_object
from sglang_batch.errors import StoreError
from sglang_batch.request import engine_request_id

pytestmark = pytest.mark.usefixtures("quick_polling")


# To the end ---------------------------------------------------------------------


def test_a_batch_answers_every_line_in_input_order(tmp_path: Path) -> None:
    texts = ["b", "a", "c", "a"]
    lines = [make_line(f"r{i}", text) for i, text in enumerate(texts)]

    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine, max_inflight=1) as service:
            batch_id = submit(service, lines, metadata={"k": "v"})
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.COMPLETED
            assert counts_of(row) == (4, 4, 0)
            assert (row["input_tokens"], row["output_tokens"]) == (4, 4)
            assert row["model"] == "demo"
            # Of four prompts of one token two are the same.
            details = batch_object(row)["usage"]["input_tokens_details"]
            assert details == {"cached_tokens": 0, "optimal_cached_share": 0.25}
            assert [answer_text(line) for line in outputs] == texts
            assert (errors, row["error_file_id"]) == ([], None)
            stamps = ("created_at", "in_progress_at", "finalizing_at", "completed_at")
            assert [row[s] for s in stamps] == sorted(row[s] for s in stamps)
            assert row["expires_at"] - row["created_at"] == 86400
            file = service.store.get_file(row["output_file_id"])
            assert file is not None
            path = service.store.file_path(file["id"])
            assert file["purpose"] == "batch_output"
            assert file["bytes"] == path.stat().st_size
            assert engine.executed == ["r1", "r3", "r0", "r2"]

    run(scenario())


def test_errors_of_lines_go_to_the_error_file_and_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(rejected=["r1"], failing={"r3": 500})
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, submit(service, make_lines(5)))
            outputs, errors = check_results(service, row)
            assert row["status"] == api.COMPLETED
            assert counts_of(row) == (5, 3, 2)
            assert custom_ids(outputs) == ["r0", "r2", "r4"]
            assert custom_ids(errors) == ["r1", "r3"]
            assert [line["response"]["status_code"] for line in errors] == [400, 500]
            assert all(line["error"] is None for line in errors)

    run(scenario())


def test_a_batch_of_failures_completes_without_an_output_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(failing={f"r{i}": 400 for i in range(3)})
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, submit(service, make_lines(3)))
            check_results(service, row)
            assert row["status"] == api.COMPLETED
            assert row["output_file_id"] is None
            assert counts_of(row) == (3, 0, 3)

    run(scenario())


def test_counts_are_visible_while_a_batch_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(failing={"r1": 400})
        engine.hold(["r3"])
        async with running_service(tmp_path, engine) as service:
            batch_id = submit(service, make_lines(4, "text"))
            while counts_of(batch_row(service, batch_id)) != (4, 2, 1):
                await asyncio.sleep(0.002)
            row = batch_row(service, batch_id)
            assert row["status"] == api.IN_PROGRESS
            assert row["input_tokens"] == 8

    run(scenario())


# Waves --------------------------------------------------------------------------


def test_requests_without_a_file_are_answered_as_they_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(failing={"r1": 400})
        engine.hold(["r0"])
        async with running_service(tmp_path, engine) as service:
            answers = service.run_requests("wave_1", make_requests(["a", "b", "c"]))
            seen = [(await anext(answers))[0].custom_id for _ in range(2)]
            assert sorted(seen) == ["r1", "r2"]
            engine.release()
            rest = [(asked.custom_id, output.ok) async for asked, output in answers]
            assert rest == [("r0", True)]
            assert sorted(engine.rids) == [
                engine_request_id("wave_1", i) for i in range(3)
            ]

    run(scenario())


def test_a_client_that_goes_away_aborts_its_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r1", "r2"])
        async with running_service(tmp_path, engine) as service:
            answers = service.run_requests("wave_1", make_requests(["a", "b", "c"]))
            assert (await anext(answers))[0].custom_id == "r0"
            await answers.aclose()
            await engine.until(lambda: sorted(engine.aborted) == ["r1", "r2"])

    run(scenario())


def test_an_engine_that_breaks_breaks_the_wave(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(raising={"r0": ConnectionError("the scheduler died")})
        async with running_service(tmp_path, engine) as service:
            with pytest.raises(ConnectionError, match="the scheduler died"):
                async for _ in service.run_requests("wave_1", make_requests(["a"])):
                    pass

    run(scenario())


# Smaller things -----------------------------------------------------------------


def test_a_service_that_was_not_started_has_no_engine(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    with pytest.raises(StoreError, match="has not been started"):
        asyncio.run(anext(service.run_requests("wave_0", [])))
    service.store.close()


def test_an_upload_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionError

    service = make_service(tmp_path)
    with pytest.raises(ConnectionError):
        add_input(service, Broken())
    assert leftovers(service) == []
    service.store.close()


def test_a_new_batch_shows_zero_counts_and_when_it_expires(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    batch = batch_object(batch_row(service, submit(service, make_lines(1))))
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["expires_at"] - batch["created_at"] == 86400
    service.store.close()
