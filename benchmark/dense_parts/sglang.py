"""Processor and wall time against stock SGLang, for models that both run.

SGLang runs in a process of its own, with ``dfs-weight``, as many rows and one thread. It
gets the requests in the same order, the longest answers first, as token ids, without a
tokenizer, and its cache is empty before each run. Its processor time is that of all its
processes, from the call to the answers; starting and warming up are not in it. The dense
engine's is that of its decode loop in this process. No ratio has a target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import stock_engine
from report import Figure, print_table

from dense_parts.jobs import Task, longest_first
from dense_parts.times import jobs
from dense_parts.turns import Ways, differing, in_turns, of_median, progress
from dense_parts.ways import Done, dense, llama, llama_copy
from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseSettings

# Layers, channels, and of how many repeats there is a run.
SIZES = ((4, 256, 1), (12, 768, 3))
ROWS = 16
ARGUMENTS = (
    "--schedule-policy=dfs-weight",
    "--dtype=float32",
    "--skip-tokenizer-init",
    "--sleep-on-idle",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=16384",
    "--chunked-prefill-size=4096",
    f"--max-running-requests={ROWS}",
    "--log-level=error",
)


def measure(quick: bool, repeats: int) -> list[Figure]:
    figures = []
    for layers, hidden, share in ((2, 128, repeats),) if quick else SIZES:
        figures += _measure(layers, hidden, quick, max(1, repeats // share))
    return figures


def _measure(layers: int, hidden: int, quick: bool, repeats: int) -> list[Figure]:
    plain = llama(layers, hidden)
    model = wrap(llama_copy(plain))
    size = sum(weight.numel() for weight in plain.parameters()) / 1e6
    figures, rows = [], []
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        plain.save_pretrained(scratch)
        progress(f"{layers}x{hidden}, {size:.0f}M parameters: SGLang starts")
        with stock(Path(scratch)) as engine:
            for name, tasks in jobs(quick).items():
                label = f"{layers}x{hidden}, {name}"
                runs = in_turns(label, _ways(engine, model, tasks), repeats)
                both = {way: of_median(done) for way, done in runs.items()}
                times = [t for done in both.values() for t in (done.cpu_s, done.wall_s)]
                rows.append([f"{label}, {size:.0f}M", *(f"{t:.2f}" for t in times)])
                unlike = sum(
                    differing(plain, tasks, runs["sglang"][0], each)
                    for done in runs.values()
                    for each in done
                )
                figures += _figures(label, both["sglang"], both["dense"], unlike)
    header = ["sglang CPU s", "wall s", "dense CPU s", "wall s"]
    print_table(f"Stock SGLang, {ROWS} rows", ["job", *header], rows)
    return figures


def _ways(engine: StockEngine, model: LoadedModel, tasks: Sequence[Task]) -> Ways:
    order = longest_first(tasks)
    settings = DenseSettings(max_rows=ROWS)
    return {
        "sglang": partial(engine.run, tasks, order),
        "dense": partial(dense, model, tasks, settings, order=order),
    }


def _figures(label: str, stock: Done, ours: Done, unlike: int) -> list[Figure]:
    return [
        Figure(
            f"{label}: SGLang's processor time over dense",
            stock.cpu_s / ours.cpu_s,
            "x",
            note=f"{stock.cpu_s:.2f} s and {ours.cpu_s:.2f} s; stated, whoever wins",
        ),
        Figure(
            f"{label}: SGLang's wall time over dense",
            stock.wall_s / ours.wall_s,
            "x",
            note=f"{stock.wall_s:.2f} s and {ours.wall_s:.2f} s",
        ),
        Figure(f"{label}: answers unlike SGLang's", unlike, "", ("=", 0)),
    ]


# Stock SGLang -------------------------------------------------------------------------


class StockEngine:
    """The engine of stock_engine.py, one job at a time."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def run(self, tasks: Sequence[Task], order: Sequence[int]) -> Done:
        """Have the tasks answered, sent in that order."""
        prompts = [tasks[i].prompt for i in order]
        found = self.call(prompts, [tasks[i].output_len for i in order])
        answers: list[list[int]] = [[] for _ in tasks]
        for i, answer in zip(order, found["answers"], strict=True):
            answers[i] = answer
        return Done(answers, found["cpu_s"], found["wall_s"])

    def call(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Any:
        """One line to the process, and one from it.

        Raises:
            RuntimeError: the process failed. The message has the end of its output.
        """
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps([prompts, lengths]), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            tail = self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"stock SGLang has failed:\n{tail}") from error


@contextmanager
def stock(model: Path) -> Iterator[StockEngine]:
    """Stock SGLang with a model, ready and warm, as long as the context."""
    log = model / "engine.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [
                sys.executable,
                stock_engine.__file__,
                f"--model-path={model}",
                *ARGUMENTS,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    engine = StockEngine(process, log)
    try:
        engine.call([[1 + i] * 64 for i in range(ROWS)], [4] * ROWS)
        yield engine
    finally:
        assert process.stdin
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
