"""A mixed batch as two, and its logits back in order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_batch.srt.overlap.batch_halves import (
    join,
    split,
    wants_prompt_logprobs,
    why_whole,
)

# Two prompts, of which the second is one token, and two rows that decode.
NEW = [3, 1, 1, 1]
LENGTHS = [5, 1, 7, 9]
DECODES = 2


class OwnSlots:
    """Stands for the translator of a pool whose slots are its own ids."""

    def own_plan(self, batch: Any) -> OwnSlots:
        return self

    def bind(self, batch: Any, translator: Any) -> None:
        batch.kv_loc_plan = self
        batch.out_cache_loc_is_physical = True


def batch(**changes: Any) -> ForwardBatch:
    prefixes = [total - new for total, new in zip(LENGTHS, NEW, strict=True)]
    positions = [p for n, t in zip(NEW, LENGTHS, strict=True) for p in range(t - n, t)]
    made = ForwardBatch(
        forward_mode=ForwardMode.MIXED,
        batch_size=4,
        input_ids=torch.arange(10, 16),
        req_pool_indices=torch.tensor([3, 1, 4, 2]),
        req_pool_indices_cpu=torch.tensor([3, 1, 4, 2]),
        seq_lens=torch.tensor(LENGTHS),
        seq_lens_cpu=torch.tensor(LENGTHS),
        orig_seq_lens=torch.tensor(LENGTHS),
        out_cache_loc=torch.arange(100, 106),
        seq_lens_sum=sum(LENGTHS),
        positions=torch.tensor(positions),
        extend_num_tokens=sum(NEW),
        extend_seq_lens=torch.tensor(NEW),
        extend_prefix_lens=torch.tensor(prefixes),
        extend_start_loc=torch.tensor([0, 3, 4, 5]),
        extend_seq_lens_cpu=NEW,
        extend_prefix_lens_cpu=prefixes,
        extend_logprob_start_lens_cpu=NEW,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        global_num_token_non_padded_cpu=sum(NEW),
        rids=["a", "b", "c", "d"],
        lora_ids=[None] * 4,
        mm_inputs=[None] * 4,
    )
    return dataclasses.replace(made, **changes)


def test_rows_that_decode_are_the_last_ones_not_those_of_one_token() -> None:
    whole = batch()
    assert why_whole(whole, DECODES) is None
    decodes, prompts = split(whole, DECODES, OwnSlots())
    assert decodes.forward_mode is ForwardMode.DECODE
    assert prompts.forward_mode is ForwardMode.EXTEND
    assert (decodes.batch_size, prompts.batch_size) == (2, 2)
    assert decodes.input_ids.tolist() == [14, 15]
    assert prompts.input_ids.tolist() == [10, 11, 12, 13]
    assert decodes.positions.tolist() == [6, 8]
    assert prompts.positions.tolist() == [2, 3, 4, 0]
    assert decodes.out_cache_loc.tolist() == [104, 105]
    assert prompts.out_cache_loc.tolist() == [100, 101, 102, 103]
    assert decodes.rids == ["c", "d"]
    assert (decodes.seq_lens_sum, prompts.seq_lens_sum) == (16, 6)
    assert decodes.extend_seq_lens is decodes.extend_seq_lens_cpu is None
    assert decodes.extend_num_tokens is None
    assert prompts.extend_num_tokens == 4
    assert decodes.global_num_token_non_padded_cpu == 2
    assert prompts.global_num_token_non_padded_cpu == 4
    assert prompts.extend_seq_lens_cpu == [3, 1]
    assert prompts.extend_prefix_lens.tolist() == [2, 0]


def test_halves_are_views_and_the_batch_stays_as_it_is() -> None:
    whole = batch()
    before = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    halves = split(whole, DECODES, OwnSlots())
    for half in halves:
        for name in ("input_ids", "seq_lens", "out_cache_loc", "positions"):
            storage = getattr(half, name).untyped_storage().data_ptr()
            assert storage == getattr(whole, name).untyped_storage().data_ptr()
    assert all(getattr(whole, name) is value for name, value in before.items())


def test_three_positions_per_token_are_split_by_tokens() -> None:
    positions = torch.arange(18).view(3, 6)
    decodes, prompts = split(batch(mrope_positions=positions), DECODES, OwnSlots())
    assert torch.equal(decodes.mrope_positions, positions[:, 4:])
    assert torch.equal(prompts.mrope_positions, positions[:, :4])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"forward_mode": ForwardMode.EXTEND}, "a batch of kind EXTEND"),
        ({"seq_lens_cpu": None}, "lengths that are on the device only"),
        ({"capture_hidden_mode": CaptureHiddenMode.LAST}, "hidden states"),
        ({"lora_ids": [None, "x", None, None]}, "adapters"),
        ({"mm_inputs": [None, object(), None, None]}, "images or sounds"),
        ({"spec_info": object()}, "drafts"),
        (
            {"return_logprob": True, "extend_logprob_start_lens_cpu": [0, 1, 1, 1]},
            "log probabilities of prompts",
        ),
        ({"encoder_lens": torch.ones(4)}, "the field encoder_lens of the batch"),
        ({"input_embeds": torch.ones(6, 8)}, "the field input_embeds of the batch"),
        ({"mamba_track_indices": torch.ones(4)}, "the field mamba_track_indices"),
        ({"out_cache_loc_virtual": torch.ones(6)}, "the field out_cache_loc_virtual"),
        ({"global_num_tokens_cpu": [6]}, "the field global_num_tokens_cpu"),
    ],
)  # fmt: skip
def test_other_batches_run_whole(changes: dict[str, Any], reason: str) -> None:
    assert str(why_whole(batch(**changes), DECODES)).startswith(reason)


@pytest.mark.parametrize("rows", [0, 4, 5])
def test_rows_of_both_kinds_are_needed(rows: int) -> None:
    assert why_whole(batch(), rows) == f"{rows} of 4 rows that decode"


def test_a_row_that_decodes_has_one_token() -> None:
    lengths = [1, 1, 1, 3]
    found = why_whole(batch(extend_seq_lens_cpu=lengths), DECODES)
    assert found == "several tokens in a row that decodes"


def test_logprobs_of_prompts_begin_before_the_last_token() -> None:
    assert not wants_prompt_logprobs([3, 1], [3, 1])
    assert not wants_prompt_logprobs([3, 1], None)
    assert wants_prompt_logprobs([3, 1], [2, 1])


def test_logits_are_in_the_order_of_the_batch() -> None:
    decodes = LogitsProcessorOutput(next_token_logits=torch.tensor([[3.0], [4.0]]))
    prompts = LogitsProcessorOutput(next_token_logits=torch.tensor([[1.0], [2.0]]))
    joined = join(decodes, prompts)
    assert joined.next_token_logits.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_states": torch.ones(2, 4)},
        {"input_token_logprobs": torch.ones(2)},
        {"next_token_logits": None},
        {"next_token_logits": torch.ones(2, 1, dtype=torch.bfloat16)},
    ],
)
def test_outputs_that_are_more_than_logits_are_not_joined(
    changes: dict[str, Any],
) -> None:
    plain = LogitsProcessorOutput(next_token_logits=torch.ones(2, 1))
    with pytest.raises(ValueError, match="hal"):
        join(plain, dataclasses.replace(plain, **changes))
