"""Batches from upload to result files, with crashes, cancels and restarts between."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import (
    CHAT,
    PATIENCE_S,
    FakeEngine,
    answer_text,
    batch_row,
    make_body,
    make_file,
    make_line,
    make_lines,
    make_requests,
    make_service,
    parse_lines,
    result_lines,
    run,
    running_service,
    submit,
    until_over,
)

from sglang_batch import runner as runner_module
from sglang_batch.batch_api import protocol as api
from sglang_batch.batch_api.objects import batch_object
from sglang_batch.errors import StoreError
from sglang_batch.request import engine_request_id
from sglang_batch.service import BatchService
from sglang_batch.store.batch_store import Row
from sglang_batch.store.lock import FileLock

UNRUN = {
    "code": "batch_cancelled",
    "message": "This request was not executed because the batch was cancelled.",
}


@pytest.fixture(autouse=True)
def quick_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.002)
    monkeypatch.setattr(runner_module, "LOCK_PATIENCE_S", 0.05)
    monkeypatch.setattr(runner_module, "RETRY_AFTER_S", 0.01)


def ids_of(indices: Iterable[int]) -> list[str]:
    return [f"r{i}" for i in indices]


def custom_ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def counts_of(row: Row) -> tuple[int, int, int]:
    return row["total"], row["completed"], row["failed"]


def leftovers(service: BatchService) -> list[str]:
    """What the store's directory holds beyond clients' files and batches at work."""
    files_known = service.store.list_files(
        after=None, limit=1000, descending=True, purpose=None
    )
    at_work = service.store.batches_in(api.ACTIVE_STATUSES)
    known = {row["id"] for row in (*files_known, *at_work)}
    files = {path.name for path in (service.store.directory / "files").iterdir()}
    batches = {path.name for path in (service.store.directory / "batches").iterdir()}
    return sorted((files | batches) - known)


def check_results(
    service: BatchService, row: Row
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of both files, after what must hold for every batch that ran."""
    outputs = result_lines(service, row, "output")
    errors = result_lines(service, row, "error")
    assert len(outputs) + len(errors) == row["total"]
    assert len({*custom_ids(outputs), *custom_ids(errors)}) == row["total"]
    for lines in (outputs, errors):
        numbers = [int(custom_id[1:]) for custom_id in custom_ids(lines)]
        assert numbers == sorted(numbers), "not in input order"
    assert {line["response"]["status_code"] for line in outputs} <= {200}
    assert row["completed"] == len(outputs)
    assert row["failed"] == sum(line["response"] is not None for line in errors)
    assert leftovers(service) == []
    return outputs, errors


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


