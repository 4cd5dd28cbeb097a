"""SGLang's messages to and from a scheduler as requests and answers of the dense engine.

SGLang's lists of log probabilities of a prompt begin with None, whatever position they
begin at: its scheduler takes the logits from there on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    BatchEmbeddingOutput,
    BatchTokenIDOutput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    INIT_INCREMENTAL_DETOKENIZATION_OFFSET,
)
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch.nn.functional import normalize

from ...batch_api.stop_rules import FIELD, NO_RULES, Cut, StopRules
from ...dense.row_request import (
    DenseAnswer,
    DenseRequest,
    LogprobsWanted,
    Sampling,
    Stopping,
    TokenLogprobs,
)
from ..compat.server_types import JsonObject
from .grammars import KINDS

# Fields of a request that only SGLang's own engine knows.
_UNKNOWN = (
    *("input_embeds", "mm_inputs", "positional_embed_overrides", "session_params"),
    *("custom_logit_processor", "lora_id", "return_hidden_states"),
    *("return_routed_experts", "return_sampling_mask", "return_flat_raw_top_logprobs"),
)
# The same of a request for a vector.
_UNKNOWN_OF_VECTORS = (
    *("mm_inputs", "token_type_ids", "lora_id", "positional_embed_overrides"),
    *("return_pooled_hidden_states", "multi_item_delimiter_indices"),
    *("token_indices_to_pool", "decision_layout"),
)
_PART = re.compile(r"\.(\d{6})$", re.ASCII)
_SEEDS = 1 << 63


def dense_request(
    message: TokenizedGenerateReqInput,
    *,
    longest: int,
    end_ids: frozenset[int],
    reasoning_end: Sequence[int],
) -> DenseRequest:
    """A request of SGLang, whose parameters it has checked, for the dense engine. Nothing is
    planned for it yet.

    Args:
        longest: most tokens that the context leaves for the answer, at least 1.
        end_ids: tokens that end an answer besides the model's own, unless it ignores them.
        reasoning_end: tokens that end the reasoning of this request, if it reasons.

    Raises:
        ValueError: it asks for something that only SGLang's own engine can do.
    """
    params = message.sampling_params
    asked = _asked(message, _UNKNOWN)
    asked += ["beam_width"] if (params.beam_width or 1) > 1 else []
    asked += ["watermark"] if params.watermark else []
    grammars = ((kind, getattr(params, kind)) for kind in KINDS)
    grammar = next((each for each in grammars if each[1] is not None), None)
    if grammar is not None and message.require_reasoning:
        asked.append(f"{grammar[0]} after reasoning")
    _refuse(asked)
    custom = params.custom_params
    rules = custom.get(FIELD) if isinstance(custom, dict) else None
    most = longest if params.max_new_tokens is None else params.max_new_tokens
    most = max(1, min(most, longest))  # none: its one token is dropped
    stops = frozenset(params.stop_token_ids or ())
    stopping = Stopping(
        max_new_tokens=most,
        min_new_tokens=min(params.min_new_tokens, most),
        ignore_eos=params.ignore_eos,
        token_ids=frozenset() if params.ignore_eos else end_ids | stops,
        strings=tuple(params.stop_strs or ()),
        regexes=tuple(params.stop_regex_strs or ()),
        rules=NO_RULES if rules is None else StopRules.from_text(rules),
        skip_special_tokens=params.skip_special_tokens,
        reasoning_end=tuple(reasoning_end),
    )
    return DenseRequest(
        rid=message.rid,
        input_ids=list(message.input_ids),
        stopping=stopping,
        sampling=_sampling(params, grammar, message.rid),
        logprobs=_logprobs_wanted(message),
    )


def _asked(message: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(message, name, None)]


def _refuse(asked: Sequence[str]) -> None:
    if asked:
        raise ValueError(
            f"--backend transformers does not support {', '.join(asked)}; leave it out, "
            "or use --backend sglang."
        )


def embedding_request(message: TokenizedEmbeddingReqInput) -> DenseRequest:
    """A request for a vector, as a row that decodes nothing. Raises as :func:`dense_request`."""
    _refuse(_asked(message, _UNKNOWN_OF_VECTORS))
    return DenseRequest(message.rid, list(message.input_ids), Stopping(1))


def embedding_output(
    message: TokenizedEmbeddingReqInput, answer: DenseAnswer, *, normalizes: bool
) -> BatchEmbeddingOutput:
    """A vector as a scheduler sends it. ``normalizes``: it has length 1, also with fewer
    dimensions.
    """
    vector = list(answer.vector)
    if message.dimensions is not None:
        kept = torch.tensor(vector[: message.dimensions])
        vector = (normalize(kept, dim=0) if normalizes else kept).tolist()
    return BatchEmbeddingOutput(
        rids=[message.rid],
        http_worker_ipcs=[None],
        finished_reasons=[finish_reason(answer, 0)],
        embeddings=[vector],
        prompt_tokens=[len(message.input_ids)],
        cached_tokens=[0],
        placeholder_tokens_idx=None,
        placeholder_tokens_val=None,
        retraction_counts=[0],
    )


def _sampling(params: Any, grammar: tuple[str, str] | None, rid: str) -> Sampling:
    seed = params.sampling_seed
    if seed is not None and (part := _PART.search(rid)):
        # The samples of one request have its seed, and must differ.
        seed = (seed + int(part[1])) % _SEEDS
    return Sampling(
        # SGLang takes the one most probable token for a temperature of 0.
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_k=-1 if params.top_k >= TOP_K_ALL else params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias={int(k): float(v) for k, v in (params.logit_bias or {}).items()},
        seed=seed,
        grammar=grammar,
    )


def _logprobs_wanted(message: TokenizedGenerateReqInput) -> LogprobsWanted | None:
    if not message.return_logprob:
        return None
    start, length = message.logprob_start_len, len(message.input_ids)
    if start > length:
        raise ValueError(
            f"logprob_start_len={start} is more than the {length} tokens of the prompt; "
            "use a smaller one."
        )
    return LogprobsWanted(
        top=message.top_logprobs_num,
        token_ids=tuple(message.token_ids_logprob or ()),
        prompt_from=start if 0 <= start < length else None,
    )


def token_output(
    message: TokenizedGenerateReqInput, answer: DenseAnswer, *, reasoning_tokens: int
) -> BatchTokenIDOutput:
    """An answer as a scheduler sends it to SGLang's detokenizer."""
    params, prompt = message.sampling_params, list(message.input_ids)
    count = len(answer.output_ids)
    if params.max_new_tokens == 0:
        count = 0
    output_ids = array("q", answer.output_ids[:count])
    # The detokenizer needs a few tokens before the answer: a token's text may depend
    # on them.
    before = prompt[-INIT_INCREMENTAL_DETOKENIZATION_OFFSET:]
    ids = list(message.token_ids_logprob or ())
    inputs = _prompt_lists(message, answer, ids)
    # Also of the one that is dropped, as SGLang has it: scores are made of it.
    outputs = _logprob_lists(answer.logprobs, ids)
    return BatchTokenIDOutput(
        rids=[message.rid],
        http_worker_ipcs=[None],
        finished_reasons=[finish_reason(answer, count)],
        decoded_texts=[""],
        decode_ids=[[*before, *output_ids]],
        read_offsets=[len(before)],
        output_ids=[output_ids],
        skip_special_tokens=[params.skip_special_tokens],
        spaces_between_special_tokens=[params.spaces_between_special_tokens],
        no_stop_trim=[params.no_stop_trim],
        prompt_tokens=[len(prompt)],
        reasoning_tokens=[reasoning_tokens],
        completion_tokens=[count],
        cached_tokens=[answer.cached_tokens],
        **{f"input_{name}": [values] for name, values in inputs.items()},
        **{f"output_{name}": [values] for name, values in outputs.items()},
        output_token_entropy_val=None,
        output_token_sampling_mask=None,
        output_hidden_states=None,
        routed_experts=None,
        indexer_topk=None,
        placeholder_tokens_idx=None,
        placeholder_tokens_val=None,
        retraction_counts=[0],
    )


