"""A job larger than memory planned bucket by bucket, then its units dealt to 1,000 engines.

The job (``large_job.py``) is on disk as one run. Two processes deal ranges of it to buckets and
then plan the buckets, each as a machine of a fleet would. The head has a sample of the prompts and
the units of all buckets. Times begin with the job on disk and end with an engine for each unit and
the order of each bucket on disk.

The optimum is exact: tokens that neighbours in the order share, in buckets and across them. For a
small job it is compared with one prefix tree of everything.

    PYTHONPATH=benchmark python -m fleet_parts.planning [--requests N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from planner_stages import A100
from report import Figure, finish, print_figures

from fleet_parts.large_job import write_job
from sglang_batch.planner.buckets.bucket_dealing import deal_prompts
from sglang_batch.planner.buckets.bucket_units import (
    BucketSummary,
    Units,
    join_units,
    plan_bucket,
)
from sglang_batch.planner.buckets.splitters import (
    Splitters,
    choose_splitters,
    sample_numbers,
)
from sglang_batch.planner.buckets.unit_dealing import UnitDeal, deal_units, even_time_s
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import PlanRequests
from sglang_batch.planner.sharding.speeds import ShardSpeeds
from sglang_batch.store.token_runs import BucketRuns, RunArrays, TokenRun

LARGE, SMALL = 50_000_000, 1_000_000
# What the head deals for a billion requests.
NUM_UNITS, NUM_ENGINES = 1_000_000, 1000
SEED = 0
NUM_PROCESSES = 2
# Requests of a bucket, of an engine and of a unit.
BUCKET, ENGINE, UNIT = 1_000_000, 50_000, 200
# Tokens of a range that are in memory at once.
MOST_TOKENS = 32_000_000
# Times as fast as an A100, in compute and in memory: A100, H100, H200, L40S.
SPEEDS = np.array([[1.0, 1.0], [3.17, 1.64], [3.17, 2.35], [1.16, 0.42]])


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and how it was made.

    seconds: by stage, in the order of the stages.
    first_order_s: seconds until the first bucket's order was on disk.
    splitters, buckets, units, deal: what the stages made.
    """

    seconds: dict[str, float]
    first_order_s: float
    splitters: Splitters
    buckets: list[BucketSummary]
    units: Units
    deal: UnitDeal


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. Targets of time and memory are of 50 million requests."""
    with tempfile.TemporaryDirectory() as folder:
        return measured(SMALL if quick else LARGE, Path(folder))


def measured(num_requests: int, folder: Path) -> list[Figure]:
    """Plan a small job, compare it with one tree, and plan one of so many requests."""
    with processes() as pool:
        # This also compiles everything.
        figures = check_small(pool, folder)
        job = folder / "job"
        run_alone(write_job, job, num_requests, SEED)
        print(f"{num_requests:,} requests on disk", file=sys.stderr)
        planned = plan(pool, job, folder / "buckets")
        peak = sum(peak_bytes(pid) for pid in [os.getpid(), *pids()])
    return [*figures, *figures_of(planned, num_requests, peak)]


def check_small(pool: ProcessPoolExecutor, folder: Path) -> list[Figure]:
    """The plan of a small job against the tree of all its prompts."""
    job, buckets = folder / "small", folder / "small_buckets"
    run_alone(write_job, job, SMALL, SEED)
    found = plan(pool, job, buckets, SMALL // 50)
    unique, differ = run_alone(differences, job, buckets, len(found.buckets))
    return [
        Figure(
            f"{SMALL:,} requests: unique tokens off those of one tree",
            abs(found.units.num_unique_tokens - unique),
            "",
            ("=", 0),
            f"{unique:,}; {len(found.buckets)} buckets",
        ),
        Figure("  requests in another place than in the tree", differ, "", ("=", 0)),
    ]


def differences(job: Path, buckets: Path, num_buckets: int) -> tuple[int, int]:
    """Unique tokens of a job's tree, and requests that are elsewhere in the buckets."""
    run = TokenRun(job)
    arrays = run.read(0, len(run))
    tree = build_prefix_tree(arrays.tokens, arrays.offsets)
    runs = BucketRuns(buckets)
    order = np.concatenate([runs.order(bucket) for bucket in range(num_buckets)])
    return tree.num_unique_tokens, int((order != tree.order).sum())


