"""Results of batches that still run, and at the moment in which they end."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from builders import ids_of, make_line, make_lines, parse_lines
from openai.types import Batch
from route_server import Server, error_of

from sglang_batch.server.http import openai_routes as files_module
from sglang_batch.server.http import result_responses as results_module


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return parse_lines(answer.content)


def custom_ids(answer: httpx.Response) -> list[str]:
    return [line["custom_id"] for line in lines_of(answer)]


def results(server: Server, batch: Batch, query: str = "") -> httpx.Response:
    return server.http.get(f"/v1/batches/{batch.id}/results{query}")


def content(server: Server, batch: Batch, kind: str) -> httpx.Response:
    name = batch.id.removeprefix("batch_")
    return server.http.get(f"/v1/files/file-{kind}-{name}/content")


def held_batch(server: Server, lines: list[str], held: list[str]) -> Batch:
    """A batch of which all but these lines are finished."""
    server.engine.hold(held)
    batch = server.start(*lines)
    num_done = len(lines) - len(held)
    server.call(server.engine.until_stalled, num_done, len(held))
    while results(server, batch).headers["x-last-line"] != str(num_done):
        pass
    return batch


LINES = [*make_lines(3), make_line("fails"), *make_lines(6)[3:]]


def test_finished_lines_are_there_while_the_others_run(server: Server) -> None:
    batch = held_batch(server, LINES, ids_of([1]))
    outputs, errors = (content(server, batch, kind) for kind in ("output", "error"))
    assert sorted(custom_ids(outputs)) == ids_of([0, 2, 3, 4, 5])
    assert custom_ids(errors) == ["fails"]
    both = results(server, batch)
    assert sorted(custom_ids(both)) == ["fails", *ids_of([0, 2, 3, 4, 5])]
    for answer in (outputs, errors, both):
        assert answer.headers["x-incomplete"] == "true"
        assert answer.headers["content-type"].startswith("application/jsonl")
    assert server.client.batches.retrieve(batch.id).output_file_id is None

    server.call(server.engine.release)
    ended = server.ended(batch)
    final = [content(server, ended, kind) for kind in ("output", "error")]
    assert custom_ids(final[0]) == ids_of(range(6))
    assert custom_ids(final[1]) == ["fails"]
    both = results(server, ended)
    assert custom_ids(both) == [*ids_of(range(3)), "fails", *ids_of(range(3, 6))]
    assert both.headers["x-last-line"] == "7"
    for answer in (*final, both):
        assert answer.headers["x-incomplete"] == "false"


def test_before_the_first_result_there_are_none(server: Server) -> None:
    server.engine.hold(["a"])
    batch = server.start(make_line("a"))
    for _ in range(50):
        for answer in (
            content(server, batch, "output"),
            content(server, batch, "error"),
            results(server, batch),
        ):
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["x-incomplete"] == "true"
        if server.engine.running:
            break
    assert results(server, batch).headers["x-last-line"] == "0"


def test_a_poller_asks_for_what_is_new(server: Server) -> None:
    lines = make_lines(6)
    batch = held_batch(server, lines, ids_of([2, 5]))
    first = results(server, batch)
    assert first.headers["x-line-order"] == "completion"
    assert len(lines_of(first)) == 4
    assert lines_of(results(server, batch, "?after_line=4")) == []
    server.call(server.engine.release, ["r5"])
    while (new := results(server, batch, "?after_line=4")).content == b"":
        pass
    assert (custom_ids(new), new.headers["x-last-line"]) == (["r5"], "5")
    assert custom_ids(results(server, batch, "?after_line=3"))[-1] == "r5"
    server.call(server.engine.release)
    ended = server.ended(batch)
    rest = results(server, ended, "?after_line=4")
    assert custom_ids(rest) == ["r4", "r5"]
    assert rest.headers["x-line-order"] == "input"
    assert custom_ids(results(server, ended, "?after_line=100")) == []


class CountedFile(io.FileIO):
    """A file that counts the bytes read of all of its kind."""

    num_bytes = 0

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        CountedFile.num_bytes += count or 0
        return count


def test_a_poller_does_not_have_the_whole_log_read_each_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_lines = 500
    batch = held_batch(server, make_lines(num_lines + 1), ids_of([num_lines]))
    log = server.service.store.work_dir(batch.id) / "results.jsonl"
    monkeypatch.setattr(
        results_module, "_opened", lambda path: io.BufferedReader(CountedFile(path))
    )
    for after in range(num_lines, num_lines - 20, -1):
        monkeypatch.setattr(CountedFile, "num_bytes", 0)
        answer = results(server, batch, f"?after_line={after}")
        assert answer.headers["x-last-line"] == str(num_lines)
        assert len(lines_of(answer)) == num_lines - after
        assert CountedFile.num_bytes < log.stat().st_size / 2


def test_readers_find_every_line_once_through_the_end(server: Server) -> None:
    lines = [*make_lines(60), make_line("fails")]
    for _ in range(4):
        batch = server.start(*lines)
        known = 0
        ids: set[str] = set()
        while True:
            answer = results(server, batch)
            got = custom_ids(answer)
            assert len(got) == len(set(got)) >= known
            assert ids <= set(got)
            known, ids = len(got), set(got)
            outputs = custom_ids(content(server, batch, "output"))
            assert len(outputs) == len(set(outputs))
            assert ids - {"fails"} <= set(outputs)
            if answer.headers["x-incomplete"] == "false":
                break
        assert known == 61


def test_a_batch_that_ends_between_two_looks_has_its_results(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = held_batch(server, make_lines(3), ["r1"])
    look = files_module.results_so_far

    def end_before(*args: Any) -> Any:
        server.call(server.engine.release)
        server.ended(batch)
        return look(*args)

    monkeypatch.setattr(files_module, "results_so_far", end_before)
    answer = content(server, batch, "output")
    assert custom_ids(answer) == ids_of(range(3))
    assert answer.headers["x-incomplete"] == "false"


def test_a_torn_last_line_is_not_shown(server: Server) -> None:
    batch = held_batch(server, make_lines(3), ["r1"])
    log = server.service.store.work_dir(batch.id) / "results.jsonl"
    whole = log.read_bytes()
    for torn in (b"[", b'[1,true,[0,0,0,0],{"id":"x"}]', b"\0" * 10):
        with open(log, "ab") as file:
            file.write(torn)
        answer = results(server, batch)
        assert sorted(custom_ids(answer)) == ["r0", "r2"]
        assert answer.headers["x-last-line"] == "2"
        log.write_bytes(whole)


@pytest.mark.parametrize("kind", ["output", "error"])
def test_a_result_file_that_would_be_empty_does_not_exist_in_the_end(
    server: Server, kind: str
) -> None:
    line = make_line("fails") if kind == "output" else make_line()
    batch = server.ended(server.start(line))
    assert content(server, batch, kind).status_code == 404


def test_a_batch_that_failed_has_no_results(server: Server) -> None:
    batch = server.ended(server.start("bad"))
    answer = results(server, batch)
    assert (answer.content, answer.headers["x-incomplete"]) == (b"", "false")


def test_a_cancelled_batch_has_a_line_for_each_request(server: Server) -> None:
    batch = held_batch(server, make_lines(4), ids_of([1, 2]))
    server.client.batches.cancel(batch.id)
    answer = results(server, server.ended(batch))
    assert custom_ids(answer) == ids_of(range(4))
    errors = [line["error"] for line in lines_of(answer)]
    assert [error and error["code"] for error in errors] == [
        None,
        "batch_cancelled",
        "batch_cancelled",
        None,
    ]


def test_results_that_were_deleted_are_gone(server: Server) -> None:
    batch = server.ended(server.start())
    assert batch.output_file_id is not None
    server.client.files.delete(batch.output_file_id)
    assert content(server, batch, "output").status_code == 404
    assert results(server, batch).content == b""


@pytest.mark.parametrize("query", ["-1", "x", "1.5", str(1 << 63), ""])
def test_a_line_number_that_is_none_is_refused(server: Server, query: str) -> None:
    batch = server.start()
    answer = results(server, batch, f"?after_line={query}")
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "after_line"


def test_results_of_no_batch_are_not_found(bare_server: Server) -> None:
    name = "0" * 32
    for path in (
        f"/v1/batches/batch_{name}/results",
        f"/v1/files/file-output-{name}/content",
    ):
        answer = bare_server.http.get(path)
        assert answer.status_code == 404
        assert json.loads(answer.content) == {"error": error_of(answer)}
