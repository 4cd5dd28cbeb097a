"""Many engines in a minute: a Ray cluster on this machine, and an engine that is killed.

Starts a head and two nodes, runs ``benchmark/data/demo_requests.jsonl`` with
``sglang-batch run --ray`` on two engines, kills one of them in mid-run, and checks that
every line has one answer. The exit status is 0 only if that is so.

    python benchmark/fleet_demo.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet_parts.local_cluster import (
    LocalCluster,
    kill_actor,
    local_cluster,
    wait_until,
)

from sglang_batch.run.demo_model import write_demo_model

DATA = Path(__file__).parent / "data" / "demo_requests.jsonl"
# The engine is killed when so many lines are done.
KILL_AT = 60
START_S, JOB_S = 500.0, 400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglang-batch-demo-") as scratch:
        print("Starting a Ray cluster of a head and two nodes here ...", flush=True)
        write_demo_model(Path(scratch) / "model")
        with local_cluster(2) as cluster:
            return run(cluster, Path(scratch))


def run(
    cluster: LocalCluster,
    scratch: Path,
    start: Callable[[list[str]], subprocess.Popen[Any]] = subprocess.Popen,
) -> int:
    output = scratch / "answers.jsonl"
    command = [
        sys.executable, "-m", "sglang_batch", "run", "--ray", cluster.address,
        "--engines", "2:2", "-i", str(DATA), "-o", str(output), "--model-path",
        str(scratch / "model"), "--served-model-name", "demo", "--dtype", "float32",
        "--device", "cpu", "--max-total-tokens", "20000",
        "--max-running-requests", "8",
    ]  # fmt: skip
    print("$ sglang-batch", *command[3:], flush=True)
    job = start(command)
    log = scratch / "answers.jsonl.job" / "results.jsonl"
    try:
        wait_until(
            lambda: _num_lines(log) >= KILL_AT or job.poll() is not None, START_S
        )
        if job.poll() is None:
            kill_actor()
            print(
                f"killed an engine (SIGKILL) after {_num_lines(log)} lines", flush=True
            )
        status = job.wait(JOB_S)
    finally:
        job.kill()
    if status != 0:
        print(f"the job ended with status {status}", file=sys.stderr)
        return 1
    wanted = sorted(_ids(DATA))
    answered = _ids(output)
    print(
        f"{len(wanted)} lines: {len(set(wanted) - set(answered))} lost, "
        f"{len(answered) - len(set(answered))} doubled"
    )
    return 0 if sorted(answered) == wanted else 1


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    begun = time.monotonic()
    status = main()
    print(f"{time.monotonic() - begun:.0f} s")
    sys.exit(status)
