"""Moves the KV of running requests to the host, and back later.

SGLang's own answer to a full KV cache is retraction: it drops the KV of a request and
prefills prompt and output again. Offloading copies the KV to a pool of host memory
(:mod:`.host_pool`) instead. An offloaded request owns neither a row nor KV on the device,
and SGLang's memory checks hold meanwhile.

The first ``shared_len`` tokens of a request may stay in the prefix tree, where other
requests use them too. They are not locked there. If the tree evicts them, the request
cannot resume and returns to the queue (:meth:`KvOffloader.give_up`).

All decisions depend on the state of the scheduler alone, which is the same on all ranks of
a TP group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from ...compat.scheduler_types import Req, ScheduleBatch, Scheduler
from .host_pool import HostPool, HostRoom, Run, chosen_bytes, kv_buffers, num_pages_of
from .token_counts import count_again, counts_tokens


def why_unsupported(scheduler: Scheduler) -> str | None:
    """The reason why requests of this server cannot be offloaded, or None if they can.

    The KV of other pools has parts besides these buffers, or slots that are more than
    numbers. Other modes keep state per row or have loops of their own.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    pool, tree = allocator.get_kvcache(), scheduler.tree_cache
    rows = scheduler.req_to_token_pool
    ngram = scheduler.ngram_embedding_manager
    obstacles = {
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "--disaggregation-mode prefill": scheduler.disaggregation_mode
        == DisaggregationMode.PREFILL,
        "a diffusion model": scheduler.dllm_config is not None,
        "an encoder-decoder model": scheduler.model_config.is_encoder_decoder,
        "n-gram embeddings": ngram.enabled or ngram.engram_hasher is not None,
        "HiSparse": scheduler.enable_hisparse,
        "a hierarchical cache": getattr(tree, "cache_controller", None) is not None,
        f"a {type(tree).__name__}": not isinstance(tree, UnifiedRadixCache),
        f"a {type(allocator).__name__}": type(allocator)
        not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator),
        f"a {type(pool).__name__}": type(pool)
        not in (MHATokenToKVPool, MLATokenToKVPool),
        f"a {type(rows).__name__}": type(rows)
        not in (ReqToTokenPool, DecodeReqToTokenPool),
        "KV per head (SGLANG_USE_HND_KVCACHE)": getattr(pool, "use_hnd", False),
        "scaled KV": getattr(pool, "k_scale_buffer", None) is not None,
        "pages wider than the tree's": allocator.page_size != tree.page_size,
    }
    return next((name for name, found in obstacles.items() if found), None)


def copies_kv() -> bool:
    """Whether the KV of requests that make room is copied to the host at all. With pipeline
    parallelism other micro-batches run meanwhile, and such requests are computed again."""
    return bool(get_parallel().pp_size == 1)


def can_offload(req: Req) -> bool:
    """Whether a request can be offloaded: it decodes, nothing of it is in flight (see
    :func:`drain_results`), and it has no state besides its KV.

    Never True for beams, sessions, images, embeddings as input, and records that SGLang
    keeps per KV slot (routed experts, indexer top-k).
    """
    own_state = (
        req.beam_group is not None
        or req.session is not None
        or req.multimodal_inputs is not None
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.skip_radix_cache_insert
        or req.return_routed_experts
        or req.return_indexer_topk
        or req.kv.holds_mamba
    )
    # A running request has KV of all tokens but the last one, which is the input of
    # the next step. A forward in flight has KV of that one already.
    return (
        not own_state
        and not req.finished()
        and req.to_finish is None
        and req.inflight_middle_chunks <= 0
        and len(req.output_ids) > 0
        and req.kv.holds_kv
        and req.kv.kv_committed_len == req.kv.kv_allocated_len == req.seqlen - 1
    )


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OffloadedRequest:
    """A request on the host, between :meth:`KvOffloader.offload` and its resumption."""

    # SGLang's Req. It owns neither a row nor KV.
    req: Req
    # Prompt tokens left to the tree, in whole pages. The saved KV begins here.
    shared_len: int
    # Tokens of KV on the host, which belong to positions
    # [shared_len, shared_len + num_tokens).
    num_tokens: int
    # The pages that they have there.
    runs: list[Run]

    @property
    def end(self) -> int:
        return self.shared_len + self.num_tokens