def figures_of(planned: Planned, num_requests: int, peak: int) -> list[Figure]:
    full = num_requests == LARGE
    units, deal = planned.units, planned.deal
    num_tokens = int(units.prompt_tokens.sum())
    shared = num_tokens - units.num_unique_tokens
    largest = max(int(each.units.num_requests.sum()) for each in planned.buckets)
    there = deal.seconds[deal.seconds > 0]
    total = sum(planned.seconds.values())
    cut = int(planned.splitters.common.sum(dtype=np.int64))
    return [
        *(Figure(f"  {name}", value, "s") for name, value in planned.seconds.items()),
        Figure(
            f"{num_requests:,} requests from disk to dealt units",
            total,
            "s",
            ("<=", 600) if full else None,
            f"{num_tokens / 1e9:.2f}G tokens, {len(planned.buckets)} buckets,"
            f" {len(units.first):,} units",
        ),
        Figure("  first bucket's order on disk", planned.first_order_s, "s"),
        Figure(
            "peak resident memory of all processes",
            peak / 1e9,
            "GB",
            ("<=", 24) if full else None,
            "the sum of each process's own peak",
        ),
        Figure(
            "largest bucket over its share",
            largest / (num_requests / max(num_requests // BUCKET, 1)),
            "",
        ),
        Figure("prompt tokens shared at the optimum", shared / num_tokens, ""),
        Figure(
            "shared tokens lost on the engines, of the optimum",
            deal.lost_tokens / shared,
            "",
            ("<=", 0.001) if full else None,
            f"{deal.lost_tokens:,} tokens; splitters cut at most {cut:,}",
        ),
        Figure(
            f"{len(deal.seconds):,} engines: slowest over mean",
            float(there.max() / there.mean()),
            "",
            ("<=", 1.02),
        ),
        Figure(
            "  slowest over an even mix",
            float(there.max() / even_time_s(units, A100, speeds_of(len(deal.seconds)))),
            "",
            note="each engine with the job's mix of work, divided anywhere",
        ),
        *million_units(units),
    ]


def million_units(units: Units) -> list[Figure]:
    """What the head does for a billion requests: the same units, over and over."""
    repeats = -(-NUM_UNITS // len(units.first))
    many = Units._make(np.tile(values, repeats)[:NUM_UNITS] for values in units)
    begin = time.perf_counter()
    deal = deal_units(many, A100, speeds_of(NUM_ENGINES))
    seconds = time.perf_counter() - begin
    name = f"{NUM_UNITS:,} units to {NUM_ENGINES:,} engines"
    return [
        Figure(name, seconds, "s", ("<=", 10)),
        Figure(
            "  slowest over mean",
            float(deal.seconds.max() / deal.seconds.mean()),
            "",
            ("<=", 1.02),
        ),
    ]


# --- The plan, as a fleet makes it.


def plan(
    pool: ProcessPoolExecutor, job: Path, buckets: Path, bucket_size: int = BUCKET
) -> Planned:
    """Plan a job on disk. The orders are in ``buckets``."""
    clock = Stages()
    run = TokenRun(job)
    num_requests = len(run)
    num_buckets = max(num_requests // bucket_size, 1)
    sample = run.prompts(sample_numbers(num_requests, num_buckets, SEED))
    splitters = choose_splitters(*sample, num_requests, num_buckets)
    del sample
    clock.done("sample and splitters")
    ends = np.linspace(0, num_requests, 4 * NUM_PROCESSES + 1).astype(np.int64).tolist()
    for done in as_completed(
        pool.submit(deal_range, job, buckets, begin, end, splitters)
        for begin, end in pairwise(ends)
    ):
        done.result()
    BucketRuns(buckets).check(num_requests)
    clock.done("deal prompts to buckets")
    tasks: list[Future[BucketSummary]] = [
        pool.submit(order_bucket, buckets, bucket)
        for bucket in range(splitters.num_buckets)
    ]
    next(as_completed(tasks)).result()
    first_order_s = clock.total
    summaries = [task.result() for task in tasks]
    clock.done("order buckets and cut units")
    units = join_units(summaries)
    num_engines = max(num_requests // ENGINE, 1)
    deal = deal_units(units, A100, speeds_of(num_engines))
    clock.done("deal units to engines")
    return Planned(clock.seconds, first_order_s, splitters, summaries, units, deal)


def deal_range(
    job: Path, buckets: Path, begin: int, end: int, splitters: Splitters
) -> None:
    """Deal the requests ``begin`` to ``end`` to buckets, a few million tokens at a time."""
    run, runs = TokenRun(job), BucketRuns(buckets)
    for first, last in run.ranges(begin, end, MOST_TOKENS):
        requests = PlanRequests(*run.read(first, last))
        dealt = deal_prompts(requests, first, splitters)
        runs.save(first, arrays_of(dealt.requests), dealt.numbers, dealt.begin)


def order_bucket(buckets: Path, bucket: int) -> BucketSummary:
    """Plan a bucket, and write its order."""
    runs = BucketRuns(buckets)
    arrays, numbers = runs.read(bucket)
    planned = plan_bucket(PlanRequests(*arrays), numbers, bucket, A100, UNIT)
    runs.save_order(bucket, planned.order)
    return planned.summary


def arrays_of(requests: PlanRequests) -> RunArrays:
    return RunArrays(
        requests.tokens,
        requests.offsets,
        requests.max_new_tokens,
        requests.known_output_len,
    )


def speeds_of(num_engines: int) -> ShardSpeeds:
    """Of engines of all kinds."""
    device = np.random.default_rng(SEED).integers(len(SPEEDS), size=num_engines)
    return ShardSpeeds(SPEEDS[device, 0], SPEEDS[device, 1])


# --- Processes, time and memory.


class Stages:
    """Seconds of stages that follow each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = self._last = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since the first stage began."""
        return time.perf_counter() - self._begin

    def done(self, name: str) -> None:
        """The stage ends, and the next begins."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
        print(f"{name}: {self.seconds[name]:.1f} s", file=sys.stderr)


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, context) as pool:
        yield pool


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a process that ends, so that its memory is not counted."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def pids() -> list[int]:
    return [each.pid for each in multiprocessing.active_children() if each.pid]


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(x for x in status.splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--requests", type=int, default=LARGE, metavar="N", help=f"default: {LARGE:,}"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="for data (default: a temporary one)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measured(options.requests, Path(folder))
    print_figures("planning", figures)
    missed = [figure.name for figure in figures if figure.met is False]
    finish({"figures": [each.as_json for each in figures], "missed": missed})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
