"""What kills an engine or a run in the middle loses nothing and repeats nothing.

A server that is killed: test_soak.py.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked_children
import preloaded
import psutil
from batches import client, jsonl, line, results, submit, wait
from prompts import questions
from servers import SERVER_ARGS, kill_group, server
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_batch.server.batch_run import NEVER

NUM_LINES = 240
# So few that a run takes five seconds and more, in which it can be killed.
MAX_INFLIGHT = 4


def input_lines() -> list[dict[str, Any]]:
    return [
        line(
            f"line-{i}",
            {"messages": [{"role": "user", "content": question}], "max_tokens": 24},
        )
        for i, question in enumerate(questions(NUM_LINES))
    ]


def finished_lines(log: Path) -> dict[str, Any]:
    """The result lines of a log of finished requests, by custom_id."""
    if not log.exists():
        return {}
    whole = log.read_bytes().split(b"\n")[:-1]
    lines = [json.loads(record)[3] for record in whole]
    return {item["custom_id"]: item for item in lines}


def wait_for_results(log: Path, count: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 240
    seen = 0
    while seen < count:
        assert time.monotonic() < deadline, f"{log} stays at {seen} results"
        assert process.poll() is None, f"it ended after {seen} results were seen"
        time.sleep(0.02)
        if log.exists():
            seen = log.read_bytes().count(b"\n")


def assert_once_each(found: list[dict[str, Any]], before: dict[str, Any]) -> None:
    """Every line answered once, those finished before the crash left untouched."""
    ids = [item["custom_id"] for item in found]
    assert ids == [f"line-{i}" for i in range(NUM_LINES)]
    by_id = {item["custom_id"]: item for item in found}
    assert all(by_id[custom_id] == item for custom_id, item in before.items())
    assert all(item["response"]["status_code"] == 200 for item in found)


class Poison(CustomLogitProcessor):
    """Breaks the scheduler as soon as a request with it is sampled."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        raise RuntimeError("poison")


def test_a_line_that_kills_the_engine_is_found_and_the_rest_answered(
    demo_model: Path, tmp_path: Path
) -> None:
    store = tmp_path / "batches"
    args = (
        "--offline-batch",
        f"--offline-batch-dir={store}",
        "--enable-custom-logit-processor",
    )
    lines = input_lines()[:40]
    lines[7]["body"]["custom_logit_processor"] = Poison.to_str()
    with server(demo_model, *args, log_dir=tmp_path) as running:
        batch_id = submit(client(running.url), jsonl(lines)).id
        running.process.wait(timeout=120)
    suspects = store / "batches" / batch_id / "suspects.json"
    assert "7" in json.loads(suspects.read_bytes())["lines"]
    for _ in range(2):
        if json.loads(suspects.read_bytes())["lines"]["7"] == NEVER:
            break  # else SGLang's own warm-up was beside it
        # It may be gone before it has answered its first health check.
        with (
            suppress(AssertionError),
            server(demo_model, *args, log_dir=tmp_path) as running,
        ):
            running.process.wait(timeout=120)
    assert json.loads(suspects.read_bytes())["lines"]["7"] == NEVER
    logs = [path.read_text(errors="replace") for path in tmp_path.glob("server-*.log")]
    assert len(logs) >= 2
    assert not any("seconds for CUDA coredumps" in log for log in logs)
    with server(demo_model, *args, log_dir=tmp_path) as running:
        api = client(running.url)
        batch = wait(api, batch_id)
        assert len(results(api, batch.output_file_id)) == 39
        [error] = results(api, batch.error_file_id)
        assert error["custom_id"] == "line-7"
        assert error["response"]["body"]["error"]["code"] == "engine_died"


