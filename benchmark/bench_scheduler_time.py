"""Time that a step spends in the scheduler's own code, stock SGLang's and ours.

    python benchmark/bench_scheduler_time.py                    100,000 wait behind ours
    python benchmark/bench_scheduler_time.py --backlog 20000

Tiny prompts on a CPU, the demo model, an engine and a process of its own for each row.
Two waves of as many requests as may run at a time: each fills the engine and then all
of it decodes. The last row of each size has all of the backlog in the scheduler's hands
before its first step, and ends after as many answers as the others have.

Counted is the time in ``get_next_batch_to_run`` and ``process_batch_result``, by step:
over all steps, and over steady ones, in which all running requests decode and nothing
is prefilled. The forward is not counted, nor is receiving requests. The last line is one
JSON document; the exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, Figure, finish, print_figures, print_table
from throughput_engine import Task, run_task
from throughput_jobs import CHUNK, NUM_IDS
from throughput_probe import Steps
from tqdm import tqdm

from sglang_batch.demo_model import write_demo_model

RUNNING = (64, 1000)
PROMPT_LEN = 8
# What a request holds, with the tokens it may still be promised.
KV_PER_REQUEST = 2
MIN_STEADY_STEPS = 20
# What ours may take more than stock SGLang in a step.
MEAN_MS, P99_MS = 0.05, 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One row: ``running`` requests at a time, ``backlog`` more waiting behind them."""

    ours: bool
    policy: str
    running: int
    backlog: int
    output_len: int

    @property
    def name(self) -> str:
        who = f"{'ours' if self.ours else 'stock'} {self.policy}"
        return f"{who}, {self.backlog:,} waiting" if self.backlog else who

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

    @classmethod
    def of(cls, steps: Steps) -> HostTime:
        host_ms = 1e3 * (steps["schedule_s"] + steps["result_s"])
        return cls(len(steps), float(host_ms.mean()), float(np.percentile(host_ms, 99)))


@dataclass(frozen=True, slots=True)
class Measured:
    """A case with its times; seconds: of the whole, feeding included."""

    case: Case
    steady: HostTime
    all_steps: HostTime
    seconds: float

    @property
    def row(self) -> list[Any]:
        return [
            f"{self.case.running:,}", self.case.name, f"{self.steady.num_steps:,}",
            f"{self.steady.mean_ms:.3f}", f"{self.steady.p99_ms:.3f}",
            f"{self.all_steps.num_steps:,}", f"{self.all_steps.mean_ms:.3f}",
            f"{self.all_steps.p99_ms:.3f}", f"{self.seconds:.1f}",
        ]  # fmt: skip


def measure(case: Case, model: Path, seed: int) -> Measured:
    """Run one case.

    Raises:
        RuntimeError: the engine failed, or hardly ever decoded with all it may run.
    """
    done = run_task(case.task(model, seed))
    steps = done.steps
    full = steps["decode_rows"] == case.running
    steady = steps[full & (steps["prefill_tokens"] == 0)]
    if len(steady) < MIN_STEADY_STEPS:
        raise RuntimeError(
            f"{case.name}: {len(steady)} of {len(steps)} steps decoded with"
            f" {case.running} rows, the most was {int(steps['decode_rows'].max())};"
            f" {MIN_STEADY_STEPS} are needed."
        )
    return Measured(case, HostTime.of(steady), HostTime.of(steps), done.seconds)


def figures_of(measured: list[Measured], running: int) -> list[Figure]:
    """Ours against stock at one size, steady and over all steps."""
    stock, *ours = [m for m in measured if m.case.running == running]
    return [
        Figure(
            f"{running} running, {m.case.name}: {kind}, {name} over stock's, ms",
            getattr(getattr(m, attribute), name) - getattr(getattr(stock, attribute), name),
            target=("<=", most) if attribute == "steady" else None,
            beside=f"stock {getattr(getattr(stock, attribute), name):.3f} ms",
        )
        for m in ours
        for kind, attribute in (("steady steps", "steady"), ("all steps", "all_steps"))
        for name, most in (("mean_ms", MEAN_MS), ("p99_ms", P99_MS))
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING)
    parser.add_argument("--backlog", type=int, default=100_000)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--policy", default="dfs", help="ours")
    parser.add_argument(
        "--quick", action="store_true", help="64 running, 500 waiting behind ours"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="NAME", help="also write results/NAME.json")
    options = parser.parse_args()
    sizes = RUNNING[:1] if options.quick else tuple(options.running)
    backlog = 500 if options.quick else options.backlog
    kinds = [(False, "fcfs", 0), (True, options.policy, backlog)]
    if not options.quick:
        kinds.insert(1, (True, options.policy, 0))
    cases = [
        Case(ours, policy, running, waiting, options.output_len)
        for running in sizes
        for ours, policy, waiting in kinds
    ]
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        measured = [
            measure(case, model, options.seed) for case in tqdm(cases, unit="engine")
        ]
    print_table(
        "Milliseconds a step in the scheduler's own code",
        [
            "running", "engine", "steady steps", "mean", "p99", "all steps", "mean",
            "p99", "seconds",
        ],
        [m.row for m in measured],
    )  # fmt: skip
    figures = [f for running in sizes for f in figures_of(measured, running)]
    print_figures("Figures", figures)
    finish(
        {
            "cases": [asdict(m) for m in measured],
            "figures": [figure.as_json for figure in figures],
        },
        RESULTS / f"{options.save}.json" if options.save else None,
    )
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