def make_offloader(scheduler: Scheduler) -> KvOffloader:
    """An offloader of the sizes in the arguments.

    Raises:
        EngineError: as of :class:`KvOffloader`.
    """
    if not copies_kv():
        return KvOffloader(scheduler, 0)
    return KvOffloader(scheduler, chosen_bytes(scheduler))


def drain_results(scheduler: Scheduler) -> int:
    """Process the results that the overlap loop holds back, and return their number.

    Call it in ``get_next_batch_to_run``, before or inside SGLang's own. Afterwards all
    tokens are known and no forward is in flight. The loop would process the result of
    ``scheduler.last_batch`` after the next launch. With ``last_batch`` None it takes
    nothing more from the queue. Keep using the ``last_batch`` that
    ``get_next_batch_to_run`` got as its argument, since a prefill must still be merged.
    Requests may have finished here, so filter the batches that you hold.
    """
    num_results = len(scheduler.result_queue)
    while scheduler.result_queue:
        batch, result = scheduler.result_queue.popleft()
        scheduler.process_batch_result(batch, result)
    if num_results:
        scheduler.last_batch = None
    return num_results


class KvOffloader:
    """Moves requests of one scheduler between the device and host memory.

    Args:
        pool_bytes: size of the host pool of this rank. None is four times the size of the
            device's KV, but at most a quarter of the free memory, shared by the machine's
            ranks.

    Attributes:
        room, pool: the pages of the host pool, by request, and their memory.
        near: a ``KvPrefetch`` with copies of some of it near the device, if there is one.
        num_prefetched: requests that resumed from there so far.
        most_bytes: the most that was in use so far.

    Raises:
        EngineError: the pool is larger than the free memory.
    """

    def __init__(self, scheduler: Scheduler, pool_bytes: int | None) -> None:
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._rows = scheduler.req_to_token_pool
        self._page_size: int = self._allocator.page_size
        buffers = kv_buffers(self._allocator.get_kvcache())
        page_bytes = self._page_size * sum(
            each[0].numel() * each.itemsize for each in buffers
        )
        num_pages = num_pages_of(scheduler, page_bytes, len(buffers[0]), pool_bytes)
        self.room = HostRoom(num_pages)
        self.pool = HostPool(buffers, num_pages, self._page_size)
        self.near: Any = None
        self.num_prefetched = 0
        self.host_tokens = 0
        self.most_bytes = 0
        logger.info(
            "Host memory for KV of offloaded requests: %.2f GB, %d tokens.",
            self.pool.num_bytes / 1e9,
            num_pages * self._page_size,
        )

    @property
    def host_bytes(self) -> int:
        """Memory of the pool that is in use."""
        used = (self.room.num_pages - self.room.num_free) * self._page_size
        return int(used * self.pool.token_bytes)

    def num_pages(self, req: Req, shared_len: int) -> int:
        tokens: int = req.kv.kv_committed_len - shared_len
        return -(-tokens // self._page_size)

    def offload(
        self, req: Req, shared_len: int = 0, cost_s: float = 0.0
    ) -> OffloadedRequest:
        """Copy the KV of ``req`` after ``shared_len`` tokens to the host; free its row and
        its KV.

        The request has to be :func:`can_offload`, and the caller removes it from the
        running batch (``filter_batch``). Nothing is put into the tree.

        Args:
            shared_len: tokens of the request that the tree owns now, in whole pages.
            cost_s: seconds to compute the request again instead.

        Raises:
            ValueError: the pool has too few free pages.
        """
        end = req.kv.kv_committed_len
        runs = self.room.take(req.rid, self.num_pages(req, shared_len), cost_s)
        # A copy: the row is given away while it is read.
        slots = self._rows.req_to_token[req.kv.req_pool_idx, shared_len:end].clone()
        self.save(req.rid, slots, runs)
        self._release(req)
        offloaded = OffloadedRequest(req, shared_len, end - shared_len, runs)
        self.host_tokens += offloaded.num_tokens
        self.most_bytes = max(self.most_bytes, self.host_bytes)
        return offloaded

    def reserve(self, name: str, num_tokens: int) -> list[Run]:
        """Take pages for KV that comes from another server. It is never given up for
        others.

        Raises:
            ValueError: too few pages are free.
        """
        pages = self._whole_pages(num_tokens) // self._page_size
        runs = self.room.take(name, pages, math.inf)
        self.most_bytes = max(self.most_bytes, self.host_bytes)
        return runs

    def received(self, req: Req, num_tokens: int, runs: list[Run]) -> OffloadedRequest:
        """A request whose first ``num_tokens`` tokens of KV have come to the pages of its
        name."""
        self.host_tokens += num_tokens
        return OffloadedRequest(req, 0, num_tokens, runs)

    def discard(self, req: Req) -> None:
        """Free the row and the KV of a request that could be offloaded. It is then as after
        :meth:`give_up`."""
        self._release(req)
        req.reset_for_retract()

    def _release(self, req: Req) -> None:
        release_kv_cache(req, self._tree, checkpoint=False)
        req.kv.cache_protected_len = 0
        req.last_node = None

    def save(self, name: str, slots: torch.Tensor, runs: Sequence[Run]) -> None:
        """Copy the KV of ``slots`` ``[n]`` to the host, to these pages, which have this
        name."""
        self.pool.save(slots, runs)
        if self.near is not None:
            self.near.keep(name, slots)

    def load(
        self, name: str, slots: torch.Tensor, runs: Sequence[Run], skip: int
    ) -> bool:
        """Copy KV on the host to ``slots`` ``[n]``: of these pages, which have this name,
        without the first ``skip`` tokens.

        Returns:
            Whether it was near. If not, the next forward pass waits for the copy.
        """
        if self.near is not None and self.near.load(name, slots, skip):
            return True
        self.pool.load(slots, runs, skip)
        return False

    def tokens_to_resume(self, offloaded: OffloadedRequest) -> int | None:
        """KV to allocate on the device, in tokens (whole pages). None if the tree has lost
        some of the first ``shared_len`` tokens. The tree is only read: nothing is split,
        locked or touched."""
        matched = 0
        if not self._tree.disable:
            matched, _, _ = self._tree.tree_core.match_full_device_prefix(
                _key(offloaded)
            )
        if matched < offloaded.shared_len:
            return None
        return self._whole_pages(offloaded.end - matched)

    def resume(
        self, offloaded: OffloadedRequest, reserve: int = 0
    ) -> ScheduleBatch | None:
        """Resume a request. Cached prefixes are evicted to make room.

        Args:
            reserve: tokens of KV that must be free or evictable afterwards.

        Returns:
            A decode batch of it, which the caller merges into the running batch. None if it
            does not fit or has lost its prefix.
        """
        self.wait_for_forward()
        if not self._give_kv(offloaded, reserve):
            return None
        req = offloaded.req
        batch = self._decode_batch(req)
        if counts_tokens(req.sampling_params):
            count_again(batch, len(req.output_ids) - 1)  # the next decode counts itself
        return batch

    def wait_for_forward(self) -> None:
        """Have copies wait for a forward in flight. It may still write KV that the tree
        holds, and to slots and rows that a finished request just gave back."""
        if self._scheduler.enable_overlap:
            self._scheduler.schedule_stream.wait_stream(self._scheduler.forward_stream)

    def give_up(self, offloaded: OffloadedRequest) -> Req:
        """Drop the saved KV and return the request as a retracted one, for
        ``_add_request_to_queue(req, is_retracted=True)``. It is prefilled again with all
        its output."""
        self.drop(offloaded)
        offloaded.req.reset_for_retract()
        return offloaded.req

    def drop(self, offloaded: OffloadedRequest) -> None:
        """Free the host memory of a request that will not resume."""
        self.forget(offloaded.req.rid)
        self.host_tokens -= offloaded.num_tokens

    def forget(self, name: str) -> None:
        """Give pages back, and those of the buffer with the same KV."""
        if self.near is not None:
            self.near.drop(name)
        self.room.give_back(name)

    def _whole_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size) * self._page_size

    def _give_kv(self, offloaded: OffloadedRequest, reserve: int) -> bool:
        match: MatchResult = self._tree.match_prefix(
            MatchPrefixParams(key=_key(offloaded))
        )
        matched, node = match.device_prefix_len, match.last_device_node
        # Locked first, or making room could evict it.
        lock = self._tree.lock(node)
        slots = None
        if matched >= offloaded.shared_len and self._rows.available_size() > 0:
            slots = self.allocate(offloaded.end - matched, reserve)
        if slots is None:
            self._tree.unlock(lock)
            return False
        req = offloaded.req
        self._rows.alloc([req])
        row = req.kv.req_pool_idx
        if matched:
            shared = self._tree.path_device_indices(node)[:matched]
            self._rows.write((row, slice(0, matched)), shared)
        self._rows.write((row, slice(matched, matched + len(slots))), slots)
        # The tree may have more of it by now.
        skip = matched - offloaded.shared_len
        self.num_prefetched += self.load(req.rid, slots, offloaded.runs, skip)
        req.lock, req.last_node = lock, node
        req.kv.cache_protected_len = matched
        req.kv.cache_inserted_len = min(req.kv.cache_inserted_len, matched)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = offloaded.end
        self.drop(offloaded)
        return True

    def allocate(self, num_tokens: int, reserve: int) -> torch.Tensor | None:
        """Slots ``[num_tokens]`` of new pages, or None if they do not fit."""
        need = self._whole_pages(num_tokens)
        free = self._allocator.available_size() + self._tree.evictable_size()
        if need + reserve > free:
            return None
        self._allocator.evict_to_free_tokens(self._tree, need)
        slots = self._allocator.alloc(need)
        # The next tokens take the rest of the last page, as usual.
        return None if slots is None else slots[:num_tokens]

    def _decode_batch(self, req: Req) -> ScheduleBatch:
        """A batch ready for ``merge_batch`` or ``prepare_for_decode``."""
        scheduler = self._scheduler
        batch: ScheduleBatch = schedule_batch.ScheduleBatch.init_new(
            reqs=[req],
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self._allocator,
            tree_cache=self._tree,
            model_config=scheduler.model_config,
            enable_overlap=scheduler.enable_overlap,
            spec_algorithm=scheduler.spec_algorithm,
        )
        batch.multimodal_inputs = [None]
        rows = torch.tensor([req.kv.req_pool_idx], dtype=torch.int64)
        lens = torch.tensor([req.kv.kv_committed_len])
        batch.req_pool_indices_cpu, batch.seq_lens_cpu = rows, lens
        batch.req_pool_indices = rows.to(batch.device)
        batch.seq_lens = lens.to(batch.device)
        batch.orig_seq_lens = lens.to(batch.device, torch.int32)
        if batch.return_logprob:
            batch.top_logprobs_nums = [req.logprob.top_logprobs_num]
            batch.token_ids_logprobs = [req.logprob.token_ids_logprob]
        # The next step reads its input from here, row by row.
        last_tokens = torch.tensor([req.output_ids[-1]])
        scheduler.future_map.stash(
            batch.req_pool_indices,
            RelayPayload(bonus_tokens=last_tokens.to(batch.device)),
        )
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(
            batch, scheduler.model_config.vocab_size
        )
        return batch


def _key(offloaded: OffloadedRequest) -> RadixKey:
    req = offloaded.req
    return RadixKey(
        token_ids=req.origin_input_ids + req.output_ids,
        extra_key=req.extra_key,
        limit=offloaded.end,
        cache_salt=req.cache_salt,
    )
