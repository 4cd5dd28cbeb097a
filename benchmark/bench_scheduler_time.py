"""Time of a step in the scheduler's own code, for stock SGLang and for this package.

    python benchmark/bench_scheduler_time.py                    with a backlog of 100,000
    python benchmark/bench_scheduler_time.py --backlog 20000

Tiny prompts of the demo model run on a CPU, with an engine and a process for each row.
There are two waves of as many requests as may run at a time. Each wave fills the engine,
and then all of it decodes. In the last row of each size, the scheduler has the whole
backlog before its first step, and the run ends after the same number of answers.

The time is the scheduler thread's processor time in ``get_next_batch_to_run`` and
``process_batch_result``, by step: over all steps, and over steady ones, in which all
running requests decode and no prefill's result is processed. The forward pass and the
receiving of requests do not count. It is processor time because an engine's three
processes share two cores. ``added`` is the part of this package's code. It is measured in
every other step, and these steps do not count for the other times.

The engines of one size alternate, two seconds each, so that all of them meet the same
speed of the machine. The first step after a switch does not count, because the caches are
full of another engine's memory. There are ``--repeats`` rounds, each begun by another
engine, and the steps of all rounds count. ``--again`` runs stock SGLang twice, to show
the difference between two equal engines.

The last line is one JSON document. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import Figure, add_save, finish, print_figures, print_table
from throughput_engine import Task, run_in_slices
from throughput_jobs import CHUNK, NUM_IDS
from throughput_probe import Steps
from tqdm import tqdm

from sglang_batch.run.demo_model import write_demo_model

RUNNING = (64, 1000)
PROMPT_LEN = 8
# KV tokens per request, with those that it may still be promised.
KV_PER_REQUEST = 2
MIN_STEADY_STEPS = 20
# The most that this package may add to a step of stock SGLang.
MEAN_MS, P99_MS = 0.05, 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One row: ``running`` requests at a time, ``backlog`` more waiting behind them."""

    ours: bool
    policy: str
    running: int
    backlog: int
    output_len: int
    again: bool = False

    @property
    def name(self) -> str:
        label = f"{'ours' if self.ours else 'stock'} {self.policy}"
        if self.again:
            label += ", again"
        return f"{label}, {self.backlog:,} waiting" if self.backlog else label

    def task(self, model: Path, seed: int) -> Task:
        """Two waves, and the backlog."""
        num_answers = 2 * self.running
        num_requests = num_answers + self.backlog
        rng = np.random.default_rng(seed)
        prompts = rng.integers(0, NUM_IDS, (num_requests, PROMPT_LEN)).tolist()
        params = {
            "max_new_tokens": self.output_len,
            "temperature": 0,
            "ignore_eos": True,
        }
        kv_tokens = KV_PER_REQUEST * self.running * (PROMPT_LEN + self.output_len)
        return Task(
            ours=self.ours,
            policy=self.policy,
            arguments=[
                f"--model-path={model}",
                "--sleep-on-idle",
                "--dtype=float32",
                "--mem-fraction-static=0.3",
                f"--max-total-tokens={kv_tokens}",
                f"--max-running-requests={self.running}",
                f"--chunked-prefill-size={CHUNK}",
            ],
            prompts=prompts,
            sampling_params=[params] * num_requests,
            max_inflight=num_requests,
            stop_after=num_answers if self.backlog else None,
        )


