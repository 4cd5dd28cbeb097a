"""Time, memory and correctness of the planner, without an engine or an accelerator.

Prints every figure with its target, and all of them as JSON on the last line. Times are
taken after warm-up calls that compile everything. The papers' times are from other
machines.

    python benchmark/bench_planner.py [--quick] [--save] [--seed N]

The exit status is 1 if a target is missed. With ``--quick`` the jobs are small, and only
the targets of correctness count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, Figure, finish, print_figures, print_table
from traces_simulated import TraceFigures, simulate_trace
from worked_examples import saved_tokens, tree_of, worked_examples

from sglang_batch.planner.prefixes.prefix_groups import prefix_groups
from sglang_batch.prediction.synthetic_jobs import TRACES
from sglang_batch.prediction.workloads.mix import industry

Figures = list[Figure]
GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use small jobs")
    parser.add_argument(
        "--save", action="store_true", help="write the JSON to results/"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of all workloads (default: 0)"
    )
    options = parser.parse_args()
    if options.quick and options.save:
        parser.error("--save needs the full sizes: leave out --quick.")

    exact: dict[str, Callable[[], Figures]] = {
        "Worked examples of the papers": worked_examples,
    }
    fast: dict[str, Callable[[], Figures]] = {
        "Plan of BlendServe's trace 1": lambda: trace_plan(options),
        "Plans of growing size": lambda: growing_plans(options),
        "Prefix groups of BatchLLM's industry shape": lambda: industry_groups(options),
    }
    if options.quick:
        print("Small jobs: targets of time, growth and makespan are of the full sizes.")
    results: dict[str, Figures] = {}
    for title, measure in {**exact, **fast}.items():
        results[title] = measure()
        print_figures(title, results[title])
    sharing, split, simulator = simulated_traces(options)
    results |= {"Prefix sharing": sharing, "Data-parallel split": split}
    results["Simulator"] = simulator

    counted = [*exact, "Prefix sharing"] if options.quick else list(results)
    missed = [f.name for title in counted for f in results[title] if f.met is False]
    document = {
        "quick": options.quick,
        "seed": options.seed,
        "missed": missed,
        "figures": {t: [f.as_json for f in each] for t, each in results.items()},
    }
    print(f"\ntargets missed: {', '.join(missed) or 'none'}")
    finish(document, RESULTS / "planner.json" if options.save else None)
    return 1 if missed else 0


# --- Time and memory of a plan.


def trace_plan(options: argparse.Namespace) -> Figures:
    num_requests = 10_000 if options.quick else 400_000
    run = stages("blend", num_requests, 2 if options.quick else 5, options.seed)
    grown = run["peak_bytes"] - run["base_bytes"]
    token_bytes = 4 * run["num_tokens"]
    size = f"{run['num_requests']:,} requests, {run['num_tokens'] / 1e6:.0f}M tokens"
    seconds = run["seconds"]
    total = seconds.pop("total")
    return [
        *(Figure(f"  {stage}", value, "s") for stage, value in seconds.items()),
        Figure(
            "tree and dual-scan order", total, "s", ("<=", 2.0), f"{size}; best of 5"
        ),
        Figure(
            "memory growth over tokens' bytes",
            grown / token_bytes,
            "x",
            ("<=", 3.0),
            f"{grown / GIB:.2f} GiB more than the {run['base_bytes'] / GIB:.2f} GiB"
            f" before there were tokens ({token_bytes / GIB:.2f} GiB of them)",
        ),
    ]


def growing_plans(options: argparse.Namespace) -> Figures:
    """Groups of 10 that share 100 of 132 tokens, as in many small documents."""
    repeats = {50_000: 9, 500_000: 5, 5_000_000: 2}
    if options.quick:
        repeats = {5_000: 3, 20_000: 2}
    runs = {n: stages("groups", n, r, options.seed) for n, r in repeats.items()}
    figures = []
    for n, run in runs.items():
        seconds = run["seconds"]
        figures.append(
            Figure(
                f"{n:,} requests, {run['num_tokens'] / 1e6:.0f}M tokens",
                seconds["total"],
                "s",
                ("<=", 30.0) if n == 5_000_000 else None,
                f"best of {run['repeats']}: tree {seconds['tree']:.2g}, split"
                f" {seconds['split']:.2g}, sort {seconds['sort']:.2g} s;"
                f" {(run['peak_bytes'] - run['base_bytes']) / GIB:.2f} GiB",
            )
        )
    small, large = min(runs), max(runs)
    per_request = {n: run["seconds"]["total"] / n for n, run in runs.items()}
    growth = per_request[large] / per_request[small]
    sort_growth = argsort_growth(small, large)
    return [
        *figures,
        Figure(
            "growth of time per request",
            growth,
            "x",
            note=f"from {small:,} requests to {large:,}",
        ),
        Figure("growth of numpy.argsort of as many random numbers", sort_growth, "x"),
        # How much slower larger arrays are depends on the machine's caches and memory.
        Figure(
            "growth over that of numpy.argsort", growth / sort_growth, "", ("<=", 1.0)
        ),
    ]


def argsort_growth(small: int, large: int) -> float:
    """The same growth for one sort in numpy: the cost of larger arrays alone.

    Caches hold the small job and not the large one.
    """
    per_number = []
    for n in (small, large):
        numbers = np.random.default_rng(0).random(n)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            np.argsort(numbers)
            seconds.append(time.perf_counter() - start)
        per_number.append(min(seconds) / n)
    return per_number[1] / per_number[0]


def stages(kind: str, num_requests: int, repeats: int, seed: int) -> dict[str, Any]:
    """One run of ``planner_stages.py``."""
    script = Path(__file__).with_name("planner_stages.py")
    command = [sys.executable, str(script), kind, str(num_requests)]
    command += ["--repeats", str(repeats), "--seed", str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def industry_groups(options: argparse.Namespace) -> Figures:
    job = industry(seed=options.seed)
    seconds = []
    for _ in range(2 if options.quick else 10):
        start = time.perf_counter()
        tree = tree_of(job)
        groups = prefix_groups(tree)
        seconds.append(time.perf_counter() - start)
    num_tokens = tree.num_tokens / 1e6
    return [
        Figure(
            "prompts to groups, tree included",
            # The first call compiles.
            min(seconds[1:]),
            "s",
            ("<=", 0.1),
            f"{len(job):,} requests, {num_tokens:.1f}M tokens; best of 9; paper 1.51 s",
        ),
        Figure(
            "tokens saved",
            100 * saved_tokens(groups) / tree.num_tokens,
            "%",
            note="paper 58.1",
        ),
    ]


# --- Makespans of the plans.


def simulated_traces(options: argparse.Namespace) -> tuple[Figures, Figures, Figures]:
    """Sharing, data-parallel split and simulator speed on BlendServe's traces."""
    num_requests = 10_000 if options.quick else 400_000
    traces = [1, 4] if options.quick else list(TRACES)
    found = {t: simulate_trace(t, num_requests, options.seed) for t in traces}
    sharing = [
        Figure(
            f"trace {t}: sharing achieved over optimal",
            each.sharing_kept,
            "",
            (">=", 0.995),
            f"{each.seconds:.0f} s; the lower bound is {each.of_bound:.2%} of it",
        )
        for t, each in found.items()
    ]
    print_figures("Prefix sharing, dual-scan in the simulator, 1 % sample", sharing)
    split = [figure for t, each in found.items() for figure in split_figures(t, each)]
    print_figures("Data-parallel split (targets for 4 shards)", split)
    print_shards(found)
    simulator = [
        Figure(
            f"trace {t}: {num_requests:,} requests, {each.num_steps:,} steps",
            each.simulator_s,
            "s",
            ("<=", 1.0),
            "best of 3",
        )
        for t, each in found.items()
    ]
    print_figures("Simulator", simulator)
    return sharing, split, simulator


