"""Simulated: batches of similar length against one ascending sort, by the law of a step.

1,500 requests of each trace, their prompts computed before, on an H100 with Llama-2-7B and
Llama-3-8B. Output lengths are known. Moves of KV to the host and back take no time here: on an
accelerator they run beside the steps. What they would take over PCIe 5 if they did not is
the last column.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Figure, print_table

from sglang_batch.config import ORDERS
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.ordering.order import Order, OrderSettings
from sglang_batch.planner.plan import Candidates, best, orders_for
from sglang_batch.planner.requests import UNKNOWN, PlanRequests, sums_before
from sglang_batch.planner.simulator.simulator import Simulation, simulate
from sglang_batch.prediction.workloads.mix import Workload
from sglang_batch.prediction.workloads.sources import (
    ARXIV,
    AZURE_CONV,
    SHAREGPT,
    Source,
    lognormal_lengths,
)
from sglang_batch.prediction.workloads.traces import read_trace

BANDWIDTH, PCIE = 3.35e12, 50e9  # bytes a second: H100's memory, PCIe 5
MEMORY = 0.9 * 80 * 2**30
# LongBench has no open file of lengths: prompts of 7,000 tokens in the mean, short answers.
LONGBENCH = Source("LongBench", 7000, 0.6, 120, 40_000, sharing=0.0)
SOURCES = {
    "Azure": AZURE_CONV,
    "ShareGPT": SHAREGPT,
    "arXiv": ARXIV,
    "LongBench": LONGBENCH,
}
FILES = {
    "Azure": "azure_llm_2023_conv.csv",
    "ShareGPT": "sharegpt_lengths.csv",
    "arXiv": "arxiv_summarization_lengths.csv",
}
# Steps in which rows of two batches run: section 4.4 of the paper.
MIXED = {"ShareGPT": 8.6, "LongBench": 12.4}
COUNT = 1500
BEHIND = 1.0  # per cent that auto may be behind the best order


@dataclass(frozen=True, slots=True)
class Model:
    """A model in 16 bits: its weights, and the KV of a token, in bytes."""

    name: str
    weights: float
    kv: float


MODELS = (Model("Llama-2-7B", 13.5e9, 524_288), Model("Llama-3-8B", 16.06e9, 131_072))
# By name: the law's row_share, and whether attention is padded.
LAWS = {"dense": (0.0, True), "w = 33": (33.0, False), "w = 0": (0.0, False)}


def measure(quick: bool) -> list[Figure]:
    count = 300 if quick else COUNT
    figures: list[Figure] = []
    rows = []
    gains: dict[tuple[str, str], float] = {}
    for model in MODELS[:1] if quick else MODELS:
        for trace in SOURCES:
            workload = requests_of(trace, count)
            for law, (row_share, padded) in LAWS.items():
                runs = simulated(model, workload, row_share, padded)
                base = runs["fcfs"].seconds
                row = [model.name, trace, law]
                row += [f"{base / runs[name].seconds:.2f}" for name in _COLUMNS]
                aligned = runs["length-aligned"]
                moved = 2 * aligned.parked * aligned.prompt_tokens / count
                late = aligned.seconds + moved * model.kv / PCIE
                row += [str(aligned.parked), f"{base / late:.2f}"]
                rows.append(row)
                figures += figures_of(model, trace, law, runs)
                if law == "dense" and model is MODELS[0]:
                    gain = runs["ascending"].seconds / aligned.seconds
                    gains[trace, law] = 100 * (gain - 1)
    print_table(
        "Speed-up over fcfs: orders, and batches of similar length",
        ["model", "trace", "law", *_COLUMNS, "parked", "moved alone"],
        rows,
    )
    ahead = sum(gain >= 5.0 for (name, _), gain in gains.items() if name in FILES)
    figures.append(
        Figure(
            "dense: traces on which length-aligned is 5 % above an ascending sort",
            ahead, "", (">=", 2),
            ", ".join(f"{name} {gain:+.1f} %" for (name, _), gain in gains.items()),
        )
    )  # fmt: skip
    if quick:
        return [Figure(each.name, each.value, each.unit, None) for each in figures]
    return figures


_COLUMNS = ("ascending", "length-tree", "length-aligned", "best of the others")


def figures_of(
    model: Model, trace: str, law: str, runs: dict[str, Simulation]
) -> list[Figure]:
    figures = []
    name = f"{model.name}, {trace}, {law}"
    if law == "dense" and trace in FILES:
        gain = runs["ascending"].seconds / runs["length-aligned"].seconds
        figures.append(
            Figure(
                f"{name}: length-aligned over an ascending sort", gain, "x", (">=", 1.0)
            )
        )
    if law == "w = 0":
        best = min(runs[each].seconds for each in ORDERS)
        behind = 100 * (runs["auto"].seconds / best - 1)
        figures.append(
            Figure(f"{name}: auto behind the best", behind, "%", ("<=", BEHIND))
        )
    if trace in MIXED:
        for policy in ("length-tree", "length-aligned"):
            run = runs[policy]
            mixed = 100 * run.mixed_steps / run.num_steps
            figures.append(
                Figure(
                    f"{name}: mixed steps, {policy}", mixed, "%", ("<=", MIXED[trace])
                )
            )
    return figures


def simulated(
    model: Model, workload: Workload, row_share: float, padded: bool
) -> dict[str, Simulation]:
    cost = CostModel(
        token_time_s=0.0,
        kv_read_time_s=model.kv / BANDWIDTH,
        weight_read_time_s=model.weights / BANDWIDTH,
        interference_exponent=1.0,
        row_share=row_share,
        padded=padded,
    )
    capacity = int((MEMORY - model.weights) / model.kv)
    limits = EngineLimits(capacity, step_tokens=1 << 30, dense=padded)
    job = Candidates(
        workload.requests,
        Machine(cost, limits),
        OrderSettings(),
        true_output_len=workload.output_len,
    )
    lengths = np.empty(len(job.requests), np.int64)
    lengths[job.tree.order] = job.tree.input_len
    orders = {name: job.order(name) for name in ORDERS}
    orders["ascending"] = Order(np.argsort(lengths, kind="stable"))
    runs = {
        name: simulate(
            job.tree, cost, limits,
            order=order, output_len=job.output_len,
        )
        for name, order in orders.items()
    }  # fmt: skip
    planned = {name: job.run(name) for name in orders_for(job.machine)}
    runs["auto"] = runs[best(planned)]
    by_length = ("ascending", "length-tree", "length-aligned", "auto")
    runs["best of the others"] = min(
        (run for name, run in runs.items() if name not in by_length),
        key=lambda run: run.seconds,
    )
    return runs


def requests_of(trace: str, count: int) -> Workload:
    """Requests of a trace's file in the folder ``TRACES``, or of its statistics."""
    folder = os.environ.get("TRACES")
    if folder and trace in FILES:
        return read_trace(
            Path(folder) / FILES[trace], limit=count, max_input_len=30_000
        )
    source = SOURCES[trace]
    rng = np.random.default_rng(1)
    square = source.input_mean**2 * (1 + source.own_cv**2)
    input_len = lognormal_lengths(count, source.input_mean, square, 1, 30_000)
    output_len = lognormal_lengths(
        count, source.output_mean, source.output_square, 1, source.max_output_len
    )
    input_len, output_len = rng.permutation(input_len), rng.permutation(output_len)
    offsets = sums_before(input_len.astype(np.int64))
    requests = PlanRequests(
        rng.integers(0, 1 << 30, int(offsets[-1])).astype(np.int32),
        offsets,
        np.full(count, 4096, np.int32),
        np.full(count, UNKNOWN, np.int32),
    )
    return Workload(requests, output_len, trace)
