"""What the head of a fleet does for each line: records a second, and memory by lines.

``commit``: answers as workers send them, in calls of a thousand, some twice, are decoded,
matched with their lines, made into result lines, written to the log and synced as often as in
a run. ``line``: a whole job over workers in this process that answer at once, so the time
of the processor has all that head and workers do for a line but the engine's. ``memory``: the bytes that a head keeps for
each line of a job from its files: places of lines, results, and the dispatcher's arrays; and
what whole jobs take, in one piece and in buckets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from report import Figure, print_table

from sglang_batch.batch_api.jsonl import BatchFile, FileErrors, validate
from sglang_batch.batch_api.lines import LineRules, result_line
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.fleet import messages
from sglang_batch.fleet.fleet_engine import FleetEngine
from sglang_batch.fleet.messages import LineAnswer, Reply, Session
from sglang_batch.fleet.session_ends import MAX_PER_CALL, HeadEnd
from sglang_batch.job.bucketed_job import BucketedJob, deal_requests
from sglang_batch.job.dispatcher import Dispatcher
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.request import (
    BatchRequestInput,
    RequestOutput,
    Usage,
    engine_request_id,
    parse_request_id,
)
from sglang_batch.run.running_job import COMMIT_EVERY_S
from sglang_batch.store.result_log import ResultLog

from .large_job import job_part
from .simulated_fleet import MACHINE, URL, World

RECORDS, LINES = 1_000_000, 20_000
MEMORY_LINES = (1_000_000, 10_000_000)
# Lines of a job that runs in one piece and in buckets, and of a bucket.
JOB_LINES, BUCKET = 40_000, 4_000
# Lines dealt to buckets.
DEALT_LINES = 300_000
# Bytes of an answer: a chat completion of about 100 tokens.
_TEXT = "word " * 100


def measure(quick: bool) -> list[Figure]:
    """All of it."""
    scale = 20 if quick else 1
    return [
        commit(RECORDS // scale),
        uvloop.run(lines(LINES // scale)),
        *memory(tuple(count // scale for count in MEMORY_LINES)),
        *buckets(JOB_LINES // scale, BUCKET // scale),
        dealing(DEALT_LINES // scale),
    ]


def commit(num_records: int) -> Figure:
    """Records a second through the head, written and synced."""
    body = json.dumps(
        {"id": "x", "choices": [{"message": {"role": "assistant", "content": _TEXT}}]}
    ).encode()
    session = Session(1, 1)
    calls = [
        messages.encode(
            Reply(
                session,
                0,
                first + 1,
                [
                    LineAnswer(
                        engine_request_id("job", i), 200, body, (300, 200, 100, 0)
                    )
                    for i in range(first, min(first + MAX_PER_CALL, num_records))
                ],
            )
        )
        for first in range(0, num_records, MAX_PER_CALL)
    ]
    requests = [
        BatchRequestInput(i, f"line-{i}", URL, b"{}") for i in range(num_records)
    ]
    end = HeadEnd(session)
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as scratch:
        log = ResultLog(Path(scratch) / "results.jsonl", num_records)
        begun = synced = time.perf_counter()
        for number, call in enumerate(calls):
            again = calls[number - 1] if number % 10 == 9 else None
            for data in (call, again):
                if data is None:
                    continue
                for event in end.receive(messages.READ_ANSWER["exchange"](data)):
                    assert isinstance(event, LineAnswer)
                    output = event.output()
                    request = requests[parse_request_id(event.rid)[1]]
                    line = result_line(request, "job", output)
                    log.put(request.index, line, ok=output.ok, usage=output.usage)
            if time.perf_counter() - synced > COMMIT_EVERY_S:
                log.commit()
                synced = time.perf_counter()
        log.commit()
        seconds = time.perf_counter() - begun
        assert log.num_completed == num_records
        log.close()
    return Figure(
        "records committed a second", num_records / seconds, target=(">=", 50_000)
    )


async def lines(num_lines: int, bucket_requests: int = RECORDS) -> Figure:
    """Lines of a whole job for each second of processor time, head and workers."""
    world = World(0, num_lines=1, faults=0, loss=0.0, rows=64, num_workers=4)
    world.takes_no_time()
    requests = MadeLines(num_lines)
    engine = FleetEngine(world.places, epoch=1, min_workers=4)
    await engine.connect()
    done = 0

    def sink(request: BatchRequestInput, output: RequestOutput) -> None:
        nonlocal done
        done += output.ok

    begun = time.process_time()
    config = OfflineBatchConfig(bucket_requests=bucket_requests)
    await BucketedJob("job", requests, range(num_lines), engine, config, sink).run()
    seconds = time.process_time() - begun
    assert done == num_lines
    await engine.close()
    return Figure(
        "lines for a second of a core, head and workers", num_lines / seconds,
        note="rendered, planned, sent, answered; engines that take no time",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MadeLines:
    """The requests of a job, which take no memory."""

    num_lines: int

    def __len__(self) -> int:
        return self.num_lines

    def __getitem__(self, index: int) -> BatchRequestInput:
        prompt = f"family {index % 64} question {index}"
        body = json.dumps({"prompt": prompt}).encode()
        return BatchRequestInput(index, f"line-{index}", URL, body)


def memory(counts: tuple[int, ...]) -> list[Figure]:
    """Memory of a head, by the lines of its job."""
    kept = [_in_new_process("kept", count) for count in counts]
    planned = [_in_new_process("planned", count) for count in counts[:1]]
    rows = [
        ["lines, results, dispatcher", f"{count:,}", f"{size / 1e9:.2f}", f"{size / count:.0f}"]
        for count, size in zip(counts, kept, strict=True)
    ] + [
        ["and a plan in one piece", f"{count:,}", f"{size / 1e9:.2f}", f"{size / count:.0f}"]
        for count, size in zip(counts, planned, strict=False)
    ]  # fmt: skip
    print_table("Peak memory of a head", ["has", "lines", "GB", "bytes a line"], rows)
    growth = (kept[-1] - kept[0]) / (counts[-1] - counts[0])
    return [
        Figure(
            "head at 100M lines, GB, from its growth", growth * 100e6 / 1e9,
            target=("<=", 16.0), note="without a plan in one piece",
        ),
        Figure("bytes a line of a plan in one piece", planned[0] / counts[0]),
    ]  # fmt: skip


def buckets(num_lines: int, bucket: int) -> list[Figure]:
    """Memory of whole jobs, head and workers in one process."""
    whole, dealt = (
        _in_new_process(x, num_lines) for x in ("whole", f"bucket={bucket}")
    )
    return [
        Figure("bytes a line of a whole job in one piece", whole / num_lines),
        Figure(
            f"  in {num_lines // bucket} buckets and more, two of them open",
            dealt / num_lines,
            note="head and workers",
        ),
    ]  # fmt: skip


def dealing(num_lines: int) -> Figure:
    """Lines a second from a file to their buckets, without rendering them."""
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as scratch:
        requests = _file(Path(scratch) / "input.jsonl", num_lines)
        deal_requests(MadeLines(1000), 100, 0)  # compiles
        begun = time.perf_counter()
        found = deal_requests(requests, num_lines // 10, 0)
        seconds = time.perf_counter() - begun
    return Figure(
        "lines dealt to buckets a second", num_lines / seconds,
        note=f"{len(found)} buckets",
    )  # fmt: skip


def _file(path: Path, num_lines: int) -> BatchFile:
    """A file of lines that are no larger than they must be."""
    with open(path, "w") as file:
        for i in range(num_lines):
            file.write(
                f'{{"custom_id": "line-{i}", "method": "POST", "url": "{URL}", '
                f'"body": {{"model": "m", "prompt": "q{i}"}}}}\n'
            )
    requests = validate(path, LineRules(models=None, require_model=False))
    assert not isinstance(requests, FileErrors)
    return requests


def _in_new_process(what: str, num_lines: int) -> int:
    """Peak bytes of a process that does this, above those of one that does nothing."""
    peaks = []
    for count in (1000, num_lines):
        done = subprocess.run(
            [sys.executable, "-m", "fleet_parts.head", what, str(count)],
            cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(done.stdout.split()[-1]))
    return peaks[1] - peaks[0]


def keep(num_lines: int) -> None:
    """What a head has of a job from its files, once all lines are answered."""
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as scratch:
        requests = _file(Path(scratch) / "input.jsonl", num_lines)
        log = ResultLog(Path(scratch) / "results.jsonl", num_lines)
        engine: Any = None
        dispatcher = Dispatcher(
            engine, OfflineBatchConfig(), num_lines, _no_render, lambda *_: None
        )
        dispatcher.progress(whole=True)
        answer = b'{"a": 1}'
        for i in range(num_lines):
            log.put(i, answer, ok=True, usage=Usage(1, 1, 1, 0))
        assert len(requests) == num_lines  # kept until now, as in a run
        log.close()


def make_plan(num_lines: int) -> None:
    """A plan of a whole job in one piece, for 64 engines."""
    requests = job_part(0, num_lines, num_lines, 0)
    planner = JobPlanner(
        requests, np.arange(num_lines), MACHINE, OfflineBatchConfig(), 64
    )
    for shard in planner.plans():
        shard.for_scheduler(MACHINE)


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(x for x in status.splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


async def _no_render(number: int) -> Any:
    raise AssertionError(f"line {number} is not sent")


if __name__ == "__main__":
    what, count = sys.argv[1], int(sys.argv[2])
    if what == "kept":
        keep(count)
    elif what == "planned":
        make_plan(count)
    else:
        _, _, size = what.partition("=")
        uvloop.run(lines(count, int(size or count)))
    print(peak_bytes(os.getpid()))
