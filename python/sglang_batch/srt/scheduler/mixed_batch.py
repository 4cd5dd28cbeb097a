"""Steps with prompts in which the running requests decode, too.

SGLang mixes a batch of prompts with the running one, but not if any of their requests
wants log probabilities: ``ScheduleBatch.mix_with_running`` asks for those of each
decode's input token, and the batch does not say which tokens to take. They are not
wanted: the last step gave them as those of its output. Log probabilities that begin
after the only input token of a row are none, and those of the output are computed of
all rows alike. So such batches are mixed here.

Other batches stay as they are: beams have further rows while they decode, and inputs
that are embeddings have no token ids.
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


def never_mixes(req: Req) -> bool:
    """Whether a request keeps others from decoding beside prompts while it runs, or
    while its prompt is computed."""
    return req.beam_group is not None or req.input_embeds is not None


def can_decode_beside_prompts(
    scheduler: MixingScheduler, running_batch: ScheduleBatch, chunked: Req | None
) -> bool:
    """Whether the running requests can decode in a step with prompts.

    Args:
        chunked: the request whose prompt continues in the step.
    """
    if not scheduler.is_mixed_chunk:
        return False
    if chunked is not None and chunked.input_embeds is not None:
        return False
    if not scheduler.beam_coordinator._num_live_groups:
        return True
    return all(req.beam_group is None for req in running_batch.reqs)


def with_decodes(scheduler: MixingScheduler, plan: PrefillPlan) -> PrefillPlan:
    """Mix a batch that SGLang left unmixed because of log probabilities."""
    batch, running = plan.batch_to_run, plan.running_batch
    if (
        batch is None
        or batch.input_embeds is not None
        or running.is_empty()
        or not (batch.return_logprob or running.return_logprob)
        or not can_decode_beside_prompts(scheduler, running, None)
    ):
        return plan
    # From here on as SGLang's own.
    running.filter_batch(
        reqs_to_exclude=scheduler._reqs_finishing_inflight(running),
    )
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
