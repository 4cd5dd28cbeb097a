"""Streams of rows: on a server of the suite, and with an engine of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
import pytest
from servers import Server

from sglang_batch import AnswerColumns, Streamer, stream
from sglang_batch.errors import ConfigError, EngineError

CHAT = "/v1/chat/completions"
WAIT_S = 120
TEMPLATE = {
    "messages": [{"role": "user", "content": "What is {{x}}?"}],
    "max_tokens": 4,
    "temperature": 0,
}
PROGRAM = """
import itertools, sys
from sglang_batch import stream

rows = ({"prompt": f"row {i}", "max_tokens": 4} for i in itertools.count())
# The engine that starts fastest.
where = {"model_path": sys.argv[1], "backend": "transformers", "dtype": "float32"}
for answer in stream(rows, url="/v1/completions", window=16, **where):
    print(answer.index, answer.status_code, flush=True)
"""


def test_answers_are_those_of_single_calls(offline_server: Server) -> None:
    rows = ({"x": i % 30} for i in range(120))
    where: dict[str, Any] = {"server": offline_server.url, "window": 40}
    answers = list(stream(rows, template=TEMPLATE, ordered=True, **where))
    assert [answer.row["x"] for answer in answers] == [i % 30 for i in range(120)]
    assert all(answer.ok for answer in answers)
    # The same rows, the same answers, in whichever window.
    texts = [answer.text for answer in answers]
    assert texts == texts[:30] * 4
    for answer in answers[:3]:
        content = f"What is {answer.row['x']}?"
        body = {**TEMPLATE, "messages": [{"role": "user", "content": content}]}
        alone = httpx.post(
            f"{offline_server.url}{CHAT}", json={"model": "demo", **body}, timeout=60
        ).json()
        assert alone["choices"][0]["message"]["content"] == answer.text
        assert alone["usage"]["prompt_tokens"] == answer.body["usage"]["prompt_tokens"]


def test_bad_rows_cost_no_other_row_its_answer(offline_server: Server) -> None:
    good = {"prompt": "a", "max_tokens": 2}
    rows: list[Any] = [
        good,
        "no json",
        {"prompt": "a", "max_tokens": -2},
        {"prompt": "a" * 5000, "max_tokens": 2},
        {**good, "model": "other"},
        {"custom_id": "b", "url": "/v1/completions", "body": good},
        {"custom_id": "c", "url": "/v1/none", "body": good},
        json.dumps(good).encode(),
    ]
    where: dict[str, Any] = {"server": offline_server.url, "url": "/v1/completions"}
    answers = list(stream(rows, ordered=True, **where))
    assert [answer.ok for answer in answers] == [
        *(True, False, False, False, False, True, False, True)
    ]
    assert [answers[i].custom_id for i in (0, 5, 6)] == ["0", "b", "c"]
    assert all(
        answer.status_code == 400 and answer.error
        for answer in answers
        if not answer.ok
    )


def test_an_endless_stream_is_left_at_any_time(offline_server: Server) -> None:
    rows = ({"prompt": f"row {i}", "max_tokens": 3} for i in iter(int, 1))
    with Streamer(server=f"{offline_server.url}/v1", priority=5) as streamer:
        answers = streamer.stream(rows, url="/v1/completions", window=20)
        assert all(answer.ok for answer in islice(answers, 100))
    with pytest.raises(StopIteration):
        next(answers)


@pytest.mark.parametrize("kind", ["table", "columns"])
def test_a_block_of_columns_gets_its_answers(offline_server: Server, kind: str) -> None:
    columns: dict[str, Any] = {"x": ["one", None, "three"], "other": [1, 2, 3]}
    batch = pa.table(columns) if kind == "table" else columns
    ask = AnswerColumns(TEMPLATE, server=offline_server.url, body_column="body")
    answered = ask(batch)
    if kind == "table":
        assert answered.schema.field("error").type == pa.string()
        answered = answered.to_pydict()
    assert list(answered) == ["x", "other", "answer", "error", "body"]
    assert answered["other"] == [1, 2, 3]
    assert answered["error"] == [None] * 3
    bodies = [json.loads(body) for body in answered["body"]]
    texts = [body["choices"][0]["message"]["content"] for body in bodies]
    assert answered["answer"] == texts
    assert ask({"x": [], "other": []})["answer"] == []


def test_a_server_that_is_none_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9"):
        list(stream([{"prompt": "a"}], server="http://127.0.0.1:9"))


def test_a_model_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        list(stream([{}], model_path=str(tmp_path / "none")))


def children_of(process: subprocess.Popen[str]) -> Iterator[psutil.Process]:
    yield from psutil.Process(process.pid).children(recursive=True)


def test_streams_that_start_together_share_an_engine_and_use_no_proxy(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    rows = [{"prompt": f"row {i}", "max_tokens": 3} for i in range(4)]
    where: dict[str, Any] = {"backend": "transformers", "dtype": "float32"}
    with (
        Streamer(model_path=str(demo_model), **where) as streamer,
        ThreadPoolExecutor(3) as threads,
    ):
        streams = [streamer.stream(rows, url="/v1/completions") for _ in range(3)]
        found = list(threads.map(list, streams))
    assert [[answer.ok for answer in answers] for answers in found] == [[True] * 4] * 3


def test_an_engine_of_its_own_ends_with_the_program(demo_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(demo_model)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = [process.stdout.readline().split() for _ in range(50)]
        engine = list(children_of(process))
    finally:
        # Nothing of the program's own can run any more.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert [status for _, status in said] == ["200"] * 50
    assert len({index for index, _ in said}) == 50
    assert len(engine) >= 2
    deadline = time.monotonic() + WAIT_S
    while any(child.is_running() for child in engine):
        assert time.monotonic() < deadline
        time.sleep(0.1)
