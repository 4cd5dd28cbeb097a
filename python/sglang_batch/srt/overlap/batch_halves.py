"""A mixed batch as two batches, and their logits as those of one.

The rows of a mixed batch are those of prompts, in front, and those that decode. How many
decode is passed along from the scheduler: a row with one new token may also be a prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

# Fields of ForwardBatch. ``[num_tokens]``:
_OF_TOKENS = ("input_ids", "positions", "out_cache_loc")
# ``[num_rows]``, or lists of that length:
_OF_ROWS = (
    "req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu",
    "orig_seq_lens", "top_logprobs_nums", "token_ids_logprobs", "rids",
)  # fmt: skip
# Of the rows of an extend, which decodes do not have.
_OF_EXTENDS = (
    "extend_seq_lens", "extend_prefix_lens", "extend_start_loc",
    "extend_prefix_lens_cpu", "extend_seq_lens_cpu", "extend_logprob_start_lens_cpu",
)  # fmt: skip
# Made anew for each half.
_MADE = (
    "forward_mode", "batch_size", "seq_lens_sum", "extend_num_tokens",
    "kv_loc_plan", "kv_loc_cols", "out_cache_loc_is_physical", "mrope_positions",
    "global_num_token_non_padded_cpu",
)  # fmt: skip
# Read only where tokens are sampled, which SGLang does for the whole batch.
_OF_SAMPLING = (
    "sampling_info", "extend_input_logprob_token_ids_gpu", "temperature", "top_p",
    "lora_ids", "mm_inputs",
)  # fmt: skip
# The same for both halves.
_SHARED = (
    "return_logprob", "is_prefill_only", "spec_algorithm", "is_extend_in_batch",
    "can_run_decode_cuda_graph", "can_run_dp_draft_cuda_graph",
    "can_run_dp_prefill_cuda_graph", "dp_prefill_cuda_graph_max_prefix_len",
    "global_forward_mode", "contains_last_prefill_chunk", "capture_hidden_mode",
    "split_index", "reuse_dsa_topk_indices", "attn_tp_sequence_sharded",
)  # fmt: skip
_KNOWN = frozenset(
    (*_OF_TOKENS, *_OF_ROWS, *_OF_EXTENDS, *_MADE, *_OF_SAMPLING, *_SHARED)
)


class BatchHalves(NamedTuple):
    """A mixed batch as two: the rows that decode, and those with prompts."""

    decodes: ForwardBatch
    prompts: ForwardBatch


def why_whole(batch: ForwardBatch, num_decodes: int) -> str | None:
    """What keeps a mixed batch from being split, or None if nothing does.

    Args:
        num_decodes: rows that decode, the last ones of the batch.
    """
    if not batch.forward_mode.is_mixed():
        return f"a batch of kind {batch.forward_mode.name}"
    if not 0 < num_decodes < batch.batch_size:
        return f"{num_decodes} of {batch.batch_size} rows that decode"
    if batch.seq_lens_cpu is None or batch.extend_seq_lens_cpu is None:
        return "lengths that are on the device only"
    if any(length != 1 for length in batch.extend_seq_lens_cpu[-num_decodes:]):
        return "several tokens in a row that decodes"
    if batch.capture_hidden_mode not in (None, CaptureHiddenMode.NULL):
        return "hidden states that are returned"
    if batch.lora_ids is not None and any(batch.lora_ids):
        return "adapters"
    if batch.mm_inputs is not None and any(x is not None for x in batch.mm_inputs):
        return "images or sounds"
    if batch.spec_info is not None:
        return "drafts"
    if batch.return_logprob and wants_prompt_logprobs(
        batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu
    ):
        return "log probabilities of prompts"
    unknown = [
        field.name
        for field in dataclasses.fields(batch)
        if field.name not in _KNOWN
        and not _is_unset(getattr(batch, field.name), field.default)
    ]
    return f"the field {unknown[0]} of the batch" if unknown else None


def wants_prompt_logprobs(
    extend_lens: list[int], logprob_starts: list[int] | None
) -> bool:
    """Whether a batch returns log probabilities of tokens of its prompts.

    Args:
        extend_lens: new tokens of each row.
        logprob_starts: of each row, how many of them come before the first token
            whose log probability is wanted.
    """
    pairs = zip(extend_lens, logprob_starts or extend_lens, strict=True)
    return any(length > start for length, start in pairs)


def _is_unset(value: Any, default: Any) -> bool:
    if value is None or value is False:
        return True
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, list | tuple | dict):
        return not any(x is not None for x in value)
    return default is not dataclasses.MISSING and bool(value == default)


def split(batch: ForwardBatch, num_decodes: int, translator: Any) -> BatchHalves:
    """Split a mixed batch. Its tensors are not copied, and it stays as it is.

    Args:
        batch: a batch for which :func:`why_whole` is None.
        num_decodes: rows that decode, the last ones.
        translator: the model runner's ``kv_index_translator``.
    """
    num_tokens, num_rows = len(batch.input_ids), batch.batch_size
    halves = []
    for mode, tokens, rows in (
        (
            ForwardMode.DECODE,
            slice(num_tokens - num_decodes, num_tokens),
            slice(num_rows - num_decodes, num_rows),
        ),
        (
            ForwardMode.EXTEND,
            slice(0, num_tokens - num_decodes),
            slice(0, num_rows - num_decodes),
        ),
    ):
        decodes = mode.is_decode()
        parts: dict[str, Any] = dict.fromkeys(_OF_SAMPLING)
        parts |= {name: _part(batch, name, tokens) for name in _OF_TOKENS}
        parts |= {name: _part(batch, name, rows) for name in _OF_ROWS}
        parts |= {
            name: None if decodes else _part(batch, name, rows) for name in _OF_EXTENDS
        }
        if batch.global_num_token_non_padded_cpu is not None:
            parts["global_num_token_non_padded_cpu"] = tokens.stop - tokens.start
        if batch.mrope_positions is not None:
            parts["mrope_positions"] = batch.mrope_positions[:, tokens]
        half = dataclasses.replace(
            batch,
            forward_mode=mode,
            batch_size=rows.stop - rows.start,
            seq_lens_sum=int(batch.seq_lens_cpu[rows].sum()),
            extend_num_tokens=None if decodes else tokens.stop - tokens.start,
            **parts,
        )
        # Slots that are no ids of the pool itself were refused with their field.
        translator.own_plan(half).bind(half, translator)
        halves.append(half)
    return BatchHalves(*halves)


def _part(batch: ForwardBatch, name: str, part: slice) -> Any:
    value = getattr(batch, name)
    return None if value is None else value[part]


def join(
    decodes: LogitsProcessorOutput, prompts: LogitsProcessorOutput
) -> LogitsProcessorOutput:
    """The output of the whole batch: logits ``[num_rows, vocab]`` in its order.

    Raises:
        ValueError: a half has more than logits, or of another type.
    """
    for output in (decodes, prompts):
        more = [
            field.name
            for field in dataclasses.fields(output)
            if field.name != "next_token_logits"
            and getattr(output, field.name) is not None
        ]
        if more:
            raise ValueError(f"the output of a half has {', '.join(more)}")
    first, last = prompts.next_token_logits, decodes.next_token_logits
    if first is None or last is None or first.dtype != last.dtype:
        raise ValueError("the halves have logits of different types")
    return LogitsProcessorOutput(next_token_logits=torch.cat([first, last]))
