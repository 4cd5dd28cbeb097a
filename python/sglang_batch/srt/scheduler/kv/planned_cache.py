"""SGLang's radix cache, which evicts in the order of the plan.

Shared prefixes that later requests need are pinned (locked) in the tree. SGLang evicts
everything else as usual: answers, the prompts' own tails, and prefixes whose last request
has started. An eviction, from top to bottom:

1. An allocation finds too little free KV, and SGLang calls :meth:`PlannedRadixCache.evict` or
   :meth:`~PlannedRadixCache.evict_for_alloc` with the number of tokens it needs.
2. :meth:`PinnedPrefixes.unpin_until_evictable` removes pins until that many can be evicted.
3. Each pin removed is that of the prefix whose next use is furthest away, in the job that
   comes last (:meth:`PinnedPrefixes.unpin_furthest`). The future is known, so this is
   Belady's rule. Of a job that may still grow, the host keeps a copy (:mod:`.host_prefixes`).
4. SGLang evicts unpinned KV, the least recently used first.

The scheduler makes the same choice ahead of an allocation where it has to know how much KV
it can get (:meth:`PinnedPrefixes.unpin_until_free`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.common import _req_radix_key
from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ....scheduling.job_state import JobState
from ....scheduling.open_jobs import OpenJobs
from ....scheduling.scheduled_request import ScheduledRequest
from ...compat.scheduler_types import Req
from ...compat.support import CACHE_BACKEND
from .host_prefixes import BLOCK, HostPrefixes, Prompt

# Tokens of sliding-window layers that can be had in a model without such layers.
NO_LIMIT = 1 << 62


class PlannedRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """A radix cache that unpins prefixes in the order of the plan before it evicts.

    Attributes:
        evicted_tokens: tokens evicted so far.
        step_ends: while a step is built, where the plan cuts prompts for lack of tokens, by
            the request's id.
    """

    evicted_tokens = 0
    step_ends: Mapping[str, int] = {}
    _pinned: PinnedPrefixes | None = None
    _released: Callable[[Req, bool], None] | None = None
    _ends: Callable[[Req], list[int]] | None = None

    @property
    def lookahead(self) -> int:
        """Tokens behind a prefix on which its KV depends, and without which the tree does
        not keep it. A draft model like EAGLE's reads each state with the next token."""
        return int(self.tree_core.is_eagle)

    def attach(
        self,
        pinned: PinnedPrefixes,
        released: Callable[[Req, bool], None],
        ends: Callable[[Req], list[int]],
    ) -> None:
        """Evict by the plan from now on. SGLang makes the cache before the scheduler
        that has the plan.

        Args:
            released: called with each request that gives its KV back, and whether the
                tree keeps the KV that it computed.
            ends: where the prefixes end that a request computes for others, ascending.
        """
        self._pinned = pinned
        self._released = released
        self._ends = ends

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: object) -> None:
        """Put the computed tokens of a request into the tree. Of sliding-window layers the
        tree keeps only the window before the end. So a leader's tokens are put there in
        parts, each of which ends where others need it."""
        if self._ends is not None and self.supports_swa() and not req.finished():
            for end in self._ends(req):
                end += self.lookahead
                if req.kv.cache_protected_len < end < up_to:
                    super().checkpoint(req, up_to=end, **kwargs)
        super().checkpoint(req, up_to=up_to, **kwargs)

    def next_stop(self, req: Req, begin: int) -> int | None:
        """Where a prompt is cut that is computed from ``begin`` tokens on, if it is. A
        model with recurrent layers has its state where a chunk ends and nowhere else, so a
        leader's chunks end where others continue."""
        if self._ends is None or not self.supports_mamba():
            return None
        ends = [*self._ends(req), self.step_ends.get(req.rid, 0)]
        return min((end for end in ends if end > begin), default=None)

    def evict(self, params: EvictParams) -> EvictResult:
        if self._pinned is not None:
            self._pinned.unpin_until_evictable(params)
        result: EvictResult = super().evict(params)
        self.evicted_tokens += result.num_tokens_evicted
        return result

    def evict_for_alloc(self, params: EvictParams, **kwargs: object) -> EvictResult:
        if self._pinned is not None:
            self._pinned.unpin_until_evictable(params)
        result: EvictResult = super().evict_for_alloc(params, **kwargs)
        self.evicted_tokens += result.num_tokens_evicted
        return result

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if self._released is not None:
            self._released(req, checkpointed)

    def reset(self) -> None:
        if self._pinned is not None:
            self._pinned.forget_all()
        super().reset()

    def free_or_evictable(self) -> int:
        """Tokens of KV that can be allocated without removing a pin, of a model with
        windows in the layers that keep all KV."""
        allocator = self.token_to_kv_pool_allocator
        if self.supports_swa():
            return int(allocator.full_available_size() + self.full_evictable_size())
        return int(allocator.available_size() + self.evictable_size())

    def free_or_evictable_windows(self) -> int:
        """The same for sliding-window layers. Without such layers no limit."""
        if not self.supports_swa():
            return NO_LIMIT
        available = self.token_to_kv_pool_allocator.swa_available_size()
        return int(available + self.swa_evictable_size())

    def lock_prefix(self, req: Req, num_tokens: int) -> TreeLock | None:
        """Lock the first ``num_tokens`` of a request's prompt in the tree, for ``unlock``.
        None if the tree does not hold all of these tokens."""
        end = num_tokens + self.lookahead
        key = _req_radix_key(self, req, req.origin_input_ids, end)
        found: MatchResult = self.match_prefix(MatchPrefixParams(key=key))
        if found.device_prefix_len != num_tokens:
            return None
        lock: TreeLock = self.lock(found.last_device_node)
        return lock


