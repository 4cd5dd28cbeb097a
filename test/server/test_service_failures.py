"""Batches whose input, engine or store fails them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from batch_service import (
    batch_row,
    check_results,
    counts_of,
    custom_ids,
    leftovers,
    make_service,
    result_lines,
    run_part,
    running_service,
    submit,
    until_over,
)
from builders import (
    CHAT,
    NO_USAGE,
    ids_of,
    make_body,
    make_file,
    make_line,
    make_lines,
    run,
)
from fake_engine import FakeEngine

from sglang_batch.batch_api import protocol as api
from sglang_batch.job.inflight_limit import InflightLimit
from sglang_batch.server.result_saver import Pauses, ResultSaver
from sglang_batch.store.batch_store import Row
from sglang_batch.store.result_log import ResultLog

pytestmark = pytest.mark.usefixtures("quick_polling")


# Input that cannot run ----------------------------------------------------------


def test_a_bad_line_fails_the_batch_before_anything_runs(tmp_path: Path) -> None:
    lines = [*make_lines(2), "bad", make_line("r3", body=make_body(model="other"))]

    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, submit(service, lines))
            errors = json.loads(row["errors"])
            assert row["status"] == api.FAILED
            assert row["failed_at"] >= row["created_at"]
            assert errors["object"] == "list"
            assert [(e["line"], e["code"], e["param"]) for e in errors["data"]] == [
                (3, "invalid_json_line", None),
                (4, "model_not_found", "body.model"),
            ]
            assert counts_of(row) == (0, 0, 0)
            assert row["output_file_id"] is row["error_file_id"] is None
            assert engine.num_prepared == 0
            assert leftovers(service) == []

    run(scenario())


@pytest.mark.parametrize(
    "name", ["file-none", "", "../outside.jsonl", "{directory}/outside.jsonl", "."]
)
def test_only_a_file_of_the_store_can_be_an_input(tmp_path: Path, name: str) -> None:
    make_file(tmp_path, make_lines(2), "outside.jsonl")
    input_file_id = name.format(directory=tmp_path)

    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            batch = service.create_batch(input_file_id, CHAT, "24h", None)
            row = await until_over(service, batch["id"])
            assert row["status"] == api.FAILED
            assert json.loads(row["errors"])["data"] == [
                {
                    "code": "invalid_request",
                    "line": None,
                    "message": f"Cannot find file {input_file_id}.",
                    "param": "file_id",
                }
            ]
            assert engine.num_prepared == 0
            assert leftovers(service) == []

    run(scenario())


def test_an_engine_that_breaks_fails_its_batch_and_not_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(raising={"r1": ConnectionError("the scheduler died")})
        async with running_service(tmp_path, engine) as service:
            first = submit(service, make_lines(3))
            second = submit(service, [make_line("r9")])
            row = await until_over(service, first)
            assert row["status"] == api.FAILED
            [error] = json.loads(row["errors"])["data"]
            assert error["code"] == "internal_error"
            assert error["message"] == "the scheduler died"
            assert (await until_over(service, second))["status"] == api.COMPLETED

    run(scenario())


def test_an_engine_that_breaks_once_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(raising={"r2": ConnectionError("out of memory")})
        async with running_service(tmp_path, engine) as service:
            batch_id = submit(service, make_lines(4))
            while engine.executed.count("r2") == 0:
                await asyncio.sleep(0)
            engine.raising.clear()
            row = await until_over(service, batch_id)
            assert row["status"] == api.COMPLETED
            outputs, errors = check_results(service, row)
            assert custom_ids(outputs) == ids_of(range(4))
            assert errors == []

    run(scenario())


def test_an_engine_that_stays_broken_fails_the_batch_and_repeats_no_line(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine(raising={"r2": ConnectionError("out of memory")})
        async with running_service(
            tmp_path, engine, policy="fcfs", max_inflight=1
        ) as service:
            batch_id = submit(service, make_lines(4))
            row = await until_over(service, batch_id)
            assert row["status"] == api.FAILED
            assert engine.executed.count("r0") == engine.executed.count("r1") == 1
            assert custom_ids(result_lines(service, row, "output")) == ["r0", "r1"]

    run(scenario())


def test_results_that_cannot_be_read_back_are_left_where_they_are(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        batch_id = await run_part(tmp_path, 4, 2, FakeEngine())
        log = tmp_path / "batches" / batch_id / "results.jsonl"
        log.rename(log.with_name("results"))
        log.symlink_to(log)
        async with running_service(tmp_path) as service:
            row = await until_over(service, batch_id)
            assert row["status"] == api.FAILED
            assert "symbolic links" in row["errors"]
            assert log.with_name("results").exists()

    run(scenario())


@pytest.mark.parametrize(
    "damaged", [b"\0" * 50, b'{"response":5}', b"[0,false,[0,0,0],{}]"]
)
def test_a_damaged_result_is_made_again_and_the_others_are_kept(
    tmp_path: Path, damaged: bytes
) -> None:
    async def scenario() -> None:
        batch_id = await run_part(tmp_path, 4, 2, FakeEngine())
        log = tmp_path / "batches" / batch_id / "results.jsonl"
        second = log.read_bytes().splitlines()[1]
        log.write_bytes(damaged + b"\n" + second + b"\n")
        after = FakeEngine()
        async with running_service(tmp_path, after) as service:
            row = await until_over(service, batch_id)
            outputs, _ = check_results(service, row)
            assert (row["status"], len(outputs)) == (api.COMPLETED, 4)
            assert sorted(after.executed) == ["r0", "r2", "r3"]

    run(scenario())


@pytest.mark.parametrize("line", [b"{}", b'{"response":null}', b"[5]"])
def test_an_error_line_of_another_shape_is_an_unknown_error(
    tmp_path: Path, line: bytes
) -> None:
    service = make_service(tmp_path)
    log = ResultLog(tmp_path / "log", 1)
    log.put(0, line, ok=False, usage=NO_USAGE)
    pauses = Pauses("batch_1", service.store, InflightLimit())
    saver = ResultSaver("batch_1", service.store, log, pauses, lambda: 0.0)
    assert saver.errors.by_code() == {"unknown": 1}
    log.close()
    service.store.close()


def test_a_store_that_is_busy_once_does_not_stop_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path) as service:
            batches_in = service.store.batches_in
            failures = [OSError("busy")]

            def failing(statuses: tuple[str, ...]) -> list[Row]:
                if failures:
                    raise failures.pop()
                return batches_in(statuses)

            monkeypatch.setattr(service.store, "batches_in", failing)
            row = await until_over(service, submit(service, make_lines(1)))
            assert row["status"] == api.COMPLETED
            assert failures == []

    run(scenario())


# The input file -----------------------------------------------------------------


def test_deleting_the_input_file_of_a_running_batch_does_not_matter(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(4, 10)))
        async with running_service(tmp_path, engine, policy="fcfs") as service:
            batch_id = submit(service, make_lines(10))
            await engine.until_stalled(4, 4)
            file_id = batch_row(service, batch_id)["input_file_id"]
            assert service.store.delete_file(file_id)
            engine.release()
            row = await until_over(service, batch_id)
            outputs, _ = check_results(service, row)
            assert custom_ids(outputs) == ids_of(range(10))

    run(scenario())


def test_deleting_the_input_file_before_validation_fails_the_batch(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        with_file = make_service(tmp_path)
        batch_id = submit(with_file, make_lines(2))
        with_file.store.delete_file(batch_row(with_file, batch_id)["input_file_id"])
        with_file.store.close()
        async with running_service(tmp_path) as service:
            row = await until_over(service, batch_id)
            assert row["status"] == api.FAILED
            assert "Cannot find file" in row["errors"]

    run(scenario())
