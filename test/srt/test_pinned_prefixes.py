"""Evictions: pins are removed in the order of the plan, and no more than necessary."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_batch.scheduling.open_jobs import OpenJobs
from sglang_batch.srt.scheduler.kv.host_prefixes import Prompt
from sglang_batch.srt.scheduler.kv.planned_cache import (
    Pin,
    PinnedPrefixes,
    PlannedRadixCache,
)

FREE = 1
EACH = 2  # tokens of each prefix


class Uses:
    """Stands for a job's prefixes; ``pins``: the one needed last comes first."""

    def __init__(self, *pins: int, in_use: tuple[int, ...] = ()) -> None:
        prompt = Prompt(array("q"), None, None)
        self.pins = {node: Pin(f"lock {node}", prompt) for node in (*pins, *in_use)}
        self.in_use = in_use

    @property
    def idle_tokens(self) -> int:
        return EACH * len(self.pins)

    def furthest(self) -> int:
        return next((node for node in self.pins if node not in self.in_use), 0)

    def furthest_in_use(self) -> int:
        return next((node for node in self.pins if node in self.in_use), 0)

    def unpin(self, node: int) -> Pin:
        return self.pins.pop(node)

    def forget_pins(self) -> None:
        self.pins.clear()


def jobs_of(**uses: Uses) -> OpenJobs:
    jobs = OpenJobs()
    for number, (name, each) in enumerate(uses.items()):
        done = SimpleNamespace(share_s=float(number))
        jobs.add(
            SimpleNamespace(job_id=name, uses=each, priority=0, dual=False, done=done)
        )
    return jobs


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours without SGLang's tree: each prefix that is unlocked becomes evictable."""
    made = object.__new__(PlannedRadixCache)
    made.unlocked = []
    made.seen = []
    made.tree_core = SimpleNamespace(is_eagle=False)
    made.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: FREE)

    def evict(self: Any, params: EvictParams, **kwargs: Any) -> Any:
        self.seen.append(list(self.unlocked))
        return SimpleNamespace(num_tokens_evicted=params.num_tokens)

    stock = {
        "evict": evict,
        "evict_for_alloc": evict,
        "evictable_size": lambda self: EACH * len(self.unlocked),
        "unlock": lambda self, lock: self.unlocked.append(lock),
        "supports_swa": lambda self: False,
        "reset": lambda self: self.unlocked.clear(),
        "on_release": lambda self, req, *, checkpointed: None,
    }
    for name, method in stock.items():
        monkeypatch.setattr(UnifiedRadixCache, name, method)
    return made


@pytest.mark.parametrize("call", ["evict", "evict_for_alloc"])
def test_an_eviction_unpins_first_and_no_more_than_necessary(
    cache: Any, call: str
) -> None:
    cache.attach(PinnedPrefixes(cache, jobs_of(a=Uses(1, 2, 3))), lambda *_: None, list)
    getattr(cache, call)(EvictParams(num_tokens=3))
    # Before SGLang evicts.
    assert cache.seen == [["lock 1", "lock 2"]]
    assert cache.evicted_tokens == 3
    getattr(cache, call)(EvictParams(num_tokens=4))
    assert cache.unlocked == ["lock 1", "lock 2"]
    assert cache.evicted_tokens == 7


def test_prefixes_of_the_last_job_are_unpinned_first(cache: Any) -> None:
    first, last = Uses(1, 2), Uses(8, 9)
    pinned = PinnedPrefixes(cache, jobs_of(a=first, b=last))
    pinned.unpin_until_evictable(EvictParams(3 * EACH))
    assert cache.unlocked == ["lock 8", "lock 9", "lock 1"]
    pinned.unpin_until_evictable(EvictParams(100))
    assert cache.unlocked[3:] == ["lock 2"]
    assert not pinned.unpin_furthest()


def test_free_tokens_need_no_eviction(cache: Any) -> None:
    pinned = PinnedPrefixes(cache, jobs_of(a=Uses(1, 2)))
    pinned.unpin_until_free(FREE)
    assert not cache.unlocked
    pinned.unpin_until_free(FREE + 1)
    assert cache.unlocked == ["lock 1"]


def test_what_is_reachable_is_tried_only_with_several_jobs(cache: Any) -> None:
    alone = PinnedPrefixes(cache, jobs_of(a=Uses(1, 2)))
    assert alone.reachable_tokens(100) == FREE + 2 * EACH
    assert not cache.unlocked
    several = PinnedPrefixes(cache, jobs_of(a=Uses(1), b=Uses(2)))
    assert several.reachable_tokens(FREE + 1) == FREE + EACH
    assert cache.unlocked == ["lock 2"]


def test_an_emptied_tree_has_no_pins_and_releases_are_reported(cache: Any) -> None:
    cache.reset()  # SGLang does so before anything is attached
    cache.on_release("early", checkpointed=True)
    uses, released = Uses(1, 2), []
    cache.attach(
        PinnedPrefixes(cache, jobs_of(a=uses)),
        lambda *call: released.append(call),
        list,
    )
    cache.on_release("req", checkpointed=False)
    assert released == [("req", False)]
    cache.reset()
    assert not uses.pins
    assert not cache.unlocked


def test_windows_need_room_of_their_own(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = {
        "supports_swa": lambda self: True,
        "swa_evictable_size": lambda self: len(self.unlocked),
    }
    for name, method in windows.items():
        monkeypatch.setattr(UnifiedRadixCache, name, method)
    pinned = PinnedPrefixes(cache, jobs_of(a=Uses(1, 2, 3)))
    pinned.unpin_until_evictable(EvictParams(EACH, swa_num_tokens=3))
    assert cache.unlocked == ["lock 1", "lock 2", "lock 3"]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("swa_evictable_size", {"swa_num_tokens": 3}),
        ("mamba_evictable_size", {"mamba_num": 3}),
    ],
)
def test_windows_and_states_of_prefixes_in_use_are_the_last_to_go(
    cache: Any, monkeypatch: pytest.MonkeyPatch, size: str, wanted: dict[str, int]
) -> None:
    monkeypatch.setattr(UnifiedRadixCache, size, lambda self: len(self.unlocked))
    pinned = PinnedPrefixes(cache, jobs_of(a=Uses(1, in_use=(5, 6)), b=Uses(2)))
    pinned.unpin_until_evictable(EvictParams(100))
    assert cache.unlocked == ["lock 2", "lock 1"]  # no KV to be had from the others
    pinned.unpin_until_evictable(EvictParams(0, **wanted))
    assert cache.unlocked == ["lock 2", "lock 1", "lock 5"]


@pytest.mark.parametrize("windows", [True, False])
def test_a_leader_with_windows_leaves_each_prefix_by_itself(
    cache: Any, monkeypatch: pytest.MonkeyPatch, windows: bool
) -> None:
    parts = []
    monkeypatch.setattr(UnifiedRadixCache, "supports_swa", lambda self: windows)
    monkeypatch.setattr(
        UnifiedRadixCache, "checkpoint", lambda self, req, *, up_to: parts.append(up_to)
    )
    pinned = PinnedPrefixes(cache, jobs_of())
    cache.attach(pinned, lambda *_: None, lambda req: [10, 20, 30, 40])
    kv = SimpleNamespace(cache_protected_len=10)
    cache.checkpoint(SimpleNamespace(kv=kv, finished=lambda: False), up_to=40)
    assert parts == ([20, 30, 40] if windows else [40])
