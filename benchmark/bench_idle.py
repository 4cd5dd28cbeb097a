"""CPU time of an idle offline server, and the time until it begins new work.

    python benchmark/bench_idle.py              one minute idle, 20 repetitions
    python benchmark/bench_idle.py --spin       with an engine that never sleeps

The server runs the demo model on a CPU. Its processes' CPU seconds come from /proc. Each
kind of new work (a batch, a wave of programs, an online request) is sent after a pause in
which the engine falls asleep, and is timed until its first step is in the step log: one
prompt with one token of output, so its first step is also its last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from demo_server import launched
from report import Figure, finish, print_figures

from sglang_batch.run.demo_model import write_demo_model

# Longer than the engine stays awake after a step.
PAUSE_S = 1.5
PATIENCE_S = 30.0
# An idle server may use this share of one core.
MAX_SHARE = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="idle time")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--spin", action="store_true", help="an engine without sleep")
    parser.add_argument("--save", type=Path, help="file for the JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglang-batch-idle-") as scratch:
        figures = measure(options, Path(scratch))
    print_figures("An idle server", figures)
    finish({"figures": [figure.as_json for figure in figures]}, options.save)
    return int(any(figure.met is False for figure in figures))


def measure(options: argparse.Namespace, scratch: Path) -> list[Figure]:
    write_demo_model(scratch / "model")
    log = scratch / "steps.csv"
    config: dict[str, Any] = {"step_log": str(log)}
    if options.spin:
        config["sleep_on_idle"] = False
    flags = ("--dtype=float32", "--offline-batch-config", json.dumps(config))
    with (
        launched(scratch / "model", "demo", scratch, *flags) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
    ):
        file_id = upload(http)
        kinds: dict[str, Callable[[], object]] = {
            "batch": lambda: start_batch(http, file_id),
            "wave": lambda: post(http, "/offline_batch/wave", {"requests": [REQUEST]}),
            "online request": lambda: post(http, "/generate", REQUEST),
        }
        for start in kinds.values():  # compiles and caches
            until_first_step(log, start)
        figures = cpu_share(options.seconds)
        for name, start in kinds.items():
            delays = [until_first_step(log, start) for _ in range(options.repeats)]
            print(name, [round(1000 * delay, 1) for delay in delays], flush=True)
            figures.append(
                Figure(f"{name}: median to first step", 1000 * median(delays), "ms")
            )
            figures.append(
                Figure(f"{name}: longest to first step", 1000 * max(delays), "ms")
            )
    return figures


REQUEST = {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}


def upload(http: httpx.Client) -> str:
    body = {
        "model": "demo",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    answer = http.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("one.jsonl", json.dumps(line).encode())},
    ).raise_for_status()
    return str(answer.json()["id"])


def start_batch(http: httpx.Client, file_id: str) -> None:
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    post(http, "/v1/batches", body)


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    http.post(path, json=body).raise_for_status()


def until_first_step(log: Path, start: Callable[[], object]) -> float:
    """Seconds from the submission until the step log grows. The engine sleeps before."""
    time.sleep(PAUSE_S)
    before = log.stat().st_size if log.exists() else 0
    began = time.time()
    start()
    while not log.exists() or log.stat().st_size == before:
        if time.time() > began + PATIENCE_S:
            raise SystemExit(f"error: no step {PATIENCE_S:.0f} s after the submission")
        time.sleep(0.001)
    return log.stat().st_mtime - began


def cpu_share(seconds: float) -> list[Figure]:
    """CPU seconds of each process of the server over this time, as a share of a core."""
    time.sleep(PAUSE_S)
    before = cpu_seconds()
    time.sleep(seconds)
    after = cpu_seconds()
    used = {
        pid: (name, after[pid][1] - before[pid][1]) for pid, (name, _) in before.items()
    }
    for name, value in used.values():
        print(f"  {name}: {value:.2f} CPU seconds in {seconds:.0f} s", flush=True)
    total = sum(value for _, value in used.values())
    return [
        Figure(
            "idle: CPU seconds a minute",
            60 * total / seconds,
            "s",
            ("<=", 60 * MAX_SHARE),
        )
    ]


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Name and CPU seconds of each process of the server, by its id."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            processes[int(path.parent.name)] = (name, rest.split())
    # The server has a session of its own, and is the only child of this process.
    sessions = {f[3] for _, f in processes.values() if int(f[1]) == os.getpid()}
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return {
        pid: (name, (int(fields[11]) + int(fields[12])) / ticks_per_s)
        for pid, (name, fields) in processes.items()
        if fields[3] in sessions
    }


if __name__ == "__main__":
    sys.exit(main())
