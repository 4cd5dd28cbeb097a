"""SGLang's scheduler and its parts, typed as far as this package uses them.

mypy does not read SGLang's sources. Each protocol here lists those attributes and methods
of one of SGLang's classes that ``srt`` reads, sets or calls. Methods and their parameters
are in :mod:`.private_api`, which compares them with the installed release.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from .server_types import ModelConfig, OfflineArgs

TreeNode: TypeAlias = object
"""A node of SGLang's prefix tree."""

AttentionBackend: TypeAlias = object
"""One of SGLang's attention backends, which is only passed on."""

KvPool: TypeAlias = object
"""The device's KV. Offloading checks attributes of some types by name."""


class TreeLock(Protocol):
    """A lock on a prefix in the tree, as ``TreeCache.lock`` returned it."""

    node: TreeNode


class SamplingParams(Protocol):
    max_new_tokens: int | None
    min_new_tokens: int
    skip_special_tokens: bool
    custom_params: object
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


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
    last_node: TreeNode | None
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


class ReceivedReq(Req, Protocol):
    """A request on a decode server, whose prompt a prefill server computes."""

    grammar: Any
    is_retracted: bool
    already_computed: int
    # While all of its tokens are computed again, but for the last one, which was sent.
    pd_rebootstrap_in_progress: bool
    pd_rebootstrap_forced_output_id: int | None


class ForwardMode(Protocol):
    def is_decode(self) -> bool: ...
    def is_mixed(self) -> bool: ...
    def is_extend(self) -> bool: ...


class SamplingInfo(Protocol):
    # Its penalizers count output tokens in attributes that are tensors ``[rows, ...]``.
    penalizer_orchestrator: Any


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
    sampling_info: SamplingInfo
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


class LogitsOutput(Protocol):
    customized_info: object | None


class PrefillPlan(Protocol):
    """``NextBatchPlan``: a batch to run now, if any, and the one that runs on."""

    batch_to_run: ScheduleBatch | None
    running_batch: ScheduleBatch


BuildPrefill: TypeAlias = Callable[[ScheduleBatch], PrefillPlan]
"""SGLang's ``get_new_batch_prefill``, which gets the running batch."""


class KvAllocator(Protocol):
    """``TokenToKVPoolAllocator``: slots of the device's KV, in tokens."""

    page_size: int

    def available_size(self) -> int: ...
    def alloc(self, need_size: int) -> torch.Tensor | None: ...
    def get_kvcache(self) -> KvPool: ...


class RowPool(Protocol):
    """``ReqToTokenPool``: a row of slot numbers for each running request."""

    req_to_token: torch.Tensor

    def available_size(self) -> int: ...
    def alloc(self, reqs: list[Req]) -> list[int] | None: ...
    def write(
        self, indices: tuple[int, slice[int, int]], values: torch.Tensor
    ) -> None: ...


class PrefixMatch(Protocol):
    device_prefix_len: int
    last_device_node: TreeNode


class TreeCache(Protocol):
    """``UnifiedRadixCache``: KV of prefixes, which requests share."""

    disable: bool
    page_size: int
    tree_core: Any
    token_to_kv_pool_allocator: KvAllocator

    def match_prefix(self, params: object) -> PrefixMatch: ...
    def lock(self, node: TreeNode) -> TreeLock: ...
    def unlock(self, lock: TreeLock) -> None: ...
    def evictable_size(self) -> int: ...
    def path_device_indices(self, node: TreeNode) -> torch.Tensor: ...


class EvictResult(Protocol):
    num_tokens_evicted: int


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
    tree_cache: TreeCache
    token_to_kv_pool_allocator: KvAllocator
    req_to_token_pool: RowPool
    enable_overlap: bool
    enable_hisparse: bool
    tp_cpu_group: torch.distributed.ProcessGroup
    schedule_stream: torch.Stream
    forward_stream: torch.Stream
    disaggregation_mode: object
    dllm_config: object | None
    # ``OfflineSchedulePolicy``, which ``init_schedule_policy`` sets.
    policy: Any
    beam_coordinator: Any
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


class LoRAManager(Protocol):
    # Slots of adapters by their ids. None is the model alone.
    memory_pool: Any
    lora_refs: dict[str | None, Any]

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool: ...


class InternalState(Protocol):
    """``GetInternalStateReqOutput``: one scheduler's state in ``/server_info``."""

    internal_state: dict[str, object]


class AbortRequest(Protocol):
    """``AbortReq``. A ``rid`` that is no request's aborts all that begin with it."""

    rid: str
    abort_all: bool
    finished_reason: object | None


class PauseRequest(Protocol):
    """``PauseGenerationReqInput``."""

    mode: str


class ForwardBatch(Protocol):
    """``ForwardBatch``: one forward, of ``n`` rows.

    seq_lens, seq_lens_cpu: ``[n]`` KV tokens of each row after the forward, on the
        device and on the host.
    extend_seq_lens, extend_seq_lens_cpu: ``[n]`` tokens that the forward computes for
        each row of an extend.
    out_cache_loc: KV slots of the tokens that it computes.
    dimensions: of an embedding of each row, None for the model's.
    """

    forward_mode: ForwardMode
    batch_size: int
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    extend_seq_lens: torch.Tensor
    extend_seq_lens_cpu: Sequence[int]
    out_cache_loc: torch.Tensor
    dimensions: Sequence[int] | None


class AttentionLayer(Protocol):
    """``RadixAttention``: the attention of one layer, with this rank's heads."""

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window_size: int
    logit_cap: float
    is_cross_attention: bool
    attn_type: object
    xai_temperature_len: int
    use_irope: bool
    pos_encoding_mode: str


class LayerKvPool(Protocol):
    """``MHATokenToKVPool``: the KV cache, ``[num_slots, num_kv_heads, head_dim]``
    for K and for V of each layer."""

    dtype: torch.dtype
    layer_num: int

    def get_key_buffer(self, layer_id: int) -> torch.Tensor: ...
    def get_value_buffer(self, layer_id: int) -> torch.Tensor: ...
    def set_kv_buffer(
        self,
        layer: AttentionLayer,
        loc_info: object,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> None: ...


class ModelRunner(Protocol):
    """``sglang.srt.model_executor.model_runner.ModelRunner``."""

    model: torch.nn.Module
    model_config: ModelConfig
    server_args: OfflineArgs
    attn_backend: AttentionBackend
    token_to_kv_pool: LayerKvPool
    req_to_token_pool: RowPool
    device: str
    dtype: torch.dtype
    is_generation: bool
    spec_algorithm: Any
