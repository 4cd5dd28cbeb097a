"""What ``--choose`` finds for set-ups whose best way is known.

Llama-70B on 8 H200 and Qwen3-30B on H100, by their rooflines; and MLPerf's offline set-ups of
Llama-2-70B and DeepSeek-R1, by what its submitters ran (closed division, v4.1 and v5.1): one
replica per device of Llama-2-70B in 8 bits on H200 and in 4 bits on B200, replicas of two on
H100, and attention ranks with expert parallelism of DeepSeek-R1. Where the choice is another
way, the predicted ratio says by how much it is better.

Lengths of MLPerf's set-ups are exponential around the data sets' means: answers as in the
submitters' logs; prompts of Llama-2-70B as long as its answers, and 800 tokens for DeepSeek-R1,
which are assumptions. Those of the others are 1,000 tokens in and out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import Figure, print_table

from sglang_batch.planner.choosing.chooser import Choices, Chooser, reason
from sglang_batch.planner.choosing.ways import Box, ModelParts, Precision
from sglang_batch.planner.costs.hardware import hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.requests import PlanRequests
from sglang_batch.prediction.models import MODELS

BF16, FP8, NVFP4 = (None, None), ("fp8", "fp8_e4m3"), ("nvfp4", "fp8_e4m3")
R1_FP8 = MODELS["deepseek-r1"] | {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
}
MOST_SECONDS = 30.0
LINES = 100_000
# What is wrong takes longer by at least this factor.
WRONG = 1.1


@dataclass(frozen=True, slots=True)
class SetUp:
    """A model on a server.

    precision: ``--quantization`` and ``--kv-cache-dtype``, None as stored.
    submitted: the spread that submitters of MLPerf used, if this is theirs.
    wrong: a spread that must not be chosen.
    """

    name: str
    config: dict[str, Any]
    device: str
    devices: int
    lines: int
    input_len: float
    output_len: float
    precision: tuple[str | None, str | None] = BF16
    submitted: str | None = None
    wrong: str | None = None

    @property
    def lengths_vary(self) -> bool:
        """As those of MLPerf's data sets do."""
        return self.submitted is not None


SET_UPS = (
    SetUp("Llama-3.1-70B, bf16", MODELS["llama-3.1-70b"], "h200", 8, 10_000, 1000, 1000,
          wrong="TP8"),
    SetUp("Llama-3.1-70B, fp8", MODELS["llama-3.1-70b"], "h200", 8, 10_000, 1000, 1000,
          FP8, wrong="TP8"),
    SetUp("Qwen3-30B-A3B, bf16", MODELS["qwen3-30b-a3b"], "h100", 4, 10_000, 1000, 1000,
          wrong="DP4"),
    SetUp("MLPerf Llama-2-70B, fp8", MODELS["llama-2-70b"], "h200", 8, 24_576, 294, 292,
          FP8, submitted="DP8"),
    SetUp("MLPerf Llama-2-70B, fp8", MODELS["llama-2-70b"], "h100", 8, 24_576, 294, 290,
          FP8, submitted="TP2 DP4"),
    SetUp("MLPerf Llama-2-70B, nvfp4", MODELS["llama-2-70b"], "b200", 8, 24_576, 294, 273,
          NVFP4, submitted="DP8"),
    SetUp("MLPerf DeepSeek-R1, nvfp4", MODELS["deepseek-r1"], "b200", 8, 4_388, 800, 3_736,
          NVFP4, submitted="TP8 attention-DP8 EP8"),
    SetUp("MLPerf DeepSeek-R1, fp8", R1_FP8, "h200", 8, 4_388, 800, 3_736,
          submitted="TP8 attention-DP8 EP8"),
)  # fmt: skip


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part."""
    figures, rows = [], []
    for setup in SET_UPS:
        found = choose(setup)
        best = found.simulated[0]
        other = setup.wrong or setup.submitted or ""
        outlook = next(x for x in found.outlooks if str(x.way.parallel) == other)
        simulated = next(
            (x for x in found.simulated if str(x.way.parallel) == other), None
        )
        ratio = outlook.seconds / best.outlook.seconds
        if simulated is not None:
            ratio = simulated.seconds / best.seconds
        rows.append(
            [setup.name, f"{setup.devices}x {setup.device}", str(best.way.parallel),
             f"{setup.lines * setup.output_len / best.seconds:,.0f}", other,
             f"{ratio:.2f}", reason(outlook, best.outlook)]
        )  # fmt: skip
        title = f"{setup.name} on {setup.device}"
        if setup.wrong:
            figures.append(
                Figure(
                    f"{title}: {setup.wrong} over the choice", ratio, "x", (">=", WRONG)
                )
            )
        else:
            # The submitters' way, or one that takes no longer.
            figures.append(
                Figure(
                    f"{title}: {other}, as submitted, over the choice",
                    ratio,
                    "x",
                    (">=", 0.999),
                    f"chosen: {best.way.parallel}",
                )
            )
    print_table(
        "Choices",
        ("set-up", "server", "chosen", "output tokens/s", "compared", "takes", "why"),
        rows,
    )
    begin = time.perf_counter()
    lines = LINES // 20 if quick else LINES
    choose(SetUp("", MODELS["llama-3.1-70b"], "h200", 8, lines, 500, 200))
    seconds = time.perf_counter() - begin
    figures.append(
        Figure(f"seconds for {lines:,} lines", seconds, "s", ("<=", MOST_SECONDS))
    )
    return figures


def choose(setup: SetUp) -> Choices:
    """The ways for a set-up, the precision being its only one."""
    method, dtype = setup.precision
    spec = ModelSpec.from_hf_config(
        setup.config, quantization=method, kv_dtype=dtype or "auto"
    )
    chooser = Chooser(_requests(setup), OrderSettings())
    box = Box(hardware(setup.device), setup.devices)
    precisions: Sequence[Precision] = [Precision(spec)]
    return chooser.choose(box, ModelParts.of(setup.config), precisions)


def _requests(setup: SetUp) -> PlanRequests:
    """Requests that share nothing."""
    rng = np.random.default_rng(0)

    def lengths_of(mean: float) -> NDArray[np.int64]:
        drawn = np.full(setup.lines, mean)
        if setup.lengths_vary:
            drawn = rng.exponential(mean, setup.lines)
        lengths: NDArray[np.int64] = np.maximum(4, drawn).astype(np.int64)
        return lengths

    inputs = lengths_of(setup.input_len)
    outputs = lengths_of(setup.output_len)
    offsets = np.concatenate([[0], np.cumsum(inputs)]).astype(np.int64)
    lengths = outputs.astype(np.int32)
    tokens = rng.integers(0, 30_000, offsets[-1]).astype(np.int32)
    return PlanRequests(tokens, offsets, lengths, lengths)
