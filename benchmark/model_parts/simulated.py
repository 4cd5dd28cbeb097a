"""Steps and cached tokens on a recurrent model as simulated, and Qwen3-Next-80B on H100.

Three jobs of prompts that share prefixes run on real SGLang, with a tiny checkpoint, KV for
6,144 tokens and few states, and in the simulator. The last table is simulated alone.
"""

from __future__ import annotations

from aligned_parts.engine_counts import counts_of
from planner_stages import A100
from report import Figure, print_table
from tiny_checkpoints import ARGUMENTS

from sglang_batch.planner.costs.cost_model import CostModel, kv_capacity_tokens
from sglang_batch.planner.costs.hardware import hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.machine_model import EngineLimits, Machine, second_pool
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.plan import Candidates
from sglang_batch.prediction.models import MODELS
from sglang_batch.prediction.synthetic_jobs import TRACES
from sglang_batch.prediction.workloads.mix import blend

from .jobs import checkpoint

MODEL = "qwen3_next"
POLICIES = ("dfs", "prefix-groups", "dual-scan")
STATES = (60, 24)
OFF = 2.0  # per cent
# The weights take 159 GB.
LARGE, DEVICE, TP = "qwen3-next-80b-a3b", "h100-sxm", 4
STEP_TOKENS = 8192


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer states' numbers and requests."""
    table, figures = [], []
    for states in STATES[:1] if quick else STATES:
        counts = counts_of(
            POLICIES,
            model=checkpoint(MODEL),
            arguments=(*ARGUMENTS[MODEL], f"--max-mamba-cache-size={states}"),
        )
        for name, case in counts.items():
            real, simulated = case["real"], case["simulated"]
            for column in ("steps", "cached_tokens"):
                off = 100 * abs(simulated[column] / real[column] - 1)
                what = f"{name}, {states} states: {column.replace('_', ' ')}"
                table.append([what, real[column], simulated[column]])
                figures.append(Figure(f"{what}, off", off, "%", ("<=", OFF)))
    print_table("Real SGLang and the simulator", ["", "real", "simulated"], table)
    print_table(
        f"Simulated, not measured: {LARGE} on {TP} x {DEVICE}",
        ["trace", "order", "seconds", "steps", "sharing kept", "retractions"],
        [
            row
            for trace in TRACES
            for row in _simulated(trace, num_requests=4000 if quick else 10_000)
        ],
    )
    return figures


def large_machine() -> Machine:
    """Qwen3-Next-80B as SGLang would run it by default."""
    model, device = ModelSpec.from_hf_config(MODELS[LARGE]), hardware(DEVICE)
    capacity = kv_capacity_tokens(model, device, TP)
    cost = CostModel.of(
        model, device, tp=TP, attention_flops=True, weight_reads=True,
        interference_exponent=1.0,
    )  # fmt: skip
    pool, max_running = second_pool(model, capacity, STEP_TOKENS, TP)
    return Machine(
        cost,
        EngineLimits(
            capacity,
            step_tokens=STEP_TOKENS,
            max_running=max_running,
            as_sglang=True,
            overlapped=False,
            second_pool=pool,
        ),
    )


def _simulated(trace: int, num_requests: int) -> list[list[object]]:
    """One of BlendServe's traces, with known lengths."""
    times = A100.token_time_s, A100.kv_read_time_s
    job = blend(*TRACES[trace], num_requests, 0, *times)
    requests = job.requests
    requests.known_output_len[:] = job.output_len
    candidates = Candidates(requests, large_machine(), OrderSettings())
    possible = candidates.tree.prefix_sharing_ratio
    rows: list[list[object]] = []
    for policy in POLICIES:
        done = candidates.run(policy)
        kept = done.achieved_prefix_sharing_ratio / possible
        rows.append(
            [trace, policy, f"{done.seconds:.0f}", done.num_steps, f"{kept:.3f}",
             done.retractions]
        )  # fmt: skip
    return rows
