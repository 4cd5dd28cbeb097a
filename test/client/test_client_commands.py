"""The commands submit, status, list, cancel and results with a server on localhost."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import uvicorn
from batch_service import running_service
from builders import (
    CHAT,
    answer_text,
    make_body,
    make_file,
    make_line,
    make_lines,
    parse_lines,
)
from fake_engine import FakeEngine
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from input_files import packed

from sglang_batch import map_table
from sglang_batch.__main__ import main
from sglang_batch.errors import ServerError
from sglang_batch.inputs.compression import is_compressed, open_plain
from sglang_batch.run.client import batch_client, client_commands
from sglang_batch.run.progress import Display
from sglang_batch.server import runner as runner_module
from sglang_batch.server.http.all_routes import make_router

KEY = "right"


class LoopbackServer:
    """An application that runs on a port of this machine.

    failures: status codes for the next calls.
    """

    def __init__(self, directory: Path) -> None:
        self.engine = FakeEngine(failing={"fails": 400})
        self.failures: list[int] = []
        self.headers_seen: list[dict[str, str]] = []
        self._directory = directory

    @contextmanager
    def running(self) -> Iterator[LoopbackServer]:
        config = uvicorn.Config(self._app(), port=0, log_level="error", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.002)
            port = server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            yield self
        finally:
            server.should_exit = True
            thread.join()

    def _app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with running_service(
                self._directory, self.engine, policy="fcfs"
            ) as service:
                app.state.offline_batch_service = service
                yield

        app = FastAPI(lifespan=lifespan)
        app.include_router(make_router())

        @app.middleware("http")
        async def first(request: Request, call_next: Any) -> Response:
            self.headers_seen.append(dict(request.headers))
            if request.headers.get("authorization") != f"Bearer {KEY}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            if self.failures:
                return JSONResponse({}, self.failures.pop(), {"retry-after-ms": "1"})
            answer: Response = await call_next(request)
            return answer

        return app


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(runner_module, "POLL_S", 0.002)
        with LoopbackServer(tmp_path_factory.mktemp("store")).running() as server:
            yield server


@pytest.fixture(autouse=True)
def environment(server: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_BATCH_URL", server.url)
    monkeypatch.setenv("SGLANG_BATCH_API_KEY", KEY)
    monkeypatch.setattr(client_commands, "POLL_S", 0.005)
    # Three attempts to reach a missing server must not take long.
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    server.headers_seen.clear()


@pytest.fixture
def remote_server(server: LoopbackServer) -> Iterator[batch_client.BatchClient]:
    """The client that the commands use."""
    with contextlib.closing(batch_client.BatchClient(server.url, KEY)) as found:
        yield found


Outputs = pytest.CaptureFixture[str]


def called(capsys: Outputs, *argv: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def submitted(capsys: Outputs, tmp_path: Path, *lines: str, options: Any = ()) -> str:
    path = make_file(tmp_path, lines)
    status, out, _ = called(capsys, "submit", "-i", str(path), *options)
    assert status == 0
    return out.strip()


def as_json(capsys: Outputs, *argv: str) -> dict[str, Any]:
    status, out, _ = called(capsys, *argv, "--json")
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_batch_from_its_file_to_its_results(
    capsys: Outputs, tmp_path: Path, server: LoopbackServer
) -> None:
    batch_id = submitted(
        capsys, tmp_path, *make_lines(1), make_line("fails"), *make_lines(3)[1:]
    )
    assert batch_id.startswith("batch_")
    status, out, err = called(capsys, "status", batch_id, "--follow")
    assert status == 3  # complete, with a line that failed
    assert "4 of 4 done (100%), 1 failed" in out
    assert f"{batch_id}: completed: 100%, 4/4" in err
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    argv = ["results", batch_id, "-o", str(output)]
    status, _, err = called(capsys, *argv, "--error-file", str(errors))
    assert status == 0
    assert f"3 answers in {output}, 1 errors in {errors}" in err
    answers = parse_lines(output.read_bytes())
    assert [answer_text(line) for line in answers] == [f"prompt {i}" for i in range(3)]
    assert [line["custom_id"] for line in parse_lines(errors.read_bytes())] == ["fails"]
    status, _, err = called(capsys, *argv)
    assert status == 0
    assert f"3 answers in {output}, 1 errors among them" in err
    ids = [line["custom_id"] for line in parse_lines(output.read_bytes())]
    assert ids == ["r0", "fails", "r1", "r2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "errors.jsonl",
        "input.jsonl",
        "out.jsonl",
    ]


def test_submit_sends_its_options(
    capsys: Outputs, tmp_path: Path, server: LoopbackServer
) -> None:
    line = make_line(url="/v1/embeddings", body={"model": "demo", "input": "a"})
    path = make_file(tmp_path, f"\ufeff{line}\n".encode(), name="no suffix")
    options = ["--window", "90m", "--priority", "3", "--metadata", "a=b=c"]
    batch = as_json(capsys, "submit", "-i", str(path), *options)
    assert batch["endpoint"] == "/v1/embeddings"
    assert batch["completion_window"] == "90m"
    assert batch["metadata"] == {"a": "b=c"}
    keys = [headers.get("idempotency-key") for headers in server.headers_seen]
    assert keys[0] is None  # the upload
    assert keys[1]


def test_submit_and_follow_exit_as_the_batch_ends(
    capsys: Outputs, tmp_path: Path
) -> None:
    good = make_file(tmp_path, make_lines(2))
    status, out, _ = called(capsys, "submit", "-i", str(good), "--follow")
    assert status == 0
    assert out.startswith("batch_")
    bad = make_file(tmp_path, [make_line(), "nope"])
    options = ["--follow", "--no-check"]
    status, out, _ = called(capsys, "submit", "-i", str(bad), *options)
    assert status == 1
    assert "line 2: This line is not parseable as valid JSON." in out
    batch_id = out.splitlines()[0]
    status, _, err = called(capsys, "results", batch_id, "-o", str(tmp_path / "o"))
    assert status == 2
    assert "failed and has no results: line 2: This line is" in err
    assert not (tmp_path / "o").exists()


def test_a_batch_is_cancelled_and_listed(
    capsys: Outputs, tmp_path: Path, server: LoopbackServer
) -> None:
    server.engine.hold(["held"])
    batch_id = submitted(capsys, tmp_path, make_line("held"))
    output = tmp_path / "out.jsonl"
    status, _, err = called(capsys, "results", batch_id, "-o", str(output))
    assert status == 2
    assert "download the finished lines with --so-far" in err
    cancelled = called(capsys, "cancel", batch_id)
    assert cancelled == (0, f"{batch_id} cancelling\n", "")
    status, out, _ = called(capsys, "status", batch_id, "--follow", "--json")
    assert status == 1
    assert json.loads(out)["status"] == "cancelled"
    assert called(capsys, "cancel", batch_id)[0] == 0  # it is already cancelled
    status, out, _ = called(capsys, "list", "--limit", "1")
    heading, line = out.splitlines()
    assert heading.split()[:2] == ["id", "status"]
    assert line.split()[:3] == [batch_id, "cancelled", "0/1"]
    _, out, _ = called(capsys, "list", "--limit", "2", "--json")
    assert [json.loads(line)["object"] for line in out.splitlines()] == ["batch"] * 2


def test_the_results_so_far_are_what_is_there(
    capsys: Outputs, tmp_path: Path, server: LoopbackServer
) -> None:
    server.engine.hold(["last"])
    batch_id = submitted(capsys, tmp_path, *make_lines(2), make_line("last"))
    while as_json(capsys, "status", batch_id)["request_counts"]["completed"] < 2:
        time.sleep(0.002)
    output = tmp_path / "out.jsonl"
    argv = ["results", batch_id, "--so-far", "-o", str(output)]
    status, _, err = called(capsys, *argv)
    assert status == 0
    assert f"{batch_id} is in_progress: 2 results so far in {output}" in err
    lines = parse_lines(output.read_bytes())
    assert {line["custom_id"] for line in lines} == {"r0", "r1"}
    assert called(capsys, *argv, "--error-file", "e")[0] == 2
    called(capsys, "cancel", batch_id)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_results_are_compressed_by_their_name(
    capsys: Outputs, tmp_path: Path, suffix: str
) -> None:
    path = make_file(tmp_path, make_lines(2))
    assert main(["submit", "-i", str(path), "--follow", "--json"]) == 0
    batch_id = json.loads(capsys.readouterr().out)["id"]
    output = tmp_path / f"out.jsonl{suffix}"
    assert called(capsys, "results", batch_id, "-o", str(output))[0] == 0
    assert is_compressed(output)
    with open_plain(output) as file:
        assert len(parse_lines(file.read())) == 2


def test_a_table_is_for_map_table(capsys: Outputs, tmp_path: Path) -> None:
    path = make_file(tmp_path, b"text\na\n", "t.csv")
    status, _, err = called(capsys, "submit", "-i", str(path))
    assert status == 2 and "map_table(..., server=URL)" in err


def test_a_table_that_the_server_refuses_says_why(server: LoopbackServer) -> None:
    table = pyarrow.table({"a": ["x"]})
    body = {"model": "other", "messages": [{"role": "user", "content": "{{a}}"}]}
    with pytest.raises(ServerError, match="model 'other' is not supported"):
        map_table(table, body, server=server.url, api_key=KEY)


def test_results_that_were_deleted_are_said_to_be_gone(
    capsys: Outputs, tmp_path: Path, remote_server: batch_client.BatchClient
) -> None:
    batch_id = submitted(capsys, tmp_path, *make_lines(1))
    called(capsys, "status", batch_id, "--follow")
    file_id = as_json(capsys, "status", batch_id)["output_file_id"]
    remote_server.client.files.delete(file_id)
    output = tmp_path / "out.jsonl"
    status, _, err = called(capsys, "results", batch_id, "-o", str(output))
    assert status == 2
    assert "the server no longer has its results" in err
    assert not output.exists()


def test_results_go_to_the_standard_output(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    path = make_file(tmp_path, make_lines(2))
    assert main(["submit", "-i", str(path), "--follow", "--json"]) == 0
    batch_id = json.loads(capfdbinary.readouterr().out)["id"]
    assert main(["results", batch_id, "-o", "-"]) == 0
    assert len(parse_lines(capfdbinary.readouterr().out)) == 2


def test_a_server_that_is_away_is_waited_for(
    capsys: Outputs,
    tmp_path: Path,
    server: LoopbackServer,
    remote_server: batch_client.BatchClient,
) -> None:
    batch_id = submitted(capsys, tmp_path, *make_lines(1))
    main(["status", batch_id, "--follow"])
    capsys.readouterr()
    batch = remote_server.get(batch_id)
    server.failures += [503] * 7  # more than the client itself repeats
    running = {**batch, "status": "in_progress"}
    ended = client_commands.until_ended(remote_server, running, Display(sys.stderr))
    assert ended["status"] == "completed"
    assert not server.failures
    assert capsys.readouterr().err.count("Trying again.") == 1


def test_a_server_that_stays_away_is_given_up(
    server: LoopbackServer,
    remote_server: batch_client.BatchClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_commands, "PATIENCE_S", 0.0)
    batch = {"id": "batch_1", "status": "in_progress"}
    server.failures += [503] * 3
    with pytest.raises(ServerError):
        client_commands.until_ended(remote_server, batch, Display(io.StringIO()))
    assert not server.failures


def test_an_interrupt_leaves_the_batch_alone(
    capsys: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    batch_id = submitted(capsys, tmp_path, *make_lines(1))
    monkeypatch.setattr(client_commands.time, "sleep", interrupt)
    monkeypatch.setattr(client_commands.api, "ENDED_STATUSES", ())
    status, _, err = called(capsys, "status", batch_id, "--follow")
    assert status == 130
    assert f"{batch_id} keeps running at http" in err


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["status", "batch_no"], 2, ": No batch found with id 'batch_no'."),
        (["cancel", "batch_no"], 2, ": No batch found with id 'batch_no'."),
        (["results", "batch_no", "-o", "o"], 2, "No batch found with id 'batch_no'."),
        (["list", "--api-key", "wrong"], 2, "does not accept this API key"),
        (["list", "--url", "127.0.0.1:9"], 1, "http://127.0.0.1:9 does not answer ("),
        (["list", "--url", "127.0.0.1:x"], 2, "http://127.0.0.1:x is not the URL of a"),
        (["submit", "-i", "/no/file"], 2, "input file /no/file does not exist."),
        (["results", "batch_no", "-o", "/tmp"], 2, "/tmp: it is a directory"),
        (["results", "batch_no", "-o", "o.csv"], 2, "o.csv would hold JSON lines"),
        (["results", "batch_no", "-o", "no/o"], 2, "its directory does not exist"),
        (
            ["results", "batch_no", "-o", "out", "--error-file", "./out"],
            2,
            "out is both output and error file",
        ),
        (["list", "--api-key", "kl\u00fcssel"], 2, "not ASCII, so it cannot be sent"),
        (["list", "--api-key", "key\n"], 2, "the API key has a line break"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    capsys: Outputs, argv: list[str], status: int, said: str
) -> None:
    found, out, err = called(capsys, *argv)
    assert (found, out) == (status, "")
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_server_without_batches_is_told_from_an_unknown_batch(
    capsys: Outputs, server: LoopbackServer
) -> None:
    server.failures += [404]
    status, _, err = called(capsys, "status", "batch_1")
    assert status == 2
    assert "does not serve batches: was it started with --offline-batch?" in err


@pytest.mark.parametrize("options", [[], ["--no-check"]])
@pytest.mark.parametrize(
    "content", [b"", b"nope\n", b"[]\n", b'{"url": "/v1/magic"}\n']
)
def test_a_file_without_an_endpoint_is_not_sent(
    capsys: Outputs,
    tmp_path: Path,
    server: LoopbackServer,
    content: bytes,
    options: list[str],
) -> None:
    path = make_file(tmp_path, content)
    status, _, err = called(capsys, "submit", "-i", str(path), *options)
    assert status == 2
    assert str(path) in err
    assert server.headers_seen == []


def test_all_errors_of_a_file_are_listed_and_it_is_not_sent(
    capsys: Outputs, tmp_path: Path, server: LoopbackServer
) -> None:
    lines = [
        make_line("a"),
        "nope",
        make_line("b", body=make_body(messages="hi")),
        make_line("a"),
        make_line("c", url="/v1/embeddings", body={"model": "m", "input": "x"}),
        make_line("d", body=make_body(without="model")),
    ]
    path = make_file(tmp_path, lines)
    status, out, err = called(capsys, "submit", "-i", str(path))
    assert (status, out) == (2, "")
    found = re.findall(r"line (\d+): .*\[(\w+)\]$", err, re.MULTILINE)
    assert found == [
        ("2", "invalid_json_line"),
        ("3", "invalid_request"),
        ("4", "duplicate_custom_id"),
        ("5", "invalid_url"),
        ("6", "invalid_request"),
    ]
    assert "--no-check" in err
    assert server.headers_seen == []


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("piped", [False, True])
def test_compressed_files_and_standard_input_are_sent(
    capsys: Outputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    piped: bool,
) -> None:
    data = packed("".join(f"{line}\n" for line in make_lines(3)).encode(), suffix)
    path = str(make_file(tmp_path, data, f"in.jsonl{suffix}"))
    if piped:
        stdin = SimpleNamespace(buffer=io.BytesIO(data))
        monkeypatch.setattr(sys, "stdin", stdin)
        path = "-"
    batch = as_json(capsys, "submit", "-i", path)
    out = tmp_path / "out"
    assert main(["status", batch["id"], "--follow"]) == 0
    assert main(["results", batch["id"], "-o", str(out)]) == 0
    ids = [line["custom_id"] for line in parse_lines(out.read_bytes())]
    assert ids == ["r0", "r1", "r2"]


def test_a_download_that_breaks_leaves_no_file(
    tmp_path: Path, server: LoopbackServer, remote_server: batch_client.BatchClient
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"earlier")
    with (
        pytest.raises(ServerError),
        client_commands._writing(output) as target,
    ):
        server.failures += [500] * 3
        remote_server.download("/files/file-1/content", target)
    assert output.read_bytes() == b"earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl"}


BATCH: dict[str, Any] = {
    "id": "batch_1",
    "status": "in_progress",
    "endpoint": CHAT,
    "model": "demo",
    "created_at": 1_000_000,
    "in_progress_at": 1_000_010,
    "expires_at": 1_086_400,
    "request_counts": {"total": 4000, "completed": 990, "failed": 10},
    "usage": {
        "input_tokens": 200,
        "input_tokens_details": {"cached_tokens": 50, "optimal_cached_share": 0.4},
        "output_tokens": 80,
        "output_tokens_details": {"reasoning_tokens": 7},
        "total_tokens": 280,
    },
}


def test_the_table_says_how_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_client.time, "time", lambda: 1_000_110.0)
    rows = dict(
        line.split(maxsplit=1) if not line.startswith(("cached", "time", "of"))
        else line.split("  ", 1)
        for line in batch_client.batch_table(BATCH).splitlines()
    )  # fmt: skip
    assert rows["requests"] == "1,000 of 4,000 done (25%), 10 failed"
    assert rows["cached tokens"].strip() == "50 = 25.0% (possible: 40.0%)"
    assert rows["of reasoning"].strip() == "7"
    assert rows["time left"].strip() == "about 5m00s"
    paused = batch_client.batch_table({**BATCH, "paused_reason": "outside of hours"})
    assert "in_progress (paused: outside of hours)" in paused
    assert "time left" not in paused


def test_many_errors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [*"aabcdefgh"]
    data = [{"line": i, "message": m, "code": "c"} for i, m in enumerate(said)]
    lines = batch_client.first_errors({"errors": {"data": data}})
    others = [f"line {i}: {said[i]}" for i in range(2, 6)]
    assert lines == ["a", *others, "and 4 more"]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_status_and_a_line_for_each_change(terminal: bool) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    display = Display(stream)
    waiting = {**BATCH, "status": "validating", "request_counts": None}
    progress = batch_client.BatchProgress(display, waiting)
    progress.update(BATCH)
    for _ in range(2):
        progress.update({**BATCH, "paused_reason": "it is day"})
    counts = {"total": 4000, "completed": 3990, "failed": 10}
    progress.update({**BATCH, "status": "completed", "request_counts": counts})
    first, begun, paused, ended = stream.getvalue().splitlines()
    assert first == "batch_1: validating"
    assert begun.startswith("batch_1: in_progress: ") and "1000/4000 [" in begun
    assert paused.startswith("batch_1: in_progress (paused: it is day): ")
    assert ended.startswith("batch_1: completed: 100%") and "4000/4000 [" in ended
    assert ended.endswith("failed 10, cached 25%]")
    with display.showing(progress.__str__):
        display._tick()
    drawn = "\r\x1b[Kbatch_1: completed: 100%" in stream.getvalue()
    assert drawn == terminal