def split_figures(trace: int, found: TraceFigures) -> Figures:
    figures = []
    for split in found.splits:
        k = split.num_shards
        name, counts = f"trace {trace}, {k} shards: ", k == 4
        # The paper's speed-ups, lowest and highest.
        note = {2: "paper 1.85 to 1.93", 4: "paper 3.78 to 3.88"}.get(k, "")
        spread, lost = 100 * split.makespan_spread, 100 * split.sharing_lost
        figures += [
            Figure(
                f"{name}makespan spread", spread, "%", ("<=", 2.0) if counts else None
            ),
            Figure(f"{name}sharing lost", lost, "%", ("<=", 0.5) if counts else None),
            Figure(f"{name}speed-up", split.speed_up, "x", note=note),
        ]
    return figures


def print_shards(found: dict[int, TraceFigures]) -> None:
    """Print the makespans of 4 shards with their lower bounds."""
    rows: list[Sequence[object]] = [
        [
            trace,
            *(
                f"{s:.0f}/{b:.0f}"
                for s, b in zip(split.seconds, split.bounds, strict=True)
            ),
        ]
        for trace, each in found.items()
        for split in each.splits
        if split.num_shards == 4
    ]
    print_table(
        "Seconds of each of 4 shards / its lower bound",
        ["trace", *map(str, range(4))],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
