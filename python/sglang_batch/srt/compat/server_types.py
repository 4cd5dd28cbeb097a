"""The parts of SGLang's main process that we use, as protocols.

Each lists only the attributes and methods that we read or call. SGLang's own classes
satisfy them. Their declared types differ between releases and are mostly missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypeAlias, TypedDict

from pydantic import BaseModel

from ...config import OfflineBatchConfig

if TYPE_CHECKING:
    from sglang.srt.configs.embedding_model_spec import EmbeddingModelSpec
    from sglang.srt.configs.model_config import AttentionArch

JsonObject: TypeAlias = dict[str, Any]
"""A decoded JSON object."""

TokenIds: TypeAlias = list[int] | list[list[int]] | None
"""The prompts of a request: one, several, or None where they are text."""

TemplateManager: TypeAlias = object
"""``sglang.srt.parser.template_manager.TemplateManager``, which is only passed on."""


class HfConfig(Protocol):
    """A model's configuration as transformers has it."""

    architectures: list[str] | None

    def to_dict(self) -> JsonObject: ...


class ModelConfig(Protocol):
    """``sglang.srt.configs.model_config.ModelConfig``."""

    hf_config: HfConfig
    model_path: str
    revision: str | None
    vocab_size: int
    hidden_size: int
    head_dim: int
    is_encoder_decoder: bool
    is_multimodal: bool
    is_hybrid_swa: bool
    full_attention_layer_ids: list[int] | None
    use_ngram_embedding: bool
    use_engram: bool
    # Of a server with a reasoning parser.
    think_end_ids: list[int] | None
    request_selectable_think_end_id_sequences: list[list[int]] | None
    attention_arch: AttentionArch
    embedding_model_spec: EmbeddingModelSpec

    def get_num_attention_heads(self, tensor_parallel_size: int) -> int: ...
    def get_num_kv_heads(self, tensor_parallel_size: int) -> int: ...


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


class Tokenizer(Protocol):
    """A tokenizer of transformers."""

    def __call__(self, *texts: str) -> Mapping[str, list[int]]: ...


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


class MetaInfo(TypedDict, total=False):
    """Token counts of one generated or embedded sequence, and how it ended."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    finish_reason: JsonObject | None


class SequenceAnswer(TypedDict):
    """The engine's answer for one sequence, which has more keys than these."""

    meta_info: MetaInfo


EngineAnswer: TypeAlias = SequenceAnswer | list[SequenceAnswer] | None
"""The engine's answer to a request: for one sequence or several, None if it failed."""


class ServingHandler(Protocol):
    """``OpenAIServingBase``: one of SGLang's OpenAI endpoints, which answers with a response
    object or an error response."""

    def _validate_request(self, request: BaseModel) -> str | None: ...
    def _convert_to_internal_request(
        self, request: BaseModel, raw_request: None
    ) -> tuple[EngineRequest, BaseModel]: ...
    async def _handle_non_streaming_request(
        self, adapted_request: EngineRequest, request: BaseModel, raw_request: None
    ) -> object: ...


class OfflineState(TypedDict, total=False):
    """Our part of a scheduler's state. SGLang's own scheduler has neither tier nor jobs."""

    config: str  # the settings
    tier: str  # how much of the plan the model gets, and why not all of it
    step_tokens: int  # most prompt tokens of a step
    mixed_chunk: bool
    page_size: int  # in tokens
    jobs: int  # number of open jobs
    kv_use: dict[str, int]  # the fields of ``job.engine.KvUse``
    shares_prefixes: bool  # whether attention reads shared prefixes once
    attention_ranks: int  # that share the model's devices, each with KV of its own


class SchedulerState(TypedDict):
    """The internal state of one scheduler, as in ``/server_info``.

    offline_batch: ours. A scheduler without our hooks has none.
    memory_usage: ``token_capacity`` is the tokens of KV.
    attention_backend, decode_attention_backend, kv_cache_dtype: arguments, with what
        SGLang chose where the user did not.
    step_time_dict: seconds of decode steps, by the number of rows, if they are kept.
    """

    offline_batch: OfflineState
    memory_usage: dict[str, int]
    effective_max_running_requests_per_dp: int
    attention_backend: NotRequired[str | None]
    decode_attention_backend: NotRequired[str | None]
    kv_cache_dtype: NotRequired[str]
    step_time_dict: NotRequired[Mapping[int, list[float]]]


class ControlChannel(Protocol):
    """``FanOutCommunicator``: sends a message to all DP ranks; each answers it."""

    async def __call__(self, message: object) -> list[object]: ...
    def handle_recv(self, answer: object) -> None: ...


class TokenizerManager(Protocol):
    """``sglang.srt.managers.tokenizer_manager.TokenizerManager``."""

    server_args: OfflineArgs
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    served_model_name: str
    gracefully_exit: bool
    is_pause: bool
    elastic_worker_count: int  # DP ranks
    rid_to_state: Mapping[str, Any]
    context_len: int
    mm_processor: Any
    max_req_input_len: int | None
    serving_chat_class: Callable[..., ServingHandler]
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
