"""Steps with prompts in which the running requests decode, too.

SGLang does not mix a batch of prompts with the running one if any of their requests wants
log probabilities: it would ask for those of each decode's input token, and the batch does
not say which tokens to take. They are not wanted: the last step gave them as those of its
output. Those that begin after the only input token of a row are none, so such batches are
mixed here. Beams have further rows while they decode, and no step mixes those with prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.managers.schedule_batch import ScheduleBatch as SGLangScheduleBatch
from sglang.srt.managers.scheduler import NextBatchPlan

from ...planner.costs.cost_model import mixing_loss_s
from ...scheduling.kv_accounting import KvAccounting
from ...scheduling.open_jobs import OpenJobs
from ..compat.scheduler_types import Req, ScheduleBatch, Scheduler


def num_rows(req: Req) -> int:
    """Rows of the running batch that a request takes: one, or one for each beam."""
    return 1 if req.beam_group is None else req.beam_group.beam_width


def can_mix(scheduler: Scheduler, running_batch: ScheduleBatch) -> bool:
    if not scheduler.is_mixed_chunk:
        return False
    return all(req.beam_group is None for req in running_batch.reqs)


def has_decodes(batch: ScheduleBatch) -> bool:
    """Whether requests of a batch decode, also in a step with prompts."""
    mode = batch.forward_mode
    return mode.is_decode() or (mode.is_extend() and bool(batch.decoding_reqs))


def with_decodes(scheduler: Scheduler, plan: NextBatchPlan) -> NextBatchPlan:
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
    return NextBatchPlan(batch_to_run=batch, running_batch=SGLangScheduleBatch(reqs=[]))


class StepsApart:
    """Gives prompts and decodes steps of their own where a mixed step would take longer.

    By the costs of the open jobs' plan, which all ranks have: see
    ``planner.costs.cost_model.mixing_loss_s``. After prompts alone, the next step decodes
    alone, unless a prompt is only partly computed.
    """

    def __init__(
        self, scheduler: Scheduler, jobs: OpenJobs, kv_accounting: KvAccounting
    ) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._kv_accounting = kv_accounting
        self._decodes_owed = False

    def decodes_now(self, running_batch: ScheduleBatch) -> bool:
        """Whether this step decodes alone, since the last one left that out."""
        if not self._decodes_owed or self._scheduler.chunked_req is not None:
            return False
        self._decodes_owed = False
        return bool(running_batch.reqs)

    @contextmanager
    def building(
        self, prompt_tokens: int, running_batch: ScheduleBatch, *, always: bool = False
    ) -> Iterator[None]:
        """SGLang builds a step with so many tokens of prompts meanwhile.

        always: without decodes, even where a mixed step would take less time.
        """
        scheduler = self._scheduler
        apart = always and scheduler.is_mixed_chunk
        if not apart and not self.mixing_loses(prompt_tokens, len(running_batch.reqs)):
            yield
            return
        scheduler.is_mixed_chunk = False
        try:
            yield
        finally:
            scheduler.is_mixed_chunk = True
        self._decodes_owed = True

    def mixing_loses(self, prompt_tokens: int, rows: int) -> bool:
        """Whether so many tokens of prompts would be computed before ``rows`` decode."""
        if not self._scheduler.is_mixed_chunk:
            return False
        costs = (job.plan.cost.mixing for job in self._jobs.each)
        cost = next((cost for cost in costs if cost is not None), None)
        if cost is None or not rows or not prompt_tokens:
            return False
        reads = sum(self._kv_accounting.reads)
        loss = mixing_loss_s(cost, float(prompt_tokens), float(rows), float(reads))
        return bool(loss > 0)


class FastMembership(list[Req]):
    """A list of requests that tells in constant time whether it holds one. SGLang asks this
    for each request of a mixed step."""

    def __init__(self, reqs: list[Req]) -> None:
        super().__init__(reqs)
        self._ids = {id(req) for req in reqs}

    def __contains__(self, req: object) -> bool:
        return id(req) in self._ids
