"""Penalties and minimum lengths count the same tokens in whatever company a request runs.

SGLang counts the tokens of an output per row of the running batch: before each decode, the
last one that the scheduler knows. With the overlap schedule that is one step late, except
behind a step of other requests' prompts: then a token is left out and the next one is
counted twice. Which tokens are counted, and so the answer, depended on who else was
running.

Here the token is named by its place in the output: the one that SGLang counts for a request
that runs alone. A request that was offloaded or retracted comes back in a new row, whose
counts begin at zero, and all that it would have counted is counted again.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from ...compat.scheduler_types import Req, ScheduleBatch


def counts_tokens(params: SamplingParams) -> bool:
    """Whether sampling depends on the tokens generated so far."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.min_new_tokens
    )


def count_by_place(
    original: Callable[[ScheduleBatch], None], batch: ScheduleBatch
) -> None:
    """AROUND hook on ``ScheduleBatch.cumulate_penalty_output_tokens``, before a decode."""
    beams = any(req.beam_group is not None for req in batch.reqs)
    if beams or not batch.spec_algorithm.is_none():
        # A step yields other numbers of tokens.
        original(batch)
        return
    lens = batch.seq_lens_cpu.tolist()
    tokens = [
        # The KV of a prompt and of all its output but the last token, which may not be
        # known yet.
        _counted(req, seq_len - len(req.origin_input_ids) + 1, batch.enable_overlap)
        for req, seq_len in zip(batch.reqs, lens, strict=True)
    ]
    _count(batch, tokens)


def count_again(batch: ScheduleBatch, num_decodes: int) -> None:
    """Count what the only request of a batch counted before its first decodes."""
    [req] = batch.reqs
    for number in range(1, num_decodes + 1):
        _count(batch, [_counted(req, number, batch.enable_overlap)])


def _counted(req: Req, number: int, lags: bool) -> int:
    """The token that a request counts before its decode of a number, from 1."""
    place = min(number - 1 - int(lags), len(req.output_ids) - 1)
    return int(req.output_ids[place] if place >= 0 else req.origin_input_ids[-1])


def _count(batch: ScheduleBatch, tokens: list[int]) -> None:
    # Does not wait for the device where memory can be pinned.
    pinned = torch.device(batch.device).type == "cuda"
    counted = torch.tensor(tokens, dtype=torch.int64, pin_memory=pinned)
    batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(
        counted.to(batch.device, non_blocking=True)
    )


def count_retracted(batch: ScheduleBatch, vocab_size: int) -> None:
    """Count the output of those requests of a prefill batch that were retracted: SGLang
    prefills it with their prompt. Rows that a mixed batch decodes have their counts
    already."""
    decoding = batch.decoding_reqs or ()
    for row, req in enumerate(batch.reqs[: len(batch.reqs) - len(decoding)]):
        if req.output_ids and counts_tokens(req.sampling_params):
            alone = copy(batch)
            alone.reqs = [req]
            alone.sampling_info = SamplingBatchInfo.from_schedule_batch(
                alone, vocab_size
            )
            count_again(alone, len(req.output_ids))
            _copy_row(alone.sampling_info, batch.sampling_info, row)


def _copy_row(source: SamplingBatchInfo, target: SamplingBatchInfo, row: int) -> None:
    penalizers = target.penalizer_orchestrator.penalizers
    for kind, counted in source.penalizer_orchestrator.penalizers.items():
        for name, value in vars(counted).items():
            if isinstance(value, torch.Tensor):
                getattr(penalizers[kind], name)[row] = value[0]
