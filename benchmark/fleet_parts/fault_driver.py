"""One head of one job on a Ray cluster, as a process of its own that can be killed.

    python -m fleet_parts.fault_driver ADDRESS INPUT DIRECTORY MODEL ENGINES WAIT_FOR COPIES

It finds the engines of earlier heads, and leaves them when the job has ended, so that a
series of jobs loads models only where engines were killed. The result log is
``DIRECTORY/results.jsonl``, and ``DIRECTORY/head.log`` tells when engines were lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.fleet.fleet_engine import FleetEngine
from sglang_batch.fleet.ray.ray_fleet import RayPlace, join_cluster
from sglang_batch.job.job import Job, JobOptions
from sglang_batch.request import BatchRequestInput, RequestOutput, named_job_id
from sglang_batch.run.backend_options import started
from sglang_batch.store.result_log import ResultLog

# Options of each engine. All KV of two of them fits into a small machine.
ENGINE = ("--dtype", "float32", "--device", "cpu", "--max-total-tokens", "20000",
          "--max-running-requests", "8", "--random-seed", "0")  # fmt: skip


def read_requests(path: Path, copies: int = 1) -> list[BatchRequestInput]:
    """The lines of a batch file, several times one after the other."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()] * copies
    return [
        BatchRequestInput(
            i, line["custom_id"], line["url"], json.dumps(line["body"]).encode()
        )
        for i, line in enumerate(lines)
    ]


def make_places(model: str, num_engines: int) -> list[RayPlace]:
    """Places that every head of these benchmarks names alike."""
    argv = ["--model-path", model, "--served-model-name", "demo", *ENGINE]
    start = partial(started, "sglang", argv)
    options = {"num_cpus": 1}
    return [
        RayPlace(f"engine {i}", f"bench-fleet-{i}", start, options, os.getcwd())
        for i in range(num_engines)
    ]


async def run_job(
    engine: FleetEngine, requests: list[BatchRequestInput], log: ResultLog
) -> float | None:
    """Run the lines without a result. Returns the share of tokens that can be cached."""

    def sink(request: BatchRequestInput, output: RequestOutput) -> None:
        log.put(request.index, output.body, ok=output.ok, usage=output.usage)

    config = OfflineBatchConfig()
    options = JobOptions(releases=True)
    name = named_job_id("bench")
    job = Job(name, requests, log.unfinished(), engine, config, sink, options)
    await job.run()
    log.commit()
    return job.prefix_sharing_ratio


async def _main(
    requests: list[BatchRequestInput],
    directory: Path,
    model: str,
    num_engines: int,
    wait_for: int,
) -> None:
    log = ResultLog(directory / "results.jsonl", len(requests))
    epoch = time.time_ns() // 1_000_000
    engine = FleetEngine(make_places(model, num_engines), epoch, wait_for)
    await engine.connect()
    (directory / "connected").touch()
    await run_job(engine, requests, log)
    log.close()
    (directory / "states.json").write_text(
        json.dumps([str(s) for s in engine.states()])
    )


def main() -> int:
    address, source, place, model, *numbers = sys.argv[1:]
    directory = Path(place)
    logging.basicConfig(
        filename=directory / "head.log", format="%(created).3f %(message)s", level=30
    )
    join_cluster(address)
    num_engines, wait_for, copies = map(int, numbers)
    requests = read_requests(Path(source), copies)
    asyncio.run(_main(requests, directory, model, num_engines, wait_for))
    sys.stdout.flush()
    os._exit(0)  # the engines stay


if __name__ == "__main__":
    sys.exit(main())