def finish_reason(answer: DenseAnswer, length: int) -> JsonObject:
    """How an answer of ``length`` tokens ended, in SGLang's words."""
    reason: Any
    if answer.reason == "abort":
        status = None if answer.error is None else HTTPStatus.BAD_REQUEST
        reason = FINISH_ABORT(answer.error, status)
    elif isinstance(answer.matched, Cut):
        return answer.matched.to_reason()
    elif answer.reason == "stop" and length and answer.matched is not None:
        reason = FINISH_MATCHED_TOKEN(answer.matched)  # SGLang's for a text is alike
    else:
        reason = FINISH_LENGTH(length)
    found: JsonObject = reason.to_json()
    return found


def _prompt_lists(
    message: TokenizedGenerateReqInput, answer: DenseAnswer, ids: list[int]
) -> dict[str, list[Any]]:
    """SGLang's lists for the prompt, whose first element has a token and no values."""
    prompt, start = message.input_ids, message.logprob_start_len
    if not message.return_logprob or not 0 <= start < len(prompt):
        return _logprob_lists((), ids)
    after = len(prompt) - start - 1
    positions = list(answer.prompt_logprobs)[-after:] if after else []
    lists = _logprob_lists(positions, ids)
    for name, values in lists.items():
        first = prompt[start] if name == "token_logprobs_idx" else None
        values.insert(0, first)
    return lists


def _logprob_lists(
    positions: Sequence[TokenLogprobs], ids: list[int]
) -> dict[str, list[Any]]:
    """SGLang's lists of values and of token ids, by name; one element a position."""
    top = [list(position.top) for position in positions]
    return {
        "token_logprobs_val": [position.of_token for position in positions],
        "token_logprobs_idx": [position.token for position in positions],
        "top_logprobs_val": [[value for _, value in pairs] for pairs in top],
        "top_logprobs_idx": [[token for token, _ in pairs] for pairs in top],
        "token_ids_logprobs_val": [list(position.of_ids) for position in positions],
        "token_ids_logprobs_idx": [ids for _ in positions],
    }