def test_run_killed_continues_when_started_again(
    demo_model: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rest = tmp_path / "rest.jsonl.gz"
    half = NUM_LINES // 2
    source.write_bytes(jsonl(input_lines()[:half]))
    rest.write_bytes(gzip.compress(jsonl(input_lines()[half:])))
    elsewhere = tmp_path / "elsewhere" / "out.jsonl"
    elsewhere.parent.mkdir()

    def writing(output: Path, *start: str) -> list[str]:
        return [
            *(start or forked_children.command("cli_main")),
            "run",
            *("-i", str(source), str(rest), "-o", str(output)),
            *("--state", f"file://{tmp_path}/state"),
            *("--max-inflight", str(MAX_INFLIGHT)),
            *("--offline-batch-config", '{"bucket_requests": 90}'),
            *("--model-path", str(demo_model), *SERVER_ARGS),
        ]

    command = writing(output)
    first = preloaded.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    log = tmp_path / "out.jsonl.job" / "results.jsonl"
    try:
        wait_for_results(log, NUM_LINES // 4, first)
    finally:
        kill_group(first)
    before = finished_lines(log)
    assert NUM_LINES // 4 <= len(before) < NUM_LINES, "the kill came too late"
    assert not output.exists()

    changed = source.read_bytes().replace(b"Why?", b"How?")
    source.write_bytes(changed)
    refused = run(command)
    assert refused.returncode == 2
    assert "was begun with another input" in refused.stderr
    assert finished_lines(log) == before

    source.write_bytes(jsonl(input_lines()[:half]))
    ended = run_until(command, log, NUM_LINES // 2, kill_scheduler)
    assert ended.returncode == 1
    [last] = [text for text in ended.stderr.splitlines() if text.startswith("error")]
    assert "the system killed a process of SGLang (SIGKILL)" in last
    assert "lower --max-total-tokens" in last and "The same command continues" in last
    assert "Traceback" not in ended.stderr

    # Started as a user does: all its processes get the signal.
    as_user = writing(output, sys.executable, "-m", "sglang_batch")
    interrupted = run_until(as_user, log, 3 * NUM_LINES // 4, press_ctrl_c)
    before = finished_lines(log)
    assert interrupted.returncode == 130, interrupted.stderr
    last = interrupted.stderr.splitlines()[-1]
    assert f"Stopped with {len(before)} of {NUM_LINES} requests done" in last
    assert "error" not in interrupted.stderr
    assert_quiet(interrupted, tmp_path / "out.jsonl.job" / "engine.log")

    # Another machine, which has the state alone.
    again = run(writing(elsewhere))
    assert again.returncode == 0, again.stderr[-4000:]
    found = [json.loads(item) for item in elsewhere.read_text().splitlines()]
    assert_once_each(found, before)
    summary = json.loads(again.stdout.splitlines()[-1])
    assert summary["completed"] == NUM_LINES
    assert summary["this_run"]["completed"] == NUM_LINES - len(before)

    idle = run(writing(elsewhere))
    assert idle.returncode == 0
    assert "nothing to do" in idle.stderr
    here = run(command)
    assert here.returncode == 2
    assert "is complete, and its output is not here" in here.stderr


def assert_quiet(done: subprocess.CompletedProcess[str], engine_log: Path) -> None:
    """The engine's output is in its log, and SGLang's warnings of lacking devices nowhere."""
    assert len(done.stderr.splitlines()) <= 15, done.stderr
    assert "Warning:" not in done.stderr
    assert "server_args" not in done.stderr + done.stdout
    kept = engine_log.read_text()
    assert "Offline batch scheduler ready" in kept
    assert "Prefill batch" not in kept
    assert max(map(len, kept.splitlines())) < 2000


def run_until(
    command: list[str], log: Path, count: int, end: Callable[[int], None]
) -> subprocess.CompletedProcess[str]:
    """A run that ``end`` ends, called with its process id at ``count`` results."""
    process = preloaded.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_results(log, count, process)
        end(process.pid)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        kill_group(process)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill_scheduler(run: int) -> None:
    """As a system without memory does."""
    for child in psutil.Process(run).children(recursive=True):
        if "scheduler" in child.cmdline()[0]:
            child.kill()


def press_ctrl_c(run: int) -> None:
    """A terminal sends SIGINT to all processes of the run."""
    os.killpg(run, signal.SIGINT)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return preloaded.run(command)
