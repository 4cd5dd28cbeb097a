"""Prompts computed ahead and prefetched: steps that wait for KV, and KV that is lost.

On real SGLang with the demo model on a CPU, with KV for 6,144 tokens: three jobs of prompts
that share prefixes, 2,400 tokens of prompts ahead. Counted are the requests computed again,
and the copies from the host that had not been made when their step began.

Simulated are decode steps of Llama-3-8B on an H100, 1,500 requests whose KV is on the host
and comes over PCIe 5, at the moments of a trace's lengths. A step waits if KV that joins in
it has not arrived.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from report import Figure, print_table

from sglang_batch.planner.kv_lengths.batch_state import GROUPS, TREE, upcoming
from sglang_batch.planner.kv_lengths.length_groups import BatchLaw, step_s
from sglang_batch.srt.scheduler.aligned.prefetch import BYTES_PER_S, PrefetchRoom

from .engine_counts import counts_of
from .traces import BANDWIDTH, COUNT, MEMORY, MODELS, PCIE, requests_of

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from batch_runs import BatchJob, BatchRun, JobRequest

POLICIES = {"length-tree": TREE, "length-aligned": GROUPS}
WAITING = 1.0  # per cent of the steps
BUFFER_BYTES = 4 << 30
MAX_ROWS = 1024
_AHEAD = {"prefill_ahead_tokens": 2400, "prefetch_bytes": 2_000_000}
# Requests that are looked at to be prefetched, as in the scheduler.
_UPCOMING = 64


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has short simulations, and no targets."""
    figures = on_engine()
    for trace in ("ShareGPT", "LongBench"):
        for policy in POLICIES:
            figures.append(simulated(trace, policy, 150 if quick else COUNT))
    if quick:
        return [Figure(each.name, each.value, each.unit, None) for each in figures]
    return figures


def on_engine() -> list[Figure]:
    """Real SGLang."""
    counts = counts_of([*POLICIES], config=_AHEAD)
    header = ["offloaded", "prefetched", "kv_waits", "offload_recomputed", "steps"]
    table = [
        [name, *(case["real"][column] for column in header)]
        for name, case in counts.items()
    ]
    print_table("Prompts computed ahead on real SGLang", ["job", *header], table)
    real = [case["real"] for case in counts.values()]
    steps = sum(each["steps"] for each in real)
    waits = sum(each["kv_waits"] for each in real)
    recomputed = sum(each["offload_recomputed"] for each in real)
    return [
        Figure(
            "real SGLang: copies that a step waited for, of all steps",
            100 * waits / steps, "%", ("<=", WAITING),
        ),
        Figure("real SGLang: requests computed again", recomputed, "", ("=", 0)),
    ]  # fmt: skip


class _Run(BatchRun):
    """A job whose KV comes from the host through the buffer.

    seconds: of the steps so far, and of the waits among them.
    num_waits: steps that waited.
    """

    def __init__(self, job: BatchJob, token_bytes: float) -> None:
        super().__init__(job)
        self._room = PrefetchRoom(int(BUFFER_BYTES // token_bytes))
        self._tokens_per_s = BYTES_PER_S / token_bytes
        self._token_s = token_bytes / PCIE
        self._arrived: dict[str, float] = {}
        self._link_free = self._joined_at = self._begun = 0.0
        self._found = np.zeros(_UPCOMING, np.int32)
        self.seconds = self.waited_s = 0.0
        self.num_waits = 0

    def _is_near(self, i: int) -> bool:
        return str(i) in self._room or self.waiting[i].length > self._room.num_pages

    def _fits(self, i: int) -> bool:
        return super()._fits(i) and (not self.running or self._is_near(i))

    def _join(self, i: int) -> None:
        length, name = self.waiting[i].length, str(i)
        if self._room.give_back(name) is None:
            self._begun = self.seconds
            self._transfer(name, length)
        self._joined_at = max(self._joined_at, self._arrived.pop(name))
        super()._join(i)

    def _transfer(self, name: str, tokens: int) -> None:
        begin = max(self._link_free, self._begun)
        self._arrived[name] = self._link_free = begin + tokens * self._token_s

    def _decode(self) -> None:
        step = 0.0
        if self.running:
            now = self._now()
            wait = max(0.0, self._joined_at - self.seconds)
            self.num_waits += wait > 0
            self.waited_s += wait
            step = step_s(self.job.law, float(now.rows), now.total, float(now.longest))
            # Copies begin with the forward pass.
            self._begun, self.seconds = self.seconds + wait, self.seconds + wait + step
        super()._decode()
        number = upcoming(self.batches, self.job.law, self._now(), self._found)
        wanted = [
            (str(i), self.waiting[i].length)
            for i in self._found[:number].tolist()
            if i in self.waiting
        ]
        for part in self._room.fetch(wanted, int(step * self._tokens_per_s)):
            self._transfer(part.name, part.end - part.begin)


def simulated(trace: str, policy: str, count: int) -> Figure:
    """Steps that wait for KV, with the lengths of a trace."""
    model = MODELS[1]
    workload = requests_of(trace, count)
    law = BatchLaw(
        weight_s=model.weights / BANDWIDTH,
        read_s=model.kv / BANDWIDTH,
        row_share=0.0,
        padded=False,
        capacity=float((MEMORY - model.weights) // model.kv),
        max_rows=MAX_ROWS,
        parks=False,
    )
    lengths = np.diff(workload.requests.offsets).tolist()
    requests = [
        JobRequest(0, length, steps)
        for length, steps in zip(lengths, workload.output_len.tolist(), strict=True)
    ]
    run = _Run(BatchJob(requests, POLICIES[policy], law), model.kv)
    run.run()
    share = 100 * run.num_waits / run.clock
    note = f"{run.waited_s:.2f} of {run.seconds:.1f} s, {run.clock:,} steps"
    return Figure(
        f"simulated {model.name}, {trace}, {policy}: steps that wait",
        share, "%", ("<=", WAITING), note,
    )  # fmt: skip
