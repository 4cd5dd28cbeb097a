"""JSON lines that no reader breaks, whatever it takes for the end of a line.

``str.splitlines`` and clients that use it, such as httpx, end lines at U+0085, U+2028 and
U+2029 too, which JSON may have raw.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import make_line, make_request
from route_server import AppTransport, Server

from sglang_batch.batch_api.lines import LineError, invalid_line, unrun_line
from sglang_batch.batch_api.message_batches import (
    MessageBatchRequest,
    input_lines,
    rejected_line,
)
from sglang_batch.job.engine import WAVE_PATH
from sglang_batch.lang.program_log import ProgramLog, ProgramRecord
from sglang_batch.request import LineSplitter, Usage
from sglang_batch.rollout import RolloutClient, RolloutGroup
from sglang_batch.rollout.rollout_call import ROLLOUTS_PATH
from sglang_batch.store.result_log import ResultLog, finished_lines

# All at which str.splitlines ends a line.
ENDS = "\n \r \x0b \x0c \x1c \x1d \x1e \x85 \u2028 \u2029"


def text_of(found: Any) -> str:
    """The first text in a JSON value that has our characters."""
    values = found.values() if isinstance(found, dict) else found
    for value in values if isinstance(found, dict | list) else ():
        if isinstance(value, str) and "\u2028" in value:
            return value
        if inner := text_of(value):
            return inner
    return ""


def check(content: bytes, num_lines: int) -> None:
    lines = content.decode().splitlines()
    assert lines == content.decode().split("\n")[:-1]
    assert len(lines) == num_lines
    for line in lines:
        assert text_of(json.loads(line)).replace(" ", "") == ENDS.replace(" ", "")


# The server -----------------------------------------------------------------------


def batch_lines() -> list[str]:
    good = make_line("a", ENDS)
    bad = json.loads(make_line("fails")) | {"custom_id": ENDS, "method": "POST"}
    return [good, json.dumps(bad, ensure_ascii=False)]


def finished(server: Server) -> Any:
    server.engine._failing[ENDS] = 400
    batch = server.ended(server.start(*batch_lines()))
    assert batch.output_file_id is not None and batch.error_file_id is not None
    return batch


def output_file(server: Server) -> bytes:
    return server.client.files.content(finished(server).output_file_id).content


def error_file(server: Server) -> bytes:
    return server.client.files.content(finished(server).error_file_id).content


def results(server: Server) -> bytes:
    return server.http.get(f"/v1/batches/{finished(server).id}/results").content


def running_results(server: Server) -> bytes:
    server.call(server.engine.hold, ["held"])
    batch = server.start(batch_lines()[0], make_line("held"))
    while not (found := server.http.get(f"/v1/batches/{batch.id}/results")).content:
        pass
    assert found.headers["x-incomplete"] == "true"
    server.call(server.engine.release, ["held"])
    return bytes(found.content)


def message_results(server: Server) -> bytes:
    path = "/v1/messages/batches"
    message = {"role": "user", "content": ENDS}
    params = {"model": "demo", "max_tokens": 8, "messages": [message]}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    made = server.http.post(path, content=json.dumps(body, ensure_ascii=False)).json()
    while made["processing_status"] != "ended":
        made = server.http.get(f"{path}/{made['id']}").json()
    return bytes(server.http.get(f"{path}/{made['id']}/results").content)


def wave(server: Server) -> bytes:
    body = {"requests": [{"text": ENDS}]}
    return bytes(server.http.post(WAVE_PATH, json=body).content)


def wave_of_lines(server: Server) -> bytes:
    body = {"lines": [json.loads(make_line("a", ENDS))]}
    return bytes(server.http.post(WAVE_PATH, json=body).content)


def rollouts(server: Server) -> bytes:
    body = {"groups": [{"text": ENDS}]}
    return bytes(server.http.post(ROLLOUTS_PATH, json=body).content)


@pytest.mark.parametrize(
    ("door", "num_lines"),
    [
        (output_file, 1),
        (error_file, 1),
        (results, 2),
        (running_results, 1),
        (message_results, 1),
        (wave, 1),
        (wave_of_lines, 1),
        (rollouts, 1),
    ],
)
def test_every_answer_in_lines_has_one_object_in_each(
    server: Server, door: Callable[[Server], bytes], num_lines: int
) -> None:
    check(door(server), num_lines)


def test_a_client_of_rollouts_reads_any_text(server: Server) -> None:
    class Client(RolloutClient):
        @property
        def _http_options(self) -> dict[str, Any]:
            return {**super()._http_options, "transport": AppTransport(server.http)}

    groups = [RolloutGroup(text=ENDS), RolloutGroup(text="b")]
    found = Client("http://testserver").run(groups)
    assert [group.samples[0].text for group in found] == [ENDS, "b"]


# Files ----------------------------------------------------------------------------


def test_lines_of_requests_that_did_not_run(tmp_path: Path) -> None:
    check(invalid_line(0, "a", "batch_1", "code", ENDS) + b"\n", 1)
    check(unrun_line(make_request(custom_id=ENDS), "batch_1", "c", "m") + b"\n", 1)
    check(rejected_line("a", 0, LineError("code", ENDS, 1, None)), 1)
    params = msgspec.Raw(msgspec.json.encode({"text": ENDS}))
    check(b"".join(input_lines([MessageBatchRequest("a", params)])), 1)


def test_a_log_of_an_earlier_release_is_written_out_in_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    raw = json.dumps({"text": ENDS}, ensure_ascii=False).encode()
    path.write_bytes(b"[0,true,[1,0,1,0]," + raw + b"]\n")
    log = ResultLog(path, 2)
    log.put(1, raw, ok=True, usage=Usage())
    written = io.BytesIO()
    log.write_ordered(written, written)
    log.close()
    check(written.getvalue(), 2)
    with open(path, "rb") as file:
        check(b"".join(finished_lines(file, path.stat().st_size)), 2)
    check(path.read_bytes().split(b"\n")[1] + b"\n", 1)


def test_a_log_of_programs(tmp_path: Path) -> None:
    path = tmp_path / "job.jsonl"
    log = ProgramLog(path)
    result = msgspec.Raw(msgspec.json.encode({"text": ENDS}))
    log.put(ProgramRecord("key", "p", "1", True, result))
    log.close()
    check(path.read_bytes(), 1)


def test_lines_are_read_by_newlines_alone() -> None:
    whole = "".join(f"{text}\n" for text in (ENDS[1:], "", "b")).encode()
    for size in (1, 2, 3, len(whole)):
        lines = LineSplitter()
        found = [
            line
            for start in range(0, len(whole), size)
            for line in lines.add(whole[start : start + size])
        ]
        assert found == [ENDS[1:].encode(), b"", b"b"]