def test_batches_run_one_after_the_other_as_they_become_valid(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(["r0"])
        async with running_service(tmp_path, engine) as service:
            batch_ids = []
            for lines in (make_lines(2), [make_line("r7")], [make_line("r8")]):
                batch_ids.append(submit(service, lines))
                while batch_row(service, batch_ids[-1])["status"] != api.IN_PROGRESS:
                    await asyncio.sleep(0.002)
            await engine.until_stalled(1, 1)
            engine.release()
            for batch_id in batch_ids:
                check_results(service, await until_over(service, batch_id))
            assert engine.executed[2:] == ["r7", "r8"]

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


# Input that cannot run ------------------------------------------------------------


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


def test_an_engine_that_stays_broken_leaves_what_was_finished_on_disk(
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
            log = service.store.work_dir(batch_id) / "results.jsonl"
            assert len(parse_lines(log.read_bytes())) == 2

    run(scenario())


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


# The input file ---------------------------------------------------------------------


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


# Cancelling -------------------------------------------------------------------------


def test_a_cancelled_batch_keeps_its_answers_and_lists_what_never_ran(
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
        async with running_service(tmp_path, engine) as service:
            first = submit(service, make_lines(1))
            second = submit(service, make_lines(3))
            await engine.until_stalled(0, 1)
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


# Restarts -----------------------------------------------------------------------------


async def run_part(
    directory: Path, num_lines: int, num_answered: int, engine: FakeEngine
) -> str:
    """Begin a batch, stop the server when so many lines are answered."""
    engine.hold(ids_of(range(num_answered, num_lines)))
    async with running_service(
        directory, engine, policy="fcfs", max_inflight=3
    ) as service:
        batch_id = submit(service, make_lines(num_lines))
        await engine.until_stalled(num_answered, min(3, num_lines - num_answered))
    return batch_id


def test_a_stopped_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = FakeEngine(failing={"r2": 400})
        batch_id = await run_part(tmp_path, 20, 7, first)
        assert sorted(first.aborted) == ["r7", "r8", "r9"]
        second = FakeEngine()
        async with running_service(tmp_path, second) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.COMPLETED
            assert counts_of(row) == (20, 19, 1)
            assert custom_ids(errors) == ["r2"]
            assert len(outputs) == 19
            assert sorted(second.executed) == sorted(ids_of(range(7, 20)))
            # Answers of both servers are in the sum.
            texts = [f"prompt {i}" for i in range(20) if i != 2]
            assert row["input_tokens"] == len("".join(texts))

    run(scenario())


def test_a_batch_may_be_stopped_again_and_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        executed: list[str] = []
        batch_id = await run_part(tmp_path, 12, 2, FakeEngine())
        for before, after in pairwise((2, 5, 6, 11)):
            engine = FakeEngine()
            engine.hold(ids_of(range(after, 12)))
            async with running_service(tmp_path, engine, policy="fcfs", max_inflight=2):
                await engine.until_stalled(after - before, min(2, 12 - after))
            executed += engine.answered
        async with running_service(tmp_path) as service:
            check_results(service, await until_over(service, batch_id))
        assert executed == ids_of(range(2, 11))

    run(scenario())


SERVER_TO_KILL = """
import asyncio, sys
from pathlib import Path
from builders import FakeEngine, running_service
from sglang_batch import runner

runner.POLL_S = 0.002


async def main():
    engine = FakeEngine()
    engine.hold([f"r{i}" for i in range(7, 20)])
    settings = {"policy": "fcfs", "max_inflight": 3}
    async with running_service(Path(sys.argv[1]), engine, **settings):
        await engine.until_stalled(7, 3)
        print("stalled", flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
"""


def test_a_killed_server_loses_no_line_and_repeats_none(tmp_path: Path) -> None:
    accepting = make_service(tmp_path)
    batch_id = submit(accepting, make_lines(20))
    accepting.store.close()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER_TO_KILL, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"stalled\n"
        server.send_signal(signal.SIGKILL)

    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(
            tmp_path, engine, server_name="another server"
        ) as service:
            row = await until_over(service, batch_id)
            outputs, _ = check_results(service, row)
            assert custom_ids(outputs) == ids_of(range(20))
            assert sorted(engine.executed) == sorted(ids_of(range(7, 20)))

    run(scenario())


def test_a_batch_cancelled_while_no_server_runs_keeps_its_answers(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        batch_id = await run_part(tmp_path, 8, 5, FakeEngine())
        between = make_service(tmp_path)
        between.cancel_batch(batch_id)
        # Neither the client's file nor the model need be there any more.
        between.store.delete_file(batch_row(between, batch_id)["input_file_id"])
        between.store.close()
        engine = FakeEngine(model_names=("another-model",))
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.CANCELLED
            assert custom_ids(outputs) == ids_of(range(5))
            assert [line["error"] for line in errors] == [UNRUN] * 3
            assert engine.executed == []

    run(scenario())


def submit_through(directory: Path, lines: list[str]) -> str:
    """Submit through another process of the server."""
    service = make_service(directory)
    batch_id = submit(service, lines)
    service.store.close()
    return batch_id


def set_status(directory: Path, batch_id: str, status: str) -> None:
    service = make_service(directory)
    assert service.store.transition(batch_id, api.ACTIVE_STATUSES, status)
    service.store.close()


@pytest.mark.parametrize("num_answered", [6, 4])
def test_a_server_that_died_finalizing_is_completed_by_the_next(
    tmp_path: Path, num_answered: int
) -> None:
    # With fewer answers than lines: the log's end was lost with the machine's power.
    async def scenario() -> None:
        batch_id = await run_part(tmp_path, 6, num_answered, FakeEngine())
        set_status(tmp_path, batch_id, api.FINALIZING)
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == api.COMPLETED
            assert custom_ids(outputs) == ids_of(range(6))
            assert errors == []
            assert sorted(engine.executed) == ids_of(range(num_answered, 6))

    run(scenario())


def test_a_server_that_died_after_writing_the_results_leaves_no_stray_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        dead = asyncio.Event()

        def die(*_: Any) -> None:
            dead.set()
            raise asyncio.CancelledError

        async with running_service(tmp_path, FakeEngine(failing={"r1": 400})) as first:
            monkeypatch.setattr(first.store, "record_file", die)
            batch_id = submit_through(tmp_path, make_lines(3))
            await dead.wait()
            assert len(leftovers(first)) == 2
        async with running_service(tmp_path) as service:
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert (len(outputs), len(errors)) == (2, 1)

    run(scenario())


def test_stopping_waits_for_results_being_written_before_it_lets_go_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        writing, go_on = threading.Event(), threading.Event()
        async with running_service(tmp_path) as service:
            assert service.runner is not None
            write_results = service.runner._write_results

            def slow(*args: Any) -> Any:
                writing.set()
                assert go_on.wait(PATIENCE_S)
                return write_results(*args)

            monkeypatch.setattr(service.runner, "_write_results", slow)
            batch_id = submit(service, make_lines(3))
            await asyncio.to_thread(writing.wait, PATIENCE_S)
            stopping = asyncio.ensure_future(service.stop())
            for _ in range(50):
                await asyncio.sleep(0)
            assert FileLock(tmp_path / "lock").acquire("other") == "server"
            assert not stopping.done()
            go_on.set()
            await stopping
        async with running_service(tmp_path) as service:
            check_results(service, await until_over(service, batch_id))

    run(scenario())


def test_results_are_on_disk_before_a_batch_is_finalizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status that survives a power cut must not promise lines that do not."""
    synced: list[bytes] = []
    monkeypatch.setattr(
        os,
        "fdatasync",
        lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").read_bytes()),
    )
    monkeypatch.setattr(runner_module, "POLL_S", 0.05)

    async def scenario() -> None:
        async with running_service(tmp_path) as service:
            transition = service.store.transition
            at_finalizing: list[bytes] = []

            def spy(batch_id: str, *args: Any, **fields: Any) -> bool:
                if api.FINALIZING in args:
                    at_finalizing.extend(synced[-1:])
                return transition(batch_id, *args, **fields)

            monkeypatch.setattr(service.store, "transition", spy)
            await until_over(service, submit(service, make_lines(5)))
            assert [len(parse_lines(data)) for data in at_finalizing] == [5]

    run(scenario())


def test_a_server_going_down_leaves_the_rest_for_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2, 6)))
        closing: list[bool] = []
        async with running_service(
            tmp_path,
            engine,
            closing=lambda: bool(closing),
            policy="fcfs",
            max_inflight=2,
        ) as service:
            batch_id = submit(service, make_lines(6))
            await engine.until_stalled(2, 2)
            closing.append(True)
            waiting = submit(service, make_lines(1))
            await engine.until(lambda: not engine.running)
            for _ in range(10):  # polls
                await asyncio.sleep(0.002)
            assert batch_row(service, batch_id)["status"] == api.IN_PROGRESS
            assert batch_row(service, waiting)["status"] == api.VALIDATING
            assert engine.executed == ids_of(range(4))
        after = FakeEngine()
        async with running_service(tmp_path, after) as service:
            await until_over(service, waiting)
            check_results(service, await until_over(service, batch_id))
            assert after.executed[:4] == ids_of(range(2, 6))

    run(scenario())


# Several processes ----------------------------------------------------------------------


def test_a_second_server_on_a_directory_is_refused_by_the_first_ones_name(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_service(tmp_path, server_name="pid 1"):
            other = make_service(tmp_path, server_name="pid 2")
            with pytest.raises(StoreError, match=rf"{tmp_path} .*\(pid 1\)"):
                await other.start(FakeEngine())
            await other.stop()
            other.store.close()

    run(scenario())


def test_a_server_waits_for_the_one_before_it_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LOCK_PATIENCE_S", 5.0)

    async def scenario() -> None:
        async with running_service(tmp_path, server_name="pid 1"):
            after = make_service(tmp_path, server_name="pid 2")
            starting = asyncio.ensure_future(after.start(FakeEngine()))
            await asyncio.sleep(0)
            assert not starting.done()
        await starting
        row = await until_over(after, submit(after, make_lines(1)))
        assert row["status"] == api.COMPLETED
        await after.stop()
        after.store.close()

    run(scenario())


def test_of_one_servers_processes_one_runs_and_any_can_cancel(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        for engine in (first, second):
            engine.hold(["r2"])
        async with running_service(tmp_path, second) as other:
            async with running_service(tmp_path, first) as service:
                batch_id = submit(service, make_lines(3))
                # The process that was first has the lock, and the batch.
                await second.until_stalled(2, 1)
                service.cancel_batch(batch_id)
                row = await until_over(service, batch_id)
                assert row["status"] == api.CANCELLED
                assert counts_of(row) == (3, 2, 0)
                assert first.executed == []
            row = await until_over(other, submit(other, [make_line("r9")]))
            assert row["status"] == api.COMPLETED

    run(scenario())


def test_another_process_takes_over_when_the_running_one_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = FakeEngine(), FakeEngine()
        first.hold(["r1", "r2"])
        async with running_service(tmp_path, first, policy="fcfs") as runner:
            heir = make_service(tmp_path)
            await heir.start(second)
            batch_id = submit(heir, make_lines(3))
            await first.until_stalled(1, 2)
            await runner.stop()
            row = await until_over(heir, batch_id)
            check_results(heir, row)
            assert sorted(second.executed) == ["r1", "r2"]
            await heir.stop()
            heir.store.close()

    run(scenario())


# Waves -------------------------------------------------------------------------------------


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


# Smaller things --------------------------------------------------------------------------------


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
        service.create_file(Broken(), "in.jsonl", "batch", None)
    assert leftovers(service) == []
    service.store.close()


def test_a_new_batch_shows_zero_counts_and_when_it_expires(tmp_path: Path) -> None:
    service = make_service(tmp_path)
    batch = batch_object(batch_row(service, submit(service, make_lines(1))))
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["expires_at"] - batch["created_at"] == 86400
    service.store.close()
