"""One plan in a fresh process: seconds of each stage and the memory it takes.

``bench_planner.py`` starts this once per job size and reads the line of JSON it prints.

    python benchmark/planner_stages.py (blend|groups) NUM_REQUESTS [--repeats N] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.ordering import dual_scan_order, order_functions
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.ordering.order_functions import make_order
from sglang_batch.planner.output_lengths.estimates import OutputEstimates
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import Floats, PlanRequests
from sglang_batch.prediction.synthetic_jobs import TRACES
from sglang_batch.prediction.workloads.mix import blend, shared_prefix_groups

# Llama-3.1-8B on an A100: 2 * 8e9 flop a token at 312 Tflop/s, 128 KiB of KV a token
# at 2.039 TB/s. The papers' worked examples hold with exactly these.
A100 = CostModel(token_time_s=16e9 / 312e12, kv_read_time_s=131_072 / 2.039e12)

# The functions that make a dual-scan order, by the module that calls them, and the
# stage that each belongs to.
STAGES = {
    (order_functions, "leaf_work"): "densities",
    (dual_scan_order, "root_density"): "densities",
    (dual_scan_order, "leaf_compute"): "densities",
    (dual_scan_order, "smooth_density"): "densities",
    (dual_scan_order, "split_in_two"): "split",
    (dual_scan_order, "_sorted_side"): "sort",
}
WARM_UP_REQUESTS = {"blend": 20_000, "groups": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["blend", "groups"], help="kind of job")
    parser.add_argument("num_requests", type=int, help="requests of the job")
    parser.add_argument("--repeats", type=int, default=1, help="default: 1")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args()

    seconds: dict[str, float] = {}
    time_stages(seconds)
    plan(*make_job(options.kind, WARM_UP_REQUESTS[options.kind], 0), seconds)
    base = memory("VmRSS")
    requests, est_output_len = make_job(
        options.kind, options.num_requests, options.seed
    )
    best, peak = {"total": float("inf")}, 0
    for _ in range(options.repeats):
        seconds.clear()
        plan(requests, est_output_len, seconds)
        peak = peak or memory("VmHWM")
        best = min(best, dict(seconds), key=lambda each: each["total"])
    result = {
        "num_requests": len(requests),
        "num_tokens": len(requests.tokens),
        "repeats": options.repeats,
        "seconds": best,
        "base_bytes": base,
        "peak_bytes": peak,
    }
    print(json.dumps(result))


def make_job(kind: str, num_requests: int, seed: int) -> tuple[PlanRequests, Floats]:
    """Prompts, and the expected output lengths that the order is made from."""
    if kind == "blend":
        times = (A100.token_time_s, A100.kv_read_time_s)
        job = blend(*TRACES[1], num_requests, seed, *times)
        return job.requests, job.output_len.astype(np.float64)
    job = shared_prefix_groups(num_requests, 100, 32, 10, 100, seed)
    # Equal lengths would leave nothing to sort and nothing to split.
    rng = np.random.default_rng(seed)
    return job.requests, rng.lognormal(4.0, 1.2, num_requests)


def plan(
    requests: PlanRequests, est_output_len: Floats, seconds: dict[str, float]
) -> None:
    """Tree and dual-scan order. ``seconds`` gets the stages and their total."""
    start = time.perf_counter()
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    built = time.perf_counter()
    order = make_order(
        "dual-scan",
        tree,
        requests,
        A100,
        OutputEstimates(est_output_len, est_output_len**2),
        OrderSettings(),
    )
    end = time.perf_counter()
    assert len(order.requests) == len(requests)
    known = sum(seconds.values())
    seconds["tree"] = built - start
    seconds["rest of the order"] = end - built - known
    seconds["total"] = end - start


def time_stages(seconds: dict[str, float]) -> None:
    """From now on, the functions of ``STAGES`` add their time to ``seconds``."""

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
            return result

        return call

    for (module, name), stage in STAGES.items():
        setattr(module, name, timed(stage, getattr(module, name)))


def memory(field: str) -> int:
    """Resident bytes of this process: ``VmRSS`` now, ``VmHWM`` at most so far.

    Not getrusage's ru_maxrss: that of a new process starts from its parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field} line.")


if __name__ == "__main__":
    main()
