"""Single calls from many tasks: cached share, and that of stock's policies.

Each task sends the next prompt of the job when it has its answer, as rollout frameworks
and evaluation harnesses do. Ours runs with ``gather_s``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from report import Figure, print_table
from throughput_engine import Run, run_tasks, task_of
from throughput_jobs import ThroughputJob, groups

from sglang_batch.run.demo_model import write_demo_model

SEED = 1
STOCK = ("fcfs", "lpm", "dfs-weight")
OURS = "ours"
GATHER = '--offline-batch-config={"gather_s": 0.02}'
# Of the possible share, by the number of callers.
TARGETS = {256: 0.97, 64: 0.93}


def jobs() -> list[ThroughputJob]:
    """Jobs 1 to 3 of bench_offline_throughput.py."""
    return [
        groups(1, 32, 512, 32, 8, 6144, 32, SEED),
        groups(2, 40, 512, 32, 8, 6144, 32, SEED),
        groups(3, 60, 1024, 64, 32, 25_600, 64, SEED),
    ]


def measure(quick: bool) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        for job in [groups(1, 8, 512, 32, 8, 6144, 32, SEED)] if quick else jobs():
            for callers in [16] if quick else TARGETS:
                figures.append(_share(job, callers, model))
    return figures


def _share(
    job: ThroughputJob, callers: int, model: Path, stock: Sequence[str] = STOCK
) -> Figure:
    tasks = {
        policy: replace(
            task_of(job, model, ours=False, policy=policy, mixed=False),
            callers=callers,
        )
        for policy in ("fcfs", *stock)
    }
    first = tasks["fcfs"]
    tasks[OURS] = replace(
        first, arguments=[*first.arguments, "--offline-batch", GATHER]
    )
    done = list(run_tasks([*tasks.values()]))
    if any(each.output_ids != done[0].output_ids for each in done):
        raise RuntimeError(f"{job.name}, {callers} callers: answers differ")
    runs = dict(zip(tasks, (Run.of(job, each) for each in done), strict=True))
    possible = job.tree().prefix_sharing_ratio
    print_table(
        f"{job.name}, {callers} callers, possible {possible:.1%}",
        ["engine", "seconds", "cached", "of the possible", "steps"],
        [
            [
                name, f"{run.seconds:.2f}", f"{run.cached_share:.1%}",
                f"{run.cached_share / possible:.1%}", run.num_steps,
            ]
            for name, run in runs.items()
        ],
    )  # fmt: skip
    best = max(runs[policy].cached_share for policy in stock)
    share = TARGETS.get(callers)
    return Figure(
        f"{job.name}, {callers} callers: cached, of the possible",
        runs[OURS].cached_share / possible,
        "",
        None if share is None else (">=", share),
        f"stock's best {best / possible:.1%}",
    )
