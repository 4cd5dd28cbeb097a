"""What requests hold besides the KV of their tokens, for admission."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_spec

from ....planner.machine_model import of_states, of_windows
from ....scheduling.kv_accounting import BoundedPool
from .planned_cache import PlannedRadixCache


def draft_slots() -> int:
    """Tokens of KV that SGLang allocates to each decoding request for its drafts. 0
    without speculation."""
    if get_spec().speculative_algorithm is None:
        return 0
    return int(get_alloc_reserve_per_decode())


def leave_room_for_drafts(scheduler: Any) -> None:
    """Have an answer end before its request and its drafts have no room left, even alone.

    SGLang counts no drafts there, and would end the request with an error.
    """
    if not draft_slots():
        return
    page = int(scheduler.page_size)
    longest = int(scheduler.max_total_num_tokens) // page * page - draft_slots()
    prompt = scheduler.max_req_len - scheduler.max_req_input_len
    scheduler.max_req_len = min(scheduler.max_req_len, longest)
    longest = scheduler.max_req_len - prompt
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, longest)


def second_pool(
    cache: PlannedRadixCache, allocator: Any, step_tokens: int
) -> BoundedPool | None:
    """The pool of sliding-window layers or recurrent states. None if the model has neither."""
    if cache.supports_mamba():
        states = int(cache.req_to_token_pool.mamba_allocator.size)
        return BoundedPool(of_states(states))
    if not cache.supports_swa():
        return None
    page = int(allocator.page_size)
    window = -(-int(cache.swa_retain_window) // page) * page + page
    late = max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())
    capacity = int(allocator.size_swa)
    shares = of_windows(capacity, window, page, step_tokens, late)
    drafts = -(-draft_slots() // page) * page
    return BoundedPool(shares._replace(row_units=shares.row_units + drafts))
