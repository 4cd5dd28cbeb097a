"""What running a step as two half batches could bring for large tensor parallelism: on paper.

NanoFlow (OSDI'25, section 4) divides a step into nano-batches, so that the matrices of one run
beside the attention and the all-reduces of another. Here a step of the steady state (1,000 tokens
in and out, KV full) is divided by its operators' limits. Both halves read all weights. Three
bounds: the links hidden alone, all three together by the law with k = 1.47, and perfectly.

Nothing of this is measured, and no engine of this project does it.
"""

from __future__ import annotations

import numpy as np
from report import Figure, print_table

from sglang_batch.planner.choosing.steady_state import RequestMix, steady_state
from sglang_batch.planner.costs.cost_model import overlapped
from sglang_batch.planner.costs.hardware import HardwareSpec, Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import StepSeconds, StepWork, step_seconds
from sglang_batch.prediction.models import MODELS

MIX = RequestMix(1000, 1000, computed=1000, held=1500)
# Of BlendServe's grid (benchmark/results/README.md).
INTERFERENCE = 1.47
CASES = (
    ("llama-3.1-70b", "h100", 8, None),
    ("llama-3.1-70b", "h200", 8, None),
    ("llama-3.1-70b", "h200", 8, "fp8"),
    ("llama-3.1-70b", "h200", 2, "fp8"),
    ("llama-3.1-405b", "h200", 8, "fp8"),
    ("llama-3.1-8b", "h100", 1, None),
)


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part, which have no target."""
    rows, figures = [], []
    for name, device, tp, method in CASES:
        spec = ModelSpec.from_hf_config(MODELS[name], quantization=method)
        parallel, hw = Parallelism(tp=tp), hardware(device)
        steady = steady_state(spec, hw, parallel, MIX, max_rows=4096)
        batch = float(steady.rows)

        whole, half = (_step(spec, hw, parallel, batch * x) for x in (1.0, 0.5))
        together_s = float(whole.total_s)
        compute, memory, link = (
            2 * float(x) for x in (half.compute_s, half.memory_s, half.link_s)
        )
        idle = float(half.idle_s)
        hidden = max(compute + memory, link) + idle
        law = overlapped(overlapped(compute, memory, INTERFERENCE), link, INTERFERENCE)
        perfect = max(compute, memory, link) + idle
        gains = [together_s / each for each in (hidden, law + idle, perfect)]
        share = float(whole.link_s) / together_s
        rows.append(
            [f"{name} {method or 'bf16'}", f"{tp}x {device}", f"{batch:,.0f}",
             f"{together_s * 1e3:.1f}", f"{share:.0%}", *(f"{x:.2f}" for x in gains)]
        )  # fmt: skip
        figures.append(
            Figure(
                f"{name} {method or 'bf16'}, {tp}x {device}: by the law", gains[1], "x"
            )
        )
    assert np.isfinite([figure.value for figure in figures]).all()
    print_table(
        "Speed-up of two halves over one step, estimated",
        ("model", "devices", "rows", "step ms", "links", "links hidden", "k = 1.47",
         "perfect"),
        rows,
    )  # fmt: skip
    return figures


def _step(
    spec: ModelSpec, hw: HardwareSpec, parallel: Parallelism, rows: float
) -> StepSeconds:
    """A step of the steady state with so many rows: as many prompts begin as answers end."""
    prompts = rows * MIX.input_len / MIX.output_len
    work = StepWork.of(
        rows + prompts,
        rows,
        decodes=rows,
        prompt_pairs=prompts * MIX.input_len / 2,
        kv_tokens=rows * (MIX.input_len + MIX.output_len / 2),
    )
    return step_seconds(spec, hw, parallel, work)