@dataclass(frozen=True, slots=True)
class HostTime:
    """Milliseconds in the scheduler's code, of a kind of steps."""

    num_steps: int
    mean_ms: float
    p99_ms: float
    added_mean_ms: float
    added_p99_ms: float

    @classmethod
    def of(cls, steps: Steps) -> HostTime:
        steps = steps[steps["resumed"] == 0]
        looked_at = np.isfinite(steps["added_s"])
        added_ms = 1e3 * steps["added_s"][looked_at]
        host_ms = 1e3 * steps["host_cpu_s"][~looked_at]
        if not len(added_ms):  # stock SGLang
            added_ms = np.zeros(1)
        return cls(
            len(steps), float(host_ms.mean()), float(np.percentile(host_ms, 99)),
            float(added_ms.mean()), float(np.percentile(added_ms, 99)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """A case with its times."""

    case: Case
    steady: HostTime
    all_steps: HostTime
    engine_means_ms: list[float]  # of steady steps, one of each repeat

    def over(self, stock: Measured) -> str:
        """Stock's mean, and the standard error of the engines' difference from it."""
        more = np.subtract(self.engine_means_ms, stock.engine_means_ms)
        text = f"stock {stock.steady.mean_ms:.3f}"
        if len(more) > 1:
            error = more.std(ddof=1) / len(more) ** 0.5
            text += f"; {len(more)} engines each, standard error {error:.3f}"
        return text

    @property
    def row(self) -> list[Any]:
        times = [
            cell
            for kind in (self.steady, self.all_steps)
            for cell in (
                f"{kind.num_steps:,}", f"{kind.mean_ms:.3f}", f"{kind.p99_ms:.3f}",
                f"{kind.added_mean_ms:.3f}", f"{kind.added_p99_ms:.3f}",
            )
        ]  # fmt: skip
        return [f"{self.case.running:,}", self.case.name, *times]


def measure(cases: list[Case], seed: int, repeats: int) -> list[Measured]:
    """Run the cases of each size in alternation, and print a table of all.

    Raises:
        RuntimeError: an engine failed, or hardly ever decoded with all requests.
    """
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        for running in dict.fromkeys(case.running for case in cases):
            same = [case for case in cases if case.running == running]
            measured += _measure_size(same, model, seed, repeats)
    print_table(
        "Milliseconds a step in the scheduler's own code",
        [
            "running", "engine",
            *("steady steps", "mean", "p99", "added, mean", "p99"),
            *("all steps", "mean", "p99", "added, mean", "p99"),
        ],
        [m.row for m in measured],
    )  # fmt: skip
    return measured


def _measure_size(
    cases: list[Case], model: Path, seed: int, repeats: int
) -> Iterator[Measured]:
    """Run cases of one size in alternation, ``repeats`` times.

    Raises:
        RuntimeError: an engine failed, or hardly ever decoded with all requests.
    """
    taken: dict[Case, list[Steps]] = {case: [] for case in cases}
    tasks = [case.task(model, seed) for case in cases]
    queue = deque(zip(cases, tasks, strict=True))
    for _ in tqdm(range(repeats), f"{cases[0].running} running", unit="repeat"):
        results = run_in_slices([task for _, task in queue])
        for (case, _), done in zip(queue, results, strict=True):
            taken[case].append(done.steps)
        queue.rotate(-1)  # engines that start earlier differ
    for case in cases:
        steps = np.concatenate(taken[case])
        steady = np.concatenate([_steady(each, case.running) for each in taken[case]])
        if len(steady) < MIN_STEADY_STEPS:
            raise RuntimeError(
                f"{case.name}: {len(steady)} of {len(steps)} steps decoded with"
                f" {case.running} rows; {MIN_STEADY_STEPS} are needed."
            )
        means = [
            HostTime.of(_steady(each, case.running)).mean_ms for each in taken[case]
        ]
        yield Measured(case, HostTime.of(steady), HostTime.of(steps), means)


def _steady(steps: Steps, running: int) -> Steps:
    """Steps that decode all running requests, and process the results of such steps.

    A step's result is processed up to two steps later.
    """
    full = (steps["decode_rows"] == running) & (steps["prefill_tokens"] == 0)
    full[1:] &= full[:-1].copy()
    full[1:] &= full[:-1].copy()
    steady: Steps = steps[full]
    return steady


def figures_of(measured: list[Measured], running: int) -> list[Figure]:
    """This package against stock at one size, and the time of its code in a step."""
    stock, *others = [m for m in measured if m.case.running == running]
    figures = []
    for m in others:
        name = f"{running} running, {m.case.name}, steady steps"
        if m.case.again:
            mean_ms = m.steady.mean_ms - stock.steady.mean_ms
            p99_ms = m.steady.p99_ms - stock.steady.p99_ms
            figures += [
                Figure(
                    f"{name}: mean over stock's", mean_ms, "ms", None, m.over(stock)
                ),
                Figure(f"{name}: p99 over stock's", p99_ms, "ms"),
            ]
            continue
        figures += [
            Figure(
                f"{name}: mean over stock's", m.steady.mean_ms - stock.steady.mean_ms,
                "ms", ("<=", MEAN_MS), m.over(stock),
            ),
            Figure(
                f"{name}: p99 over stock's", m.steady.p99_ms - stock.steady.p99_ms,
                "ms", ("<=", P99_MS), f"stock {stock.steady.p99_ms:.3f}",
            ),
            Figure(
                f"{name}: in our code, mean", m.steady.added_mean_ms, "ms",
                ("<=", 0.08), "BlendServe's tree operations 0.08",
            ),
            Figure(
                f"{name}: in our code, p99", m.steady.added_p99_ms, "ms",
                ("<=", 0.23), "BlendServe's tree operations 0.23",
            ),
        ]  # fmt: skip
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--running", type=int, nargs="+", default=RUNNING,
        help="numbers of requests that run at a time (default: 64 1000)",
    )  # fmt: skip
    parser.add_argument(
        "--backlog", type=int, default=100_000,
        help="requests that wait in the last row of each size (default: 100,000)",
    )  # fmt: skip
    parser.add_argument(
        "--output-len", type=int, default=96, help="tokens per answer (default: 96)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--policy", default="dfs", help="this package's policy (default: dfs)"
    )
    parser.add_argument(
        "--again", action="store_true", help="also run stock SGLang a second time"
    )
    parser.add_argument(
        "--quick", action="store_true",
        help="64 running requests and a backlog of 500, one round",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_save(parser)
    options = parser.parse_args()
    sizes = RUNNING[:1] if options.quick else tuple(options.running)
    repeats = 1 if options.quick else options.repeats
    kinds = [(False, "fcfs", 0)]
    if not options.quick:
        kinds.append((True, options.policy, 0))
    kinds.append((True, options.policy, 500 if options.quick else options.backlog))
    cases = [
        Case(ours, policy, running, waiting, options.output_len)
        for running in sizes
        for ours, policy, waiting in kinds
    ]
    if options.again:
        cases += [
            Case(False, "fcfs", running, 0, options.output_len, again=True)
            for running in sizes
        ]
    measured = measure(cases, options.seed, repeats)
    figures = [f for running in sizes for f in figures_of(measured, running)]
    print_figures("Figures", figures)
    finish(
        {
            "cases": [asdict(m) for m in measured],
            "figures": [figure.as_json for figure in figures],
        },
        options.save,
    )
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
