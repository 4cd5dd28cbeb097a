"""Throughput of an engine that runs one mix of requests for a long time, and its memory.

A closed form, without a schedule: steps mix as many prompts with the decodes as keep the number
of requests constant. It ranks machines before any of them is simulated, and is compared with
published figures, whose lengths are constant or known as means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError
from ..costs.cost_model import kv_tokens_in
from ..costs.hardware import HardwareSpec, Parallelism
from ..costs.model_spec import ModelSpec
from ..costs.step_costs import StepSeconds, StepWork, step_seconds
from ..costs.weights import Matrix, Split


def device_weight_bytes(model: ModelSpec, parallel: Parallelism) -> float:
    """Bytes of weights on a device. Attention ranks each have a copy of the attention's matrices;
    parameters in no matrix (norms, the embedding) are divided like one."""
    shape = model.shape
    if shape is None:
        return model.weight_bytes / (parallel.tp * parallel.pp)
    all_matrices = (*shape.mixers, *shape.feed_forward)
    others = model.weight_bytes - sum(map(_bytes, all_matrices))
    held = others / parallel.tp
    held += sum(_held(matrix, parallel.attention_tp) for matrix in shape.mixers)
    held += sum(_held(matrix, parallel.tp) for matrix in shape.feed_forward)
    return held / parallel.pp


def rank_kv_tokens(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism,
    mem_fraction: float = 0.9,
) -> int:
    """Tokens of KV that fit on the devices of one attention rank, in all stages.

    Args:
        mem_fraction: share of each device's memory for weights and KV, 0 to 1.

    Raises:
        ConfigError: the weights leave no memory for KV.
    """
    weights = device_weight_bytes(model, parallel)
    usable = hardware.memory_bytes * mem_fraction
    tp = parallel.attention_tp
    tokens = kv_tokens_in(model, (usable - weights) * tp * parallel.pp, tp)
    if tokens < 1:
        raise ConfigError(
            f"the weights take {weights / 1e9:.1f} GB of the {usable / 1e9:.1f} GB usable "
            f"of each {hardware.name} with {parallel}"
        )
    return tokens


def _bytes(matrix: Matrix) -> float:
    return matrix.params * matrix.bits / 8


def _held(matrix: Matrix, tp: int) -> float:
    return _bytes(matrix) / (1 if matrix.split is Split.WHOLE else tp)


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Requests by their means, in tokens.

    input_len, output_len: of a request.
    computed: tokens of its prompt that are not in the cache.
    held: KV of its own, on average over its steps.
    """

    input_len: float
    output_len: float
    computed: float
    held: float


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Throughput of all devices together.

    rows: requests that run at once in an attention rank.
    step: seconds of a step, or of a round of all stages.
    requests_per_s: of all replicas.
    """

    rows: float
    step: StepSeconds
    requests_per_s: float


def steady_state(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism,
    mix: RequestMix,
    *,
    step_tokens: int = 8192,
    max_rows: float = np.inf,
    mem_fraction: float = 0.9,
) -> SteadyState:
    """The throughput of this mix.

    Args:
        step_tokens, max_rows: most tokens of a step, and most requests at once, of an attention
            rank.
        mem_fraction: share of the memory for weights and KV.

    Raises:
        ConfigError: the weights leave no memory for KV, or the operators are not known.
    """
    kv_tokens = rank_kv_tokens(model, hardware, parallel, mem_fraction)
    steps = max(mix.output_len, 1.0)
    # Each step computes the prompts of as many requests as end.
    per_row = 1.0 + mix.computed / steps
    rows = min(
        kv_tokens / max(mix.held, 1.0), max_rows, step_tokens * parallel.pp / per_row
    )
    rows = max(rows, 1.0)
    batch = rows / parallel.pp
    begun = batch / steps
    before = mix.input_len - mix.computed
    pairs = mix.computed * before + mix.computed**2 / 2
    length = mix.input_len + mix.output_len / 2
    work = StepWork.of(
        batch * per_row,
        batch + begun,
        decodes=batch,
        prompt_pairs=begun * pairs,
        kv_tokens=batch * length,
        window_kv_tokens=batch * min(length, model.window),
    )
    step = step_seconds(model, hardware, parallel, work)
    ended = rows / steps * parallel.attention_ranks * parallel.replicas
    return SteadyState(rows, step, ended / float(step.total_s))
