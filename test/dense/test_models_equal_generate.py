"""Every kind of model in the decode loop, against ``generate`` for each prompt alone."""

from __future__ import annotations

import pytest
from dense_runs import Run, generated, greedy, prompts
from tiny_models import (
    CANNOT_BE_BUILT,
    CAUSAL_OTHERS,
    CAUSAL_WITHOUT_SGLANG,
    SEQ2SEQ,
    tiny_model,
)

from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings
from sglang_batch.dense.rows import EncodedRows, SeparateRows, SlabRows, rows_for
from sglang_batch.errors import ConfigError

# More requests than rows, and prefixes that are worth sharing.
SETTINGS = DenseSettings(max_rows=3, shortest_shared=4)
ANSWERS = (2, 9, 12, 4, 7)

REFUSED = {
    "reformer": "size of tensor",
    "t5gemma": "exactly one of input_ids or inputs_embeds",
}
"""Types that transformers itself does not run as the engine has to, and its words."""

COUNT_COLUMNS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
    *("mvp", "pegasus", "plbart", "trocr", "whisper"),
}
"""Types whose position embeddings would count the columns of a batch."""

IN_A_SLAB = {
    *COUNT_COLUMNS,
    *("big_bird", "biogpt", "bloom", "codegen", "falcon", "gpt_neo"),
    *("gpt_neox_japanese", "megatron-bert", "mpt", "rembert", "xglm"),
    *("cohere", "deepseek_v2", "deepseek_v3", "exaone4", "gemma2", "gemma3_text"),
    *("gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "llama", "mistral"),
    *("mixtral", "nemotron", "olmo2", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("smollm3", "stablelm", "starcoder2"),
}
"""Types whose rows share a batch. A change of transformers may add to them."""

ENCODED_IN_A_SLAB = set(SEQ2SEQ) - {
    *("fsmt", "led", "pegasus_x", "prophetnet", "t5gemma"),
}
"""Types with an encoder whose rows share a batch."""

CAUSAL = [
    name
    for name in (*CAUSAL_WITHOUT_SGLANG, *CAUSAL_OTHERS)
    if name not in CANNOT_BE_BUILT
]


def requests_of(longest: int = 25) -> list[DenseRequest]:
    """Prompts of different lengths, three of which share a prefix."""
    (stem,) = prompts(1, seed=1, shortest=10, longest=10)
    all_ids = prompts(len(ANSWERS), seed=2, longest=longest)
    return [
        greedy(str(place), [*stem, *ids] if place < 3 else ids, count, place=place)
        for place, (ids, count) in enumerate(zip(all_ids, ANSWERS, strict=True))
    ]


def check(model: LoadedModel, requests: list[DenseRequest]) -> Run:
    """Run requests that join one after the other, and compare them with ``generate``."""
    rows, reason = rows_for(model, SETTINGS)
    shared = EncodedRows if model.is_encoder_decoder else SlabRows
    assert isinstance(rows, SeparateRows if reason else shared)
    run = Run(model, SETTINGS, rows=rows).add(requests[:2]).steps(2)
    run.add(requests[2:]).finish()
    assert {answer.error for answer in run.answers.values()} == {None}
    assert run.tokens() == {
        each.rid: generated(model, each.input_ids, each.stopping.max_new_tokens)
        for each in requests
    }
    return run


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_causal_model_answers_as_generate_does(model_type: str) -> None:
    model = wrap(tiny_model(model_type))
    if model_type in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[model_type]):
            rows_for(model, SETTINGS)
        return
    run = check(model, requests_of())
    prompt_tokens = sum(len(request.input_ids) for request in requests_of())
    assert isinstance(run.rows, SlabRows) == (model_type in IN_A_SLAB)
    if model_type in IN_A_SLAB:
        assert run.rows.computed_tokens < prompt_tokens


def test_39_types_run_that_sglang_does_not_and_22_of_them_in_shared_batches() -> None:
    runs = set(CAUSAL_WITHOUT_SGLANG) - CANNOT_BE_BUILT.keys() - REFUSED.keys()
    assert len(runs) >= 39
    assert len(runs & IN_A_SLAB) >= 22


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SEQ2SEQ)
def test_an_encoder_decoder_answers_as_generate_does(model_type: str) -> None:
    plain = tiny_model(model_type, encoder_decoder=True)
    if plain.generation_config.decoder_start_token_id is None:
        plain.generation_config.decoder_start_token_id = 0
    model = wrap(plain)
    if model_type in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[model_type]):
            rows_for(model, SETTINGS)
        return
    run = check(model, requests_of(15))
    assert isinstance(run.rows, EncodedRows) == (model_type in ENCODED_IN_A_SLAB)