class Pin(NamedTuple):
    """A pinned prefix, the first tokens of ``prompt``."""

    lock: TreeLock
    prompt: Prompt


@dataclass(eq=False)
class PinnedPrefixes:
    """The prefixes that jobs have pinned in the cache, and the order to unpin them.

    Args:
        host: keeps prefixes of jobs that may still grow, and of whole jobs with
            ``saves_all``. None where KV cannot be moved to the host; they are computed
            again.
    """

    cache: PlannedRadixCache
    jobs: OpenJobs
    host: HostPrefixes | None = None
    saves_all: bool = field(default=False, kw_only=True)

    @property
    def host_room(self) -> int:
        """Tokens of further prefixes that the host has room for."""
        return 0 if self.host is None else self.host.room

    def pin(self, job: JobState, req: Req, nodes: list[int]) -> None:
        """Pin those of a request's prefixes that later requests need."""
        for node in nodes:
            if job.uses.wanted(node):
                end = int(job.uses.depth[node])
                if self.cache.supports_mamba():
                    end = job.uses.state_end(node)
                lock = self.cache.lock_prefix(req, end)
                if lock is not None:
                    job.uses.pin(node, Pin(lock, Prompt.of(req)))

    def unpin(self, job: JobState, nodes: list[int]) -> None:
        self.unlock([job.uses.unpin(node) for node in nodes])

    def unlock(self, pins: list[Pin]) -> None:
        for pin in pins:
            self.cache.unlock(pin.lock)

    def unpin_spent(self, job: JobState, request: ScheduledRequest) -> None:
        self.unpin(job, job.uses.spent(request))

    def unpin_job(self, job: JobState) -> None:
        self.unpin(job, list(job.uses.pins))
        if self.host is not None:
            self.host.drop_of(job)

    def forget_all(self) -> None:
        """The tree was emptied, and its locks with it."""
        for job in self.jobs.each:
            job.uses.forget_pins()
        if self.host is not None:
            self.host.drop_all()

    # Eviction -------------------------------------------------------------------------

    def unpin_until_evictable(self, wanted: EvictParams) -> None:
        """Unpin prefixes until the cache can evict as many tokens as wanted, or none is left."""
        cache = self.cache

        def too_few_windows_or_states() -> bool:
            windows, states = wanted.swa_num_tokens, wanted.mamba_num
            return bool(
                (windows and cache.swa_evictable_size() < windows)
                or (states and cache.mamba_evictable_size() < states)
            )

        while cache.evictable_size() < wanted.num_tokens or too_few_windows_or_states():
            if not self.unpin_furthest():
                break
        while too_few_windows_or_states():
            if not self._unpin_in_use():
                return

    def unpin_until_free(self, num_tokens: int) -> None:
        """Unpin prefixes until ``num_tokens`` can be allocated, or none is left."""
        self._unpin_unused_until_free(num_tokens)
        while self.cache.free_or_evictable_windows() < num_tokens:
            if not self._unpin_in_use():
                return

    def _unpin_unused_until_free(self, num_tokens: int) -> None:
        cache = self.cache
        while (
            min(cache.free_or_evictable(), cache.free_or_evictable_windows())
            < num_tokens
        ):
            if not self.unpin_furthest():
                return

    def unpin_furthest(self) -> bool:
        """Unpin the prefix whose next use is furthest away, in the last job that has
        one. False if none is pinned."""
        for job in reversed([*self.jobs.in_order()]):
            node = job.uses.furthest()
            if node:
                self._save(job, node)
                self.unpin(job, [node])
                return True
        return False

    def _unpin_in_use(self) -> bool:
        """Unpin a prefix that running requests use, in the last job that has one. They hold
        the prefix, but not its window or state: of each prefix on a path one is pinned, for
        later requests alone. Together they may fill that pool."""
        for job in reversed([*self.jobs.in_order()]):
            node = job.uses.furthest_in_use()
            if node:
                self.unpin(job, [node])
                return True
        return False

    def _save(self, job: JobState, node: int) -> None:
        """Copy a prefix to the host, from behind the one above it.

        Unless there is a second tier for all, only for requests that are on the host
        without it, or of a job that may still grow: what a whole plan evicts is rarely
        needed again.
        """
        uses, pin = job.uses, job.uses.pins[node]
        if self.host is None or not (
            self.saves_all
            or job.plan.open_ended
            or any(node in uses.path(each.node) for each in job.left_prefix)
        ):
            return
        above = uses.path(node)[1:]
        begin = int(uses.depth[above[0]]) if above else 0
        end = int(uses.depth[node])
        self.host.save(job, pin.prompt, pin.lock.node, begin, end)

    def save_answered(self, job: JobState, request: ScheduledRequest) -> None:
        """Copy a prompt whose prefixes may still grow to the host, if it is long."""
        if self.host is None or not job.plan.open_ended or request.leaf < 0:
            return
        begin = int(job.uses.depth[request.node])
        end = request.input_len // self.cache.page_size * self.cache.page_size
        if end - begin < BLOCK:
            return
        lock = self.cache.lock_prefix(request.req, end)
        if lock is not None:
            self.host.save(job, Prompt.of(request.req), lock.node, begin, end)
            self.cache.unlock(lock)

    def reachable_tokens(self, num_tokens: int) -> int:
        """Tokens that can be allocated after unpinning, exact up to ``num_tokens``. With
        several jobs this does unpin: a prefix may be pinned by two, and only unpinning
        shows whether any KV becomes evictable."""
        if len(self.jobs) > 1:
            self._unpin_unused_until_free(num_tokens)
        idle = self.jobs.idle_tokens if len(self.jobs) == 1 else 0
        return min(self.cache.free_or_evictable() + idle, self.window_room)

    @property
    def window_room(self) -> int:
        """Tokens of sliding-window layers that can be had, by unpinning if need be. Without
        such layers no limit. Windows may overlap, so it may be less."""
        room = self.cache.free_or_evictable_windows()
        if room == NO_LIMIT or len(self.jobs) > 1:
            return room
        window = int(self.cache.swa_retain_window + self.cache.page_size)
        return room + self.jobs.num_idle * window


def register() -> None:
    """Make the cache available to SGLang by its name, once per process."""
    if get_radix_cache_factory(CACHE_BACKEND) is None:
        register_radix_cache_backend(
            CACHE_BACKEND,
            lambda ctx: create_unified_radix_cache(ctx, cache_class=PlannedRadixCache),
        )
