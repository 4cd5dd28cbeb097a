"""Simulated SGLang: whether it pays to park the old batch when ``length-tree`` switches.

1,500 requests of each trace with paged KV, their prompts computed before. Rows are parked from
``PARKS_FROM`` on, and only where moves of KV are hidden by steps. Compared are the same
engine without parking, and the gain that is left if all moves over PCIe 5 take time of their own.
"""

from __future__ import annotations

from report import Figure, print_table

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.kv_lengths.length_groups import PARKS_FROM
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.plan import Candidates
from sglang_batch.planner.simulator.simulator import Simulation
from sglang_batch.prediction.workloads.mix import Workload

from .traces import BANDWIDTH, COUNT, MEMORY, MODELS, PCIE, SOURCES, Model, requests_of

SHARES = (0.0, PARKS_FROM, 33.0)
MIXED = 8.6  # per cent of the steps, as in section 4.4 of the paper


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has no targets."""
    count = 300 if quick else COUNT
    table, gains, mixed, parked = [], [], [], 0
    for model in MODELS[:1] if quick else MODELS:
        for trace in SOURCES:
            workload = requests_of(trace, count)
            for share in SHARES:
                stays_job = _job(model, workload, share, prefetches=False)
                first = stays_job.run("fcfs").seconds
                stays = stays_job.run("length-tree")
                parks = _parks(model, workload, share)
                mean = parks.prompt_tokens / count
                alone = parks.seconds + 2 * parks.parked * mean * model.kv / PCIE
                seconds = (stays.seconds, parks.seconds, alone)
                other = stays_job.run("length-aligned").seconds
                row = [model.name, trace, f"{share:g}"]
                row += [f"{first / each:.2f}" for each in (other, *seconds)]
                steps = (stays.num_steps, parks.num_steps, parks.parked)
                table.append([*row, *map(str, steps)])
                if share < PARKS_FROM:
                    parked += parks.parked
                    continue
                gains.append(stays.seconds / parks.seconds)
                mixed.append(100 * parks.mixed_steps / parks.num_steps)
    print_table(
        "length-tree over fcfs on SGLang, without parking, with it, and if KV moved alone",
        [
            "model",
            "trace",
            "w",
            "length-aligned",
            "stays",
            "parks",
            "alone",
            "steps",
            "steps",
            "parked",
        ],
        table,
    )
    figures = [
        Figure("parked over not parked, the least", min(gains), "x", (">=", 1.0)),
        Figure("mixed steps, the most", max(mixed), "%", ("<=", MIXED)),
        Figure(f"rows parked below w = {PARKS_FROM:g}", parked, "", ("=", 0)),
    ]
    if quick:
        return [Figure(each.name, each.value, each.unit, None) for each in figures]
    return figures


def _job(
    model: Model, workload: Workload, share: float, *, prefetches: bool
) -> Candidates:
    cost = CostModel(
        token_time_s=0.0,
        kv_read_time_s=model.kv / BANDWIDTH,
        weight_read_time_s=model.weights / BANDWIDTH,
        interference_exponent=1.0,
        row_share=share,
    )
    limits = EngineLimits(
        int((MEMORY - model.weights) / model.kv),
        step_tokens=1 << 30,
        as_sglang=True,
        prefetches=prefetches,
    )
    return Candidates(
        workload.requests,
        Machine(cost, limits),
        OrderSettings(),
        true_output_len=workload.output_len,
    )


def _parks(model: Model, workload: Workload, share: float) -> Simulation:
    return _job(model, workload, share, prefetches=True).run("length-tree")
