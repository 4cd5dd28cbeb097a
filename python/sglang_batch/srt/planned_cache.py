"""SGLang's radix cache, told by the plan what to keep.

Shared prefixes that requests to come still need are pinned in the tree; everything
else (answers, prompts' own tails, prefixes whose last request has started) is left to
SGLang's eviction. Where that is not enough, pins are taken off, the prefix needed last
first, before SGLang evicts. So the tree core stays the compiled one, which evicts in
a fraction of a millisecond, and the order of eviction is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.common import _req_radix_key
from sglang.srt.mem_cache.registry import (
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .support import CACHE_BACKEND


class PlannedRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """A radix cache with an outside view of what is needed when.

    Attributes:
        let_go: called before an eviction with the tokens that it has to yield.
        on_released: called with each request that gives its KV back, and whether the
            tree keeps what it computed.
        on_reset: called when the tree is emptied.
        evicted_tokens: tokens evicted so far.
    """

    let_go: Callable[[int], None] | None = None
    on_released: Callable[[Any, bool], None] | None = None
    on_reset: Callable[[], None] | None = None
    evicted_tokens = 0

    def evict(self, params: EvictParams) -> Any:
        if self.let_go is not None:
            self.let_go(params.num_tokens)
        result = super().evict(params)
        self.evicted_tokens += result.num_tokens_evicted
        return result

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> Any:
        if self.let_go is not None:
            self.let_go(params.num_tokens)
        result = super().evict_for_alloc(params, **kwargs)
        self.evicted_tokens += result.num_tokens_evicted
        return result

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if self.on_released is not None:
            self.on_released(req, checkpointed)

    def reset(self) -> None:
        if self.on_reset is not None:
            self.on_reset()
        super().reset()

    def free_or_evictable(self) -> int:
        """Tokens of KV that an allocation could get without taking a pin off."""
        available = self.token_to_kv_pool_allocator.available_size()
        return int(available + self.evictable_size())

    def keep(self, req: Any, num_tokens: int) -> Any | None:
        """Pin the first ``num_tokens`` of a request's prompt in the tree.

        Returns:
            A lock for ``unlock``; None if the tree does not hold all of them.
        """
        key = _req_radix_key(self, req, req.full_untruncated_fill_ids, num_tokens)
        found = self.match_prefix(MatchPrefixParams(key=key))
        if found.device_prefix_len != num_tokens:
            return None
        return self.lock(found.last_device_node)


def register() -> None:
    """Make the cache known to SGLang, once per process."""
    if get_radix_cache_factory(CACHE_BACKEND) is None:
        register_radix_cache_backend(
            CACHE_BACKEND,
            lambda ctx: create_unified_radix_cache(ctx, cache_class=PlannedRadixCache),
        )
