"""The planner's cost model of any machine, from the operators of its steps."""

from __future__ import annotations

import numpy as np

from ..costs.cost_model import CostModel, overlapped
from ..costs.hardware import HardwareSpec
from ..costs.model_spec import ModelSpec
from ..costs.step_table import COMPUTE, HEAD_COMPUTE, HEAD_MEMORY, MEMORY, OTHER, TOKENS
from ..requests import Floats
from .operators import StepSeconds, StepWork, step_seconds
from .parallelism import Parallelism

# Tokens of a step at which products are timed: each number at first, as experts are read one
# by one there, and then at this distance, as tiles are. With so many a step reads nearly all
# weights, and computes little. Beyond, waves are too
# many to be seen.
_EACH, _DISTANCE, _MOST, _LAST = 64, 64, 16384, 65536
# Requests, tokens of KV and pairs that are counted for the time of one.
_MANY = 1e6


def step_costs(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism,
    *,
    shared_kv_read_once: bool = False,
    interference_exponent: float = 1.0,
    row_share: float = 0.0,
    padded: bool = False,
) -> CostModel:
    """Costs of one attention rank's requests, the other ranks' steps being like its own.

    With ``pp`` stages, a step is a round in which each of ``pp`` micro-batches passes all of
    them.

    Args:
        shared_kv_read_once, interference_exponent, row_share, padded: as of
            :class:`~..costs.cost_model.CostModel`.

    Raises:
        ConfigError: the model's operators are not known, or a setting is out of range.
    """
    tokens = np.concatenate(
        [[0.0], np.arange(1, _EACH), np.arange(_EACH, _MOST + 1, _DISTANCE), [_LAST]]
    )
    batch, pp = tokens / parallel.pp, parallel.pp

    def timed(work: StepWork) -> StepSeconds:
        return step_seconds(model, hardware, parallel, work)

    layers, with_head = timed(StepWork.of(batch, 0.0)), timed(StepWork.of(batch, batch))
    table = np.zeros((6, len(tokens)))
    table[TOKENS] = tokens
    table[COMPUTE], table[MEMORY], table[OTHER] = (
        layers.compute_s,
        layers.memory_s,
        layers.other_s,
    )
    table[HEAD_COMPUTE] = with_head.compute_s - layers.compute_s
    table[HEAD_MEMORY] = with_head.memory_s - layers.memory_s

    def of_one(**work: float) -> float:
        """Seconds of one of these, less those of a step without any."""
        many = timed(StepWork.of(0.0, 0.0, **{k: _MANY * x for k, x in work.items()}))
        none = timed(StepWork.of(0.0, 0.0))
        return float(many.total_s - none.total_s) / _MANY / pp

    kv_read_s = of_one(kv_tokens=1.0)
    return CostModel(
        token_time_s=least_token_s(table, interference_exponent),
        kv_read_time_s=kv_read_s,
        # Tokens attend to half of the square of a prompt.
        attention_time_s=of_one(prompt_pairs=0.5),
        weight_read_time_s=float((layers.memory_s + layers.other_s)[_EACH]),
        shared_kv_read_once=shared_kv_read_once,
        interference_exponent=float(interference_exponent),
        row_share=float(row_share),
        padded=padded,
        state_reads=of_one(decodes=1.0) / kv_read_s,
        window=model.window,
        window_reads=of_one(window_kv_tokens=1.0) / kv_read_s,
        encoder_token_time_s=model.encoder_flops_per_token
        / (
            hardware.compute_flops
            * hardware.efficiency.matrix_share
            * parallel.attention_tp
        ),
        table=table,
    )


def least_token_s(table: Floats, exponent: float) -> float:
    """Seconds of a token in the step that takes least for each of its tokens."""
    seconds = [
        overlapped(compute, memory, exponent) + other
        for compute, memory, other in zip(
            *table[[COMPUTE, MEMORY, OTHER], 1:].tolist(), strict=True
        )
    ]
    return float(min(seconds / table[TOKENS, 1:]))
