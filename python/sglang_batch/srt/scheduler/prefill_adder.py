"""SGLang's prefill adder without its guess of output lengths.

Which requests join is decided before, by the forecast of KV. The adder only checks and
counts what a step really takes: the prompt tokens whose KV is allocated now.
"""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.managers.schedule_policy import (
    AddReqResult,
    PrefillAdder,
    SchedulePolicy,
)

from ..compat.scheduler_types import Req


class OfflinePrefillAdder(PrefillAdder):  # type: ignore[misc]
    """Checks and charges KV for prompt tokens only, and cuts prompts where states are kept.

    Attributes:
        chunked_req_limit: SGLang's, tokens that the prompt in progress may take.
    """

    chunked_req_limit: int | None

    def _get_running_request_total_token_offset(self, req: Req) -> int:
        return 0

    def _swa_new_tokens(self, req: Req) -> int:
        return 0

    def _check_prefill_budget(
        self, req: Req, *, extend_input_len: int, total_tokens: int, **kwargs: object
    ) -> object:
        now = extend_input_len
        if self.rem_chunk_tokens is not None:
            now = min(now, self.rem_chunk_tokens)
        return super()._check_prefill_budget(
            req,
            extend_input_len=extend_input_len,
            total_tokens=self.ceil_paged_tokens(now) + self.per_req_token_overhead,
            **kwargs,
        )

    def _update_prefill_budget(
        self,
        prefix_len: int,
        extend_input_len: int,
        max_new_tokens: int,
        *args: object,
        **kwargs: object,
    ) -> None:
        super()._update_prefill_budget(prefix_len, extend_input_len, 0, *args, **kwargs)

    def _select_prefill_admission(
        self, req: Req, *, has_chunked_req: bool = False, **kwargs: object
    ) -> object:
        admission = super()._select_prefill_admission(
            req, has_chunked_req=has_chunked_req, **kwargs
        )
        if isinstance(admission, AddReqResult):
            return admission
        stop = self.tree_cache.next_stop(req, admission.prefix_len)
        if stop is not None and stop < admission.prefix_len + admission.extend_len:
            admission = replace(
                admission,
                extend_len=stop - admission.prefix_len,
                max_new_tokens=0,
                is_chunked=True,
            )
        # SGLang tracks one prompt that is partly computed, not two.
        if admission.is_chunked and (
            has_chunked_req or self.new_chunked_req is not None
        ):
            return AddReqResult.OTHER
        return admission

    def add_chunked_req(self, req: Req) -> object:
        stop = self.tree_cache.next_stop(req, req.prefix_len)
        if stop is not None:
            most, now = self.chunked_req_limit, stop - req.prefix_len
            self.chunked_req_limit = now if most is None else min(most, now)
        return super().add_chunked_req(req)


class OfflineSchedulePolicy(SchedulePolicy):  # type: ignore[misc]
    """Keeps the waiting queue in the order in which the plan scheduler put it.

    Attributes:
        chunk_limit: tokens that the prompt in progress may take in the next step, or
            None for no limit.
    """

    chunk_limit: int | None = None

    def calc_priority(self, *args: object, **kwargs: object) -> None:
        return

    def shortest_prefill_chunk_limit(self, *args: object) -> int | None:
        return self.chunk_limit
