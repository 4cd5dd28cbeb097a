"""The parts of SGLang's main process that we use, as protocols.

Each lists only the attributes and methods that we read or call. SGLang's own classes
satisfy them. Their declared types differ between releases and are mostly missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypeAlias, TypedDict

from ...config import OfflineBatchConfig

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from transformers import PreTrainedTokenizerBase

JsonObject: TypeAlias = dict[str, Any]
"""A decoded JSON object."""

TokenIds: TypeAlias = list[int] | list[list[int]] | None
"""The prompts of a request: one, several, or None where they are text."""

TemplateManager: TypeAlias = object
"""``sglang.srt.parser.template_manager.TemplateManager``, which is only passed on."""


class OfflineArgs(Protocol):
    """SGLang's server arguments with ours, in offline mode."""

    model_path: str
    served_model_name: str | None
    tp_size: int
    pp_size: int
    ep_size: int
    dp_size: int
    nnodes: int
    tokenizer_worker_num: int
    tool_call_parser: str | None
    quantization: str | None
    kv_cache_dtype: str
    dtype: str
    max_total_tokens: int | None
    max_running_requests: int | None
    attention_backend: str | None
    decode_attention_backend: str | None
    enable_metrics: bool
    enable_torch_compile: bool
    custom_sigquit_handler: Callable[..., None] | None
    enable_hierarchical_cache: bool
    hicache_ratio: float | None
    hicache_size: int
    offline_batch: bool
    offline_batch_config: str | None
    offline_batch_dir: str | None
    _offline_from_cli: bool

    @property
    def offline_config(self) -> OfflineBatchConfig: ...

    def resolve_once(self) -> None: ...


class EngineRequest(Protocol):
    """``GenerateReqInput`` or ``EmbeddingReqInput``: a request to the engine."""

    rid: str | list[str] | None
    input_ids: TokenIds
    text: str | list[str] | None
    sampling_params: JsonObject | list[JsonObject] | None
    lora_path: str | list[str | None] | None
    is_single: bool
    batch_size: int

    def __getitem__(self, index: int) -> EngineRequest: ...
    def contains_mm_input(self) -> bool: ...
    def normalize_batch_and_arguments(self) -> None: ...


EngineAnswer: TypeAlias = JsonObject | list[JsonObject] | None
"""The engine's answer to a request: for one sequence or several, None if it failed. Token
counts of a sequence, and how it ended, are in its ``meta_info``."""


class SchedulerState(TypedDict):
    """The internal state of one scheduler, as in ``/server_info``.

    offline_batch: ours, of ``MarkedScheduler`` and ``OfflineScheduler``. A scheduler
        without our hooks has none.
    memory_usage: ``token_capacity`` is the tokens of KV.
    attention_backend, decode_attention_backend, kv_cache_dtype: arguments, with what
        SGLang chose where the user did not.
    step_time_dict: seconds of decode steps, by the number of rows, if they are kept.
    """

    offline_batch: JsonObject
    memory_usage: dict[str, int]
    effective_max_running_requests_per_dp: int
    attention_backend: NotRequired[str | None]
    decode_attention_backend: NotRequired[str | None]
    kv_cache_dtype: NotRequired[str]
    step_time_dict: NotRequired[Mapping[int, list[float]]]


class TokenizerManager(Protocol):
    """``sglang.srt.managers.tokenizer_manager.TokenizerManager``."""

    server_args: OfflineArgs
    model_config: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None
    served_model_name: str
    gracefully_exit: bool
    is_pause: bool
    is_generation: bool
    elastic_worker_count: int  # DP ranks
    rid_to_state: Mapping[str, Any]
    context_len: int
    allow_auto_truncate: bool
    mm_processor: Any
    max_req_input_len: int | None
    serving_chat_class: Callable[..., OpenAIServingBase]
    # A ``TypeBasedDispatcher``, which another one can be added to.
    _result_dispatcher: Any

    def _dispatch_to_scheduler(self, obj: object) -> None: ...
    async def get_internal_state(self) -> list[SchedulerState]: ...
    async def flush_cache(self) -> object: ...
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...
    def generate_request(
        self, obj: EngineRequest, request: None
    ) -> AsyncGenerator[EngineAnswer]: ...
    def _validate_one_request(
        self, obj: EngineRequest, input_ids: list[int]
    ) -> None: ...
