"""Throughput of an engine that runs one mix of requests for a long time.

A closed form, without a schedule: steps mix as many prompts with the decodes as keep the number
of requests constant. It ranks machines before any of them is simulated, and is compared with
published figures, whose lengths are constant or known as means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..costs.hardware import HardwareSpec
from ..costs.model_spec import ModelSpec
from .memory import rank_kv_tokens
from .operators import StepSeconds, StepWork, step_seconds
from .parallelism import Parallelism


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Requests by their means, in tokens.

    input_len, output_len: of a request.
    computed: tokens of its prompt that are not in the cache. None: all.
    held: KV that it holds of its own. None: the prompt and half of the answer.
    """

    input_len: float
    output_len: float
    computed: float | None = None
    held: float | None = None

    @property
    def new_tokens(self) -> float:
        """Prompt tokens to compute."""
        return self.input_len if self.computed is None else self.computed

    @property
    def held_tokens(self) -> float:
        """KV of a request of its own, on average over its steps."""
        if self.held is not None:
            return self.held
        return self.input_len + self.output_len / 2


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

    def output_tokens_per_s(self, mix: RequestMix) -> float:
        """Tokens of answers."""
        return self.requests_per_s * mix.output_len


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
        step_tokens: most tokens of a step of an attention rank.
        max_rows: most requests at once in an attention rank.
        mem_fraction: share of the memory for weights and KV.

    Raises:
        ConfigError: the weights leave no memory for KV, or the model's operators are not
            known.
    """
    kv_tokens = rank_kv_tokens(model, hardware, parallel, mem_fraction)
    steps = max(mix.output_len, 1.0)
    # Each step computes the prompts of as many requests as end.
    per_row = 1.0 + mix.new_tokens / steps
    rows = min(
        kv_tokens / max(mix.held_tokens, 1.0),
        max_rows,
        step_tokens * parallel.pp / per_row,
    )
    rows = max(rows, 1.0)
    batch = rows / parallel.pp
    begun = batch / steps
    before = mix.input_len - mix.new_tokens
    pairs = mix.new_tokens * before + mix.new_tokens**2 / 2
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
