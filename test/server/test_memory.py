"""A long input does not fill the host's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_LINES = 100_000
PROMPT_LEN = 300
MIB = 1 << 20

RUN_A_JOB = """
import asyncio, json, sys, threading, time
from pathlib import Path
from fake_engine import FakeEngine
from sglang_batch.batch_api.jsonl import BatchFile, validate
from sglang_batch.batch_api.lines import LineRules
from sglang_batch.batch_api.lines import result_line
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.job import Job
from sglang_batch.store.result_log import ResultLog


def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024


class Engine(FakeEngine):
    '''Remembers nothing of what it ran.'''

    async def execute(self, prepared, replica=None):
        output = await super().execute(prepared, replica)
        self.executed.clear()
        return output


def watch():
    while True:
        peak[0] = max(peak[0], anonymous_bytes())
        time.sleep(0.01)


directory = Path(sys.argv[1])
peak = [0]
start = anonymous_bytes()
threading.Thread(target=watch, daemon=True).start()
requests = validate(directory / "in.jsonl", LineRules())
assert isinstance(requests, BatchFile), requests
log = ResultLog(directory / "results.jsonl", len(requests))


def store(request, output):
    line = result_line(request, "batch_1", output)
    log.put(request.index, line, ok=output.ok, usage=output.usage)


job = Job("batch_1", requests, log.unfinished(), Engine(), OfflineBatchConfig(), store)
asyncio.run(job.run())
with open(directory / "out.jsonl", "wb") as out:
    log.write_ordered(out, out)
tokens = log.usage.input_tokens
print(json.dumps({"done": log.num_done, "grown": peak[0] - start, "tokens": tokens}))
"""


@pytest.mark.slow
def test_memory_grows_by_no_more_than_the_tokens(tmp_path: Path) -> None:
    with (tmp_path / "in.jsonl").open("w") as file:
        for i in range(NUM_LINES):
            content = f"document {i % 97} question {i} ".ljust(PROMPT_LEN, "x")
            body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
            line = {
                "custom_id": f"r{i}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN_A_JOB, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["done"] == NUM_LINES
    assert found["tokens"] >= NUM_LINES * PROMPT_LEN
    token_bytes = 4 * found["tokens"]
    assert found["grown"] < token_bytes + 48 * MIB, found
