"""Steps with prompts in which the running requests decode, too.

SGLang mixes a batch of prompts with the running one, but not if any of their requests
wants log probabilities: ``ScheduleBatch.mix_with_running`` asks for those of each
decode's input token, and the batch does not say which tokens to take. They are not
wanted: the last step gave them as those of its output. Log probabilities that begin
after the only input token of a row are none, and those of the output are computed of
all rows alike. So such batches are mixed here.

Beams have further rows while they decode, and no step mixes those with prompts.
(Nor does SGLang mix prompts that are embeddings, which it takes only without a prefix
cache.)
"""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch as SGLangScheduleBatch
from sglang.srt.managers.scheduler import NextBatchPlan

from ..compat.scheduler_types import (
    MixingScheduler,
    PrefillPlan,
    Req,
    ScheduleBatch,
)


def num_rows(req: Req) -> int:
    """Rows of the running batch that a request takes: one, or one for each beam."""
    return 1 if req.beam_group is None else req.beam_group.beam_width


def can_mix(scheduler: MixingScheduler, running_batch: ScheduleBatch) -> bool:
    """Whether the running requests can decode in a step with prompts."""
    if not scheduler.is_mixed_chunk:
        return False
    if not scheduler.beam_coordinator._num_live_groups:
        return True
    return all(req.beam_group is None for req in running_batch.reqs)


def has_decodes(batch: ScheduleBatch) -> bool:
    """Whether requests of a batch decode, also beside prompts."""
    mode = batch.forward_mode
    return mode.is_decode() or (mode.is_extend() and bool(batch.decoding_reqs))


def with_decodes(scheduler: MixingScheduler, plan: PrefillPlan) -> PrefillPlan:
    """Mix a batch that SGLang left unmixed because of log probabilities."""
    batch, running = plan.batch_to_run, plan.running_batch
    if (
        batch is None
        or running.is_empty()
        or not (batch.return_logprob or running.return_logprob)
        or not can_mix(scheduler, running)
    ):
        return plan
    # From here on as SGLang mixes others.
    running.filter_batch(scheduler._reqs_finishing_inflight(running))
    if running.is_empty() or not running.check_decode_mem():
        return plan
    running.prepare_for_decode()
    batch.mix_with_running(running)
    rows = len(running.reqs)
    batch.extend_logprob_start_lens[-rows:] = [1] * rows
    batch.decoding_reqs = running.reqs
    mixed: PrefillPlan = NextBatchPlan(
        batch_to_run=batch, running_batch=SGLangScheduleBatch(reqs=[])
    )
    return mixed


class FastMembership(list[Req]):
    """A list of requests that can tell in constant time whether it holds one.

    SGLang asks this for each request of a mixed step, which would otherwise take time
    quadratic in their number.
    """

    def __init__(self, reqs: list[Req]) -> None:
        super().__init__(reqs)
        self._ids = {id(req) for req in reqs}

    def __contains__(self, req: object) -> bool:
        return id(req) in self._ids
