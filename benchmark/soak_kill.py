"""Row of the soak: the server killed again and again while it works on one batch."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai.types import Batch
from report import Figure
from soak_server import SoakServer, chat_line, write_lines

PATIENCE_S = 900
# Time to the first answer: some servers are killed again before that.
LONGEST_START_S = 12.0


@dataclass
class Log:
    """The log of finished requests at one moment.

    answers: result line by index of the request.
    repeated: number of requests that it has more than once.
    """

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    repeated: int = 0

    @classmethod
    def read(cls, path: Path) -> Log:
        log = cls()
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        for record in whole:
            index, _, _, line, *_ = json.loads(record)
            log.repeated += index in log.answers
            log.answers.setdefault(index, line)
        return log


def kill_rows(
    server: SoakServer, scratch: Path, rounds: int, num_lines: int, seed: int
) -> list[Figure]:
    """Run one batch and kill the server again and again. It runs at the end.

    Moments are drawn over the whole batch: while requests run, while the server
    starts or validates, and at the end, while result files are written.
    """
    rng = random.Random(seed)
    source = write_lines(
        scratch / "kill.jsonl",
        (
            chat_line(
                f"line-{i}",
                f"What is {i} to {rng.randrange(10**6)}?",
                max_tokens=rng.randrange(4, 49),
                ignore_eos=True,
            )
            for i in range(num_lines)
        ),
    )
    batch = server.submit(source)
    path = server.store / "batches" / batch.id / "results.jsonl"
    kept: dict[int, dict[str, Any]] = {}
    repeated = 0
    for number in range(rounds):
        share = rng.uniform(number, number + 1) / rounds
        _wait_for(server, batch, path, int(share * num_lines))
        time.sleep(rng.uniform(0, 0.2))
        server.kill()
        # Nothing written is ever lost, so the contents of a moment remain.
        log = Log.read(path)
        kept |= log.answers
        repeated = max(repeated, log.repeated)
        if rng.random() < 0.2:
            server.start(killed_after_s=rng.uniform(0, LONGEST_START_S))
        server.start()
    copy = scratch / "results.jsonl"
    if path.exists():
        os.link(path, copy)  # the original is deleted at the end of the batch
    batch = server.wait(server.api.batches.retrieve(batch.id), PATIENCE_S)
    repeated = max(repeated, Log.read(copy).repeated)
    return _figures(server, batch, kept, repeated, num_lines)


def _wait_for(server: SoakServer, batch: Batch, path: Path, count: int) -> None:
    """Wait until that many lines are finished, or the batch has ended."""
    deadline = time.monotonic() + PATIENCE_S
    seen = lines = 0
    while lines < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{lines} of {count} lines after {PATIENCE_S} s")
        time.sleep(0.01)
        if not path.exists():
            if server.api.batches.retrieve(batch.id).status == "completed":
                return
            continue
        with path.open("rb") as log:
            log.seek(seen)
            data = log.read()
        seen += len(data)
        lines += data.count(b"\n")


def _figures(
    server: SoakServer,
    batch: Batch,
    kept: dict[int, dict[str, Any]],
    repeated: int,
    num_lines: int,
) -> list[Figure]:
    found = list(server.results(batch))
    times = Counter(line["custom_id"] for line in found)
    expected = {f"line-{i}" for i in range(num_lines)}
    by_id = {line["custom_id"]: line for line in found}
    changed = sum(by_id.get(line["custom_id"]) != line for line in kept.values())
    bodies = [line["response"]["body"] for line in found if line["response"]]
    tokens = sum(body.get("usage", {}).get("total_tokens", 0) for body in bodies)
    miscounted = abs(tokens - (batch.usage.total_tokens if batch.usage else 0))
    none = ("=", 0)
    return [
        Figure("lines missing", len(expected - times.keys()), "", none),
        Figure("lines twice", sum(n > 1 for n in times.values()), "", none),
        Figure("lines that are none", len(times.keys() - expected), "", none),
        Figure("lines failed", sum(not _ok(line) for line in found), "", none),
        Figure(
            "finished lines run again", repeated + changed, "", none,
            f"{len(kept)} were finished at a kill",
        ),
        Figure("tokens miscounted", miscounted, "", none, f"of {tokens}"),
        Figure("batch not completed", batch.status != "completed", "", none),
    ]  # fmt: skip


def _ok(line: dict[str, Any]) -> bool:
    return bool(line["response"]) and line["response"]["status_code"] == 200
