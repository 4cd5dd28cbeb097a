"""Prefixes of jobs that may still grow, on the host: evicted, and put back for the next
use.

Nobody knows whether further calls of a group will arrive. When KV is short, the prefix that
comes last is unpinned. Its KV is copied to the host pool first, and the next request that
needs the prefix does not compute it again. So are prompts of which nobody knows yet that
others share them.

A prefix is known by its tokens, so it is found again under another plan and by other jobs,
and a part of it is, too. Each copy begins behind the prefix above it, which may be in the
tree or on the host. Where the pool is full, the prefix that was not used for the longest
time leaves it. Prefixes never displace offloaded requests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ....scheduling.job_state import JobState
from ...compat.scheduler_types import Req
from .host_pool import HostKv, Run, recompute_time_s
from .offloading import KvOffloader

Digest = bytes
"""What a prefix is known by: a digest of its tokens and of the cache's other keys."""

# Parts of a prefix are found that end at multiples of so many tokens.
BLOCK = 64
# Tells prefixes from requests in the pool.
_NAME = "prefix "


class Prompt(NamedTuple):
    """What the cache knows a prompt by."""

    tokens: array[int]
    extra_key: str | None
    cache_salt: str | None

    @classmethod
    def of(cls, req: Req) -> Prompt:
        return cls(req.origin_input_ids, req.extra_key, req.cache_salt)

    def key(self, num_tokens: int) -> RadixKey:
        """The key of the first tokens in the tree."""
        return RadixKey(
            token_ids=self.tokens,
            extra_key=self.extra_key,
            limit=num_tokens,
            cache_salt=self.cache_salt,
        )

    def digests(self, ends: Sequence[int]) -> list[Digest]:
        """The digests of the prefixes that end there, in ascending order."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr(self[1:]).encode())
        tokens = memoryview(self.tokens)
        digests, begin = [], 0
        for end in ends:
            digest.update(tokens[begin:end])
            digests.append(digest.digest())
            begin = end
        return digests


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """The KV of tokens [begin, end) of a prefix, which the job ``owner`` saved. Its parts
    are found by ``digests``."""

    name: str
    owner: JobState
    begin: int
    end: int
    runs: list[Run]
    digests: list[Digest]


class HostPrefixes:
    """The shared prefixes in the host pool of one scheduler, with the copies there and back
    so far."""

    def __init__(self, cache: UnifiedRadixCache, offloader: KvOffloader) -> None:
        self._cache = cache
        self._offloader = offloader
        self._page_size = int(cache.page_size)
        self._saved: dict[str, _Saved] = {}
        self._found_by: dict[Digest, _Saved] = {}
        self.num_saved = self.num_restored = 0

    @property
    def room(self) -> int:
        """Tokens of further prefixes that the pool has room for."""
        return self._offloader.room.num_free * self._page_size

    def save(
        self, job: JobState, prompt: Prompt, node: object, begin: int, end: int
    ) -> None:
        """Copy tokens [begin, end) of a prompt to the host, if there is room for them. They
        end at ``node`` in the tree, which holds all of them."""
        ends = self._ends(begin, [end])
        digests = prompt.digests(ends)
        name = _NAME + digests[-1].hex()
        if name in self._saved:
            return
        pages = (end - begin) // self._page_size
        if not self._make_room(pages):
            return
        cost_s = recompute_time_s(job.plan.cost, end - begin, begin)
        runs = self._offloader.room.take(name, pages, cost_s)
        saved = _Saved(name, job, begin, end, runs, digests)
        self._offloader.wait_for_forward()
        slots = self._cache.path_device_indices(node)[begin:end]
        self._offloader.save(name, slots, saved.runs)
        self._saved[name] = saved
        self._found_by.update(dict.fromkeys(digests, saved))
        self.num_saved += 1

    def _make_room(self, pages: int) -> bool:
        """Drop the prefixes unused for longest until there is room for so many pages. False
        if requests hold too much of the pool."""
        room = self._offloader.room
        ours = sum(each.end - each.begin for each in self._saved.values())
        if pages > room.num_free + ours // self._page_size:
            return False
        while pages > room.num_free:
            self.drop(next(iter(self._saved)))
        return True

    def _ends(self, begin: int, depths: Sequence[int]) -> list[int]:
        """Where prefixes are known to end behind ``begin``, in ascending order."""
        block = BLOCK // self._page_size * self._page_size or self._page_size
        blocks = range(begin // block * block + block, depths[-1], block)
        return sorted({*blocks, *(depth for depth in depths if depth > begin)})

    def restore(
        self,
        prompt: Prompt,
        depths: Sequence[int],
        reserve: int,
        make_room: Callable[[int], None],
    ) -> int:
        """Put prefixes of a prompt back into the tree. They are not locked there.

        Args:
            depths: where the prefixes end, in ascending order.
            reserve: tokens of KV that must be free or evictable afterwards.
            make_room: unpins prefixes until so many tokens are, as far as possible.

        Returns:
            The tokens of the prompt that the tree holds now. 0 if nothing of it is on the
                host, or there is too little KV.
        """
        if not self._saved:
            return 0
        match: MatchResult = self._cache.match_prefix(
            MatchPrefixParams(key=prompt.key(depths[-1]))
        )
        matched, node = match.device_prefix_len, match.last_device_node
        parts = self._parts(prompt, depths, matched)
        if not parts:
            return 0
        end = parts[-1][1]
        # Locked first, or making room could evict it.
        lock = self._cache.lock(node)
        make_room(end - matched + reserve)
        self._offloader.wait_for_forward()
        slots = self._offloader.allocate(end - matched, reserve)
        if slots is not None and self._parts(prompt, depths, matched) != parts:
            # What made room was saved on the host, where a part had to make room for it.
            self._cache.token_to_kv_pool_allocator.free(slots)
            slots = None
        if slots is not None:
            self._load(parts, slots, matched)
            above = self._cache.path_device_indices(node)[:matched]
            self._cache.insert(
                InsertParams(
                    key=prompt.key(end),
                    value=torch.cat([above.to(slots.dtype), slots]).to(torch.int64),
                    prev_prefix_len=matched,
                )
            )
        self._cache.unlock(lock)
        return 0 if slots is None else end

    def missing(
        self, prompt: Prompt, depths: Sequence[int]
    ) -> tuple[list[HostKv], int]:
        """The KV that :meth:`restore` would load, and the tokens of the prompt that the tree
        would hold then: 0 if nothing of it is on the host."""
        if not self._saved or not depths:
            return [], 0
        match: MatchResult = self._cache.match_prefix(
            MatchPrefixParams(key=prompt.key(depths[-1]))
        )
        parts = self._parts(prompt, depths, match.device_prefix_len)
        found = [HostKv(p.name, p.end - p.begin, p.runs) for p, _ in parts]
        return found, parts[-1][1] if parts else 0

    def _load(
        self, parts: list[tuple[_Saved, int]], slots: torch.Tensor, matched: int
    ) -> None:
        at = matched
        for saved, end in parts:
            here = slots[at - matched : end - matched]
            self._offloader.load(saved.name, here, saved.runs, at - saved.begin)
            at = end
            self._saved[saved.name] = self._saved.pop(saved.name)  # the last one used
        self.num_restored += len(parts)

    def drop(self, name: str) -> bool:
        """Free the pages of a prefix; False if this is the name of no prefix here."""
        saved = self._saved.pop(name, None)
        if saved is None:
            return False
        for digest in saved.digests:
            if self._found_by.get(digest) is saved:
                del self._found_by[digest]
        self._offloader.forget(name)
        return True

    def drop_of(self, job: JobState) -> None:
        for saved in list(self._saved.values()):
            if saved.owner is job:
                self.drop(saved.name)

    def drop_all(self) -> None:
        for name in list(self._saved):
            self.drop(name)

    def _parts(
        self, prompt: Prompt, depths: Sequence[int], matched: int
    ) -> list[tuple[_Saved, int]]:
        """The prefixes on the host that continue what the tree holds, and the tokens of
        the prompt with each."""
        ends = self._ends(matched, depths)
        parts: list[tuple[_Saved, int]] = []
        for end, digest in zip(ends[::-1], prompt.digests(ends)[::-1], strict=True):
            saved = self._found_by.get(digest)
            if saved is None:
                continue
            if parts and end < parts[-1][0].begin:
                parts.clear()  # tokens between them are nowhere
            if not parts or saved.begin < parts[-1][0].begin:
                parts.append((saved, end))
            if saved.begin <= matched:
                return parts[::-1]
        return []
