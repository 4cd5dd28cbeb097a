"""The scheduler's own processor time in a step that decodes, over stock SGLang's.

As bench_scheduler_time.py measures it, with 100,000 requests waiting behind those that
run.
"""

from __future__ import annotations

from bench_scheduler_time import RUNNING, Case
from bench_scheduler_time import measure as measure_cases
from report import Figure

BACKLOG, OUTPUT_LEN, REPEATS = 100_000, 96, 1


def measure(quick: bool) -> list[Figure]:
    sizes = RUNNING[:1] if quick else RUNNING
    backlog, repeats = (500, 1) if quick else (BACKLOG, REPEATS)
    cases = [
        case
        for running in sizes
        for case in (
            Case(False, "fcfs", running, 0, OUTPUT_LEN),
            Case(True, "dfs", running, backlog, OUTPUT_LEN),
        )
    ]
    measured = measure_cases(cases, 0, repeats)
    return [
        Figure(
            f"{ours.case.running} running, {ours.case.backlog:,} waiting: mean over stock's",
            ours.steady.mean_ms - stock.steady.mean_ms,
            "ms",
            None if quick else ("<=", 0.0),
            ours.over(stock),
        )
        for stock, ours in zip(measured[::2], measured[1::2], strict=True)
    ]
