"""Whether KV can be moved to the host: that of a server, and that of one request."""

from __future__ import annotations

from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel

from ...compat.scheduler_types import OffloadingScheduler, Req


def why_unsupported(scheduler: OffloadingScheduler) -> str | None:
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
    """Whether the KV of requests that make room is copied to the host at all.

    With pipeline parallelism, other micro-batches run meanwhile. Requests that make room
    are computed again.
    """
    return bool(get_parallel().pp_size == 1)


def can_offload(req: Req) -> bool:
    """Whether a request can be offloaded: it decodes, nothing of it is in flight, and
    it has no state besides its KV.

    False for a request whose last result is still in flight (see
    :func:`drain_results`). Never True for beams, sessions, images, embeddings as input,
    and records that SGLang keeps per KV slot (routed experts, indexer top-k).
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
    return not own_state and _is_quiet(req)


def _is_quiet(req: Req) -> bool:
    # A running request has KV of all tokens but the last one, which is the input of
    # the next step. A forward in flight has KV of that one already.
    return (
        not req.finished()
        and req.to_finish is None
        and req.inflight_middle_chunks <= 0
        and len(req.output_ids) > 0
        and req.kv.holds_kv
        and req.kv.kv_committed_len == req.kv.kv_allocated_len == req.seqlen - 1
    )
