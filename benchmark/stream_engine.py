"""One engine in a process of its own, for ``doors/stream.py``: jobs while they are rendered.

    python benchmark/stream_engine.py DIRECTORY

DIRECTORY has the model and ``task.json``. Results are written to ``result.json`` there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import throughput_probe
from report import paths_given

CHAT = "/v1/chat/completions"
GROUP = 24
TASK_FILE, RESULT_FILE, STEPS_FILE = "task.json", "result.json", "steps.bin"
ARGUMENTS = (
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=16384",
    "--max-running-requests=64",
    "--chunked-prefill-size=512",
)


class Lines:
    """Chat lines, made when they are read. Those of a group share a prefix, and the lines
    of all groups are mixed: neighbours in the file are of different groups."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        from sglang_batch.request import BatchRequestInput

        group = index * 7919 % max(1, self._count // GROUP)
        text = f"{group:06d} " + "a document " * (4 + group % 8) + f"question {index}"
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 2 + index % 5,
            "temperature": 0,
        }
        return BatchRequestInput(index, str(index), CHAT, json.dumps(body).encode())


class Counted:
    """Counts where templates and tokenizers run, and the messages to the scheduler."""

    def __init__(self, engine: Any) -> None:
        self.prepared = 0
        self.control_bytes = 0
        prepare, control = engine._prepare, engine._job_control

        def counted(*args: Any) -> Any:
            self.prepared += 1
            return prepare(*args)

        async def noted(message: Any) -> Any:
            self.control_bytes += sum(map(len, message.plans))
            return await control(message)

        engine._prepare, engine._job_control = counted, noted


class Progress:
    """When lines were rendered and answered, by ``time.perf_counter``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rendered: list[float] = []
        self.answered: list[float] = []
        self.cached = self.prompt = 0
        self.texts: dict[int, bytes] = {}
        self.rss: list[int] = []

    def on_rendered(self) -> None:
        if len(self.rendered) % 1000 == 0:
            self.rss.append(psutil.Process().memory_info().rss)
        self.rendered.append(time.perf_counter())

    def on_answer(self, request: Any, output: Any) -> None:
        if not output.ok:
            raise RuntimeError(output.body.decode())
        self.answered.append(time.perf_counter())
        self.cached += output.usage.cached_tokens
        self.prompt += output.usage.input_tokens
        message = json.loads(output.body)["choices"][0]["message"]
        self.texts[request.index] = str(message["content"]).encode()


async def run_job(engine: Any, name: str, count: int, stop_s: float | None) -> Progress:
    """Run a job of this many lines. ``stop_s``: end so long after the first answer."""
    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.job.job import Job, JobOptions
    from sglang_batch.request import named_job_id

    progress, stop = Progress(count), asyncio.Event()
    job = Job(
        named_job_id(name),
        Lines(count),
        range(count),
        engine,
        OfflineBatchConfig(),
        progress.on_answer,
        JobOptions(on_rendered=progress.on_rendered),
    )
    work = asyncio.ensure_future(job.run(stop))
    while stop_s is not None and not work.done():
        await asyncio.sleep(0.05)
        if not progress.answered:
            continue
        late = time.perf_counter() - progress.answered[0] > stop_s
        if late or len(progress.rendered) == count:
            stop.set()
            break
    await work
    return progress


def _while_rendering(job: Progress, scratch: Path) -> dict[str, Any]:
    """The engine from a job's first answer to the last line that was rendered."""
    begin, end = job.answered[0], job.rendered[-1]
    steps = throughput_probe.read_steps(scratch / STEPS_FILE, begin)
    steps = steps[steps["start"] < end]
    first_read_s = job.rendered[min(2000, len(job.rendered)) - 1]
    skipped = min(5, len(job.rss) - 1)  # before them, requests are kept in memory
    return {
        "first_answer_s": begin - first_read_s,
        "first_read_s": first_read_s,
        "idle": float(steps["idle_s"].sum()) / (end - begin),
        "receiving": float(steps["ingest_s"].sum()) / (end - begin),
        "window_s": end - begin,
        "rendered": len(job.rendered),
        "answered": len(job.answered),
        "bytes_per_line": (job.rss[-1] - job.rss[skipped])
        / (1000 * max(1, len(job.rss) - 1 - skipped)),
    }


def main() -> None:
    [scratch] = paths_given(__doc__, "DIRECTORY")
    task = json.loads((scratch / TASK_FILE).read_text())
    throughput_probe.install(scratch / STEPS_FILE)
    from sglang_batch.job import live_plan
    from sglang_batch.srt.engine import in_process

    args = in_process.parse_server_args([f"--model-path={task['model']}", *ARGUMENTS])
    with in_process.engine(args) as (engine, loop):

        def run(name: str, count: int, stop_s: float | None = None) -> Progress:
            return loop.run_until_complete(run_job(engine, name, count, stop_s))

        loop.run_until_complete(engine.connect())
        manager: Any = engine.manager
        run("warm-up", 100)
        counted = Counted(engine)
        begin = time.perf_counter()
        found = _while_rendering(run("long", task["long"], task["stop_s"]), scratch)
        found["first_read_s"] -= begin
        print(found, file=sys.stderr)
        mid = task["mid"]
        counted.prepared = counted.control_bytes = 0
        loop.run_until_complete(manager.flush_cache())
        streamed = run("streamed", mid)
        found |= {
            "prepared": counted.prepared / mid,
            "control_bytes": counted.control_bytes / mid,
            "share_streamed": streamed.cached / streamed.prompt,
        }
        print(found, file=sys.stderr)
        loop.run_until_complete(manager.flush_cache())
        live_plan.FIRST_REQUESTS = live_plan.FIRST_TOKENS = 1 << 40
        whole = run("whole", mid)
        found["share_whole"] = whole.cached / whole.prompt
        found["differing"] = sum(
            streamed.texts[i] != whole.texts[i] for i in whole.texts
        )
        (scratch / RESULT_FILE).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
