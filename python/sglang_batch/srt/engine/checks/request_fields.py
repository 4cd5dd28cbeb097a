"""The allowed values of each field of a request: one table of decisions.

SGLang passes most values to its scheduler as they are. A value that it did not expect
ends the process there, with the requests of everybody. Each field of SGLang's request
types is in exactly one of the tables below, with its allowed range or the reason why
nothing is to be checked. A test compares them with SGLang's types.

:mod:`.request_checks` applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .pattern_checks import check_grammar, check_pattern, check_schema

_INT32 = (1 << 31) - 1
_INT63 = (1 << 63) - 1
_FLOAT32 = 3e38
# Most sequences of one prompt. Each takes memory before it runs.
MAX_SEQUENCES = 1024
# A larger bias, divided by a low temperature, is infinite.
_MAX_BIAS = 1e9


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a range."""

    low: int = 0
    high: int = _INT32


@dataclass(frozen=True, slots=True)
class Real:
    """A number in a range, the lower end excluded if ``above``."""

    low: float = -_FLOAT32
    high: float = _FLOAT32
    above: bool = False


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of the vocabulary: one, a list, or a list of lists."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A number of tokens of the vocabulary, from 0."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Places of tokens in the prompt, in ascending order."""


@dataclass(frozen=True, slots=True)
class Biases:
    """Numbers by token id."""

    limit: float = _MAX_BIAS


@dataclass(frozen=True, slots=True)
class Text:
    """Text with a check of its own, which returns its fault."""

    check: Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Typed:
    """The type of the field is all there is to check.

    reason: why, such as that SGLang checks the value itself.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not for clients.

    reason: whose field it is.
    """

    reason: str


Rule = (
    Whole | Real | TokenIds | TokenCount | Positions | Biases | Text | Typed | Refused
)

_TEXT = Typed("text of any content")
_FLAG = Typed("true or false")
_DEPLOYED = Typed("SGLang refuses it unless the server was launched for it")
_MEDIA = Typed("only read by a multimodal processor, in the main process")
_SET_BY_SGLANG = Refused("set by SGLang")
_DISAGGREGATED = "a router sets it for servers that prefill for others"

# Fields of ``SamplingParams``.
SAMPLING_FIELDS: dict[str, Rule] = {
    "max_new_tokens": Whole(),
    "stop": Typed("SGLang counts and encodes the texts"),
    "stop_token_ids": TokenIds(),
    "stop_regex": Text(check_pattern),
    "temperature": Real(0),
    "top_p": Real(0, 1, above=True),
    "top_k": Whole(-1),
    "min_p": Real(0, 1),
    "frequency_penalty": Real(-2, 2),
    "presence_penalty": Real(-2, 2),
    # A smaller one makes logits infinite.
    "repetition_penalty": Real(1e-6, 2),
    "min_new_tokens": Whole(),
    "n": Whole(1, MAX_SEQUENCES),
    "beam_width": Whole(1, 128),
    "json_schema": Text(check_schema),
    "regex": Text(check_grammar),
    "ebnf": Text(check_grammar),
    "structural_tag": Text(check_schema),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "no_stop_trim": _FLAG,
    "stream_interval": Whole(1),
    "logit_bias": Biases(),
    "sampling_seed": Whole(-_INT63 - 1, _INT63),
    "custom_params": Typed(
        "read by custom logit processors; our own checks read its stop_rules"
    ),
    "watermark": Typed("SGLang checks each of its fields"),
    "stop_strs": _SET_BY_SGLANG,
    "stop_regex_strs": _SET_BY_SGLANG,
    "stop_str_max_len": _SET_BY_SGLANG,
    "stop_regex_max_len": _SET_BY_SGLANG,
    "is_normalized": _SET_BY_SGLANG,
    "ebnf_full_assistant": Typed("set by SGLang's chat templates with their grammar"),
}

# Fields of ``GenerateReqInput`` and ``EmbeddingReqInput`` that stay in the main process,
# and those that SGLang fills in before it sends the request.
REQUEST_FIELDS: dict[str, Rule] = {
    "text": _TEXT,
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "mm_hashes": _MEDIA,
    "mm_content_hashes": _MEDIA,
    "use_audio_in_video": _MEDIA,
    "video_config": _MEDIA,
    "modalities": _MEDIA,
    "max_dynamic_patch": Whole(0, 1024),
    "min_dynamic_patch": Whole(0, 1024),
    "image_max_dynamic_patch": Whole(0, 1024),
    "video_max_dynamic_patch": Whole(0, 1024),
    "images_config": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "watermark": Typed("SGLang checks each of its fields"),
    "return_text_in_logprobs": _FLAG,
    "return_flat_raw_output_top_logprobs": _FLAG,
    "return_flat_raw_top_logprobs_b64": _FLAG,
    "log_metrics": _FLAG,
    "lora_path": Typed("SGLang looks the adapter up"),
    "data_parallel_rank": Whole(),
    "conversation_id": _TEXT,
    "background": _FLAG,
    "max_thinking_tokens": Whole(),
    "custom_labels": Typed("compared with the labels that the server allows"),
    "return_prompt_token_ids": _FLAG,
    "external_trace_header": Typed("only read by a tracer"),
    "received_time": Real(0),
    "embed_override_token_id": TokenIds(),
    "embed_overrides": Typed("tensors, which no client can send"),
    "is_cross_encoder_request": _FLAG,
    # Later fields reach the scheduler with SGLang's value.
    "http_worker_ipc": _SET_BY_SGLANG,
    "lora_id": _SET_BY_SGLANG,
    "need_wait_for_mm_inputs": _SET_BY_SGLANG,
    "num_items_assigned": _SET_BY_SGLANG,
    "encoder_urls": _SET_BY_SGLANG,
}

# Fields of the messages to the scheduler, ``TokenizedGenerateReqInput`` and
# ``TokenizedEmbeddingReqInput``: of one sequence, with the prompt's tokens.
SCHEDULER_FIELDS: dict[str, Rule] = {
    "rid": Typed("compared with the ids of jobs"),
    "http_worker_ipc": _TEXT,
    "input_text": _TEXT,
    "input_ids": TokenIds(),
    "input_embeds": Typed("its shape is compared with the model's"),
    "mm_inputs": Typed("made by SGLang's multimodal processor"),
    "token_type_ids": Typed("made by the tokenizer"),
    "sampling_params": Typed("see SAMPLING_FIELDS"),
    "return_logprob": _FLAG,
    "logprob_start_len": Whole(-1),
    "top_logprobs_num": TokenCount(),
    "token_ids_logprob": TokenIds(),
    "stream": _FLAG,
    "return_sampling_mask": _FLAG,
    "return_flat_raw_top_logprobs": _FLAG,
    "return_hidden_states": _DEPLOYED,
    "return_routed_experts": _FLAG,
    "routed_experts_start_len": Whole(),
    "return_indexer_topk": _FLAG,
    "session_id": _TEXT,
    "session_params": Typed("SGLang looks the session up"),
    "lora_id": _TEXT,
    "lora_name": _TEXT,
    "custom_logit_processor": _DEPLOYED,
    "positional_embed_overrides": Typed("tensors, which no client can send"),
    "bootstrap_host": Typed(_DISAGGREGATED),
    "bootstrap_port": Whole(0, 65_535),
    "bootstrap_room": Whole(0, _INT63),
    "bootstrap_pair_key": Typed(_DISAGGREGATED),
    "decode_tp_size": Whole(1, 65_535),
    "routed_dp_rank": Whole(),
    "disagg_prefill_dp_rank": Whole(),
    "routing_key": _TEXT,
    "require_reasoning": _FLAG,
    "priority": Whole(-_INT32),
    "extra_key": _TEXT,
    "cache_salt": _TEXT,
    "no_logs": _FLAG,
    "return_bytes": _FLAG,
    "return_entropy": _FLAG,
    "need_wait_for_mm_inputs": _FLAG,
    "num_items_assigned": Typed("made by SGLang"),
    "encoder_urls": Typed("made by SGLang"),
    "multi_item_delimiter_indices": Positions(),
    "token_indices_to_pool": Positions(),
    "decision_layout": Typed("SGLang checks it against the prompt"),
    "time_stats": Typed("made by SGLang"),
    "kv_hints": Typed("SGLang decodes it"),
    "pp_prefetch_ticketed": _FLAG,
    "sampling_logprobs_mode": Typed("one of SGLang's words"),
    "dimensions": Whole(1),
    "return_pooled_hidden_states": _FLAG,
}
