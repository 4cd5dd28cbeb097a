"""Penalties and minimum lengths of requests that come back with their output.

SGLang counts the tokens of an output as they are generated, per row of the running
batch, and starts at zero in a new row. A request that was offloaded or retracted has
generated tokens before. They are counted again here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from ...compat.scheduler_types import SamplingInfo, SamplingParams, ScheduleBatch


def counts_tokens(params: SamplingParams) -> bool:
    """Whether sampling depends on the tokens generated so far."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_new_tokens
    )


def count_again(batch: ScheduleBatch, token_ids: Sequence[int]) -> None:
    """Count output tokens of a batch of one."""
    for token in token_ids:
        batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(
            torch.tensor([token], dtype=torch.int64, device=batch.device)
        )


def count_retracted(batch: ScheduleBatch, vocab_size: int) -> None:
    """Count the output of those requests of a prefill batch that were retracted.

    SGLang prefills their output with their prompt. Rows that a mixed batch decodes
    have their counts already.
    """
    decoding = batch.decoding_reqs or ()
    for row, req in enumerate(batch.reqs[: len(batch.reqs) - len(decoding)]):
        if req.output_ids and counts_tokens(req.sampling_params):
            alone = copy(batch)
            alone.reqs = [req]
            alone.sampling_info = SamplingBatchInfo.from_schedule_batch(
                alone, vocab_size
            )
            count_again(alone, req.output_ids)
            _copy_row(alone.sampling_info, batch.sampling_info, row)


def _copy_row(source: SamplingInfo, target: SamplingInfo, row: int) -> None:
    """Overwrite one row of the counts by the only row of others."""
    penalizers = target.penalizer_orchestrator.penalizers
    for kind, counted in source.penalizer_orchestrator.penalizers.items():
        for name, value in vars(counted).items():
            if isinstance(value, torch.Tensor):
                getattr(penalizers[kind], name)[row] = value[0]
