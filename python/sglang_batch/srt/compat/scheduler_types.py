"""SGLang's scheduler, its batches and requests, typed as far as this package uses them.

mypy does not read SGLang's sources. Each protocol here lists those attributes and methods
of a class that ``srt`` reads, sets or calls throughout. Classes that few modules use are
named there as they are. Methods and their parameters are in :mod:`.private_api`, which
compares them with the installed release.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from .server_types import OfflineArgs

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler import NextBatchPlan
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams


class ReqKv(Protocol):
    """The KV that a request holds on the device. Lengths are in tokens."""

    req_pool_idx: int
    kv_committed_len: int
    kv_allocated_len: int
    # The first tokens, which the prefix tree owns.
    cache_protected_len: int
    cache_inserted_len: int
    holds_kv: bool
    holds_mamba: bool


class Req(Protocol):
    """``sglang.srt.managers.schedule_batch.Req``, one request."""

    rid: str
    origin_input_ids: array[int]
    output_ids: array[int]
    seqlen: int
    sampling_params: SamplingParams
    stream: bool
    return_logprob: bool
    extra_key: str | None
    cache_salt: str | None
    logprob: Any
    time_stats: Any
    arrival_processed_tokens: int
    # The reason once the request has ended, or once it will end with its next token.
    finished_reason: object | None
    to_finish: object | None
    # Tokens of the output up to its end.
    finished_len: int | None
    require_reasoning: bool
    kv: ReqKv
    lock: TreeLock | None
    last_node: object | None
    # Prompt and output as they are prefilled: all tokens, those found in the cache, and
    # the end of the part that is computed or was last scheduled.
    full_untruncated_fill_ids: Sequence[int]
    prefix_len: int
    extend_end: int
    inflight_middle_chunks: int
    # State that offloading would lose.
    beam_group: Any
    session: object | None
    lora_id: str | None
    multimodal_inputs: object | None
    input_embeds: object | None
    positional_embed_overrides: object | None
    skip_radix_cache_insert: bool
    return_routed_experts: bool
    return_indexer_topk: bool

    def finished(self) -> bool: ...
    def update_finish_state(self, new_accepted_len: int = 1) -> None: ...
    def set_finish_with_abort(
        self, error_msg: str, status_code: int, err_type: str
    ) -> None: ...
    def reset_for_retract(self) -> None: ...


class ScheduleBatch(Protocol):
    """``sglang.srt.managers.schedule_batch.ScheduleBatch``: the requests of a step, or
    those that run."""

    reqs: list[Req]
    device: torch.device
    enable_overlap: bool
    spec_algorithm: Any
    forward_mode: ForwardMode
    # Of a mixed step, the requests that decode.
    decoding_reqs: list[Req] | None
    # Of a batch with prompts: its new tokens, in all and by row.
    extend_num_tokens: int | None
    extend_lens: list[int]
    # SGLang's mark that no row is left, which it removes when a request leaves.
    batch_is_full: bool
    sampling_info: SamplingBatchInfo
    return_logprob: bool
    # Of a batch with prompts, by row: the number of its input tokens before the first
    # one whose log probability is wanted.
    extend_logprob_start_lens: list[int]
    top_logprobs_nums: list[int]
    token_ids_logprobs: list[list[int] | None]
    multimodal_inputs: list[None]
    req_pool_indices: torch.Tensor
    req_pool_indices_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    orig_seq_lens: torch.Tensor

    def is_empty(self) -> bool: ...
    def filter_batch(self, reqs_to_exclude: list[Req] | None = None) -> None: ...
    def merge_batch(self, other: ScheduleBatch) -> None: ...
    def check_decode_mem(self) -> bool: ...
    def prepare_for_decode(self) -> None: ...
    def mix_with_running(self, running_batch: ScheduleBatch) -> None: ...


BuildPrefill: TypeAlias = Callable[[ScheduleBatch], "NextBatchPlan"]
"""SGLang's ``get_new_batch_prefill``, which gets the running batch."""


class Scheduler(Protocol):
    """``sglang.srt.managers.scheduler.Scheduler``, one scheduler process."""

    server_args: OfflineArgs
    model_config: ModelConfig
    waiting_queue: list[Req]
    chunked_req: Req | None
    chunked_prefill_size: int | None
    is_mixed_chunk: bool
    last_batch: ScheduleBatch | None
    # The overlap loop's results that are not processed yet.
    result_queue: deque[tuple[ScheduleBatch, object]]
    tree_cache: UnifiedRadixCache
    token_to_kv_pool_allocator: TokenToKVPoolAllocator
    req_to_token_pool: ReqToTokenPool
    enable_overlap: bool
    enable_hisparse: bool
    tp_cpu_group: torch.distributed.ProcessGroup
    schedule_stream: torch.Stream
    forward_stream: torch.Stream
    disaggregation_mode: object
    dllm_config: object | None
    # ``OfflineSchedulePolicy``.
    policy: Any
    future_map: Any
    grammar_manager: Any
    metrics_reporter: Any
    ngram_embedding_manager: Any
    spec_algorithm: Any

    def process_batch_result(self, batch: ScheduleBatch, result: object) -> None: ...
    def get_num_allocatable_reqs(
        self, running_bs: int, *, running_batch: ScheduleBatch
    ) -> int: ...
    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None: ...
    def _reqs_finishing_inflight(self, batch: ScheduleBatch) -> list[Req]: ...
