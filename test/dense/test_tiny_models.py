"""The tiny checkpoints that tests of the dense engine use."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from tiny_models import (
    CANNOT_BE_BUILT,
    CAUSAL_OTHERS,
    CAUSAL_WITHOUT_SGLANG,
    SEQ2SEQ,
    VOCAB,
    tiny_config,
    tiny_model,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

PROMPT = torch.arange(5, 61, 7)[None]
"""Eight tokens, int64 [1, 8]."""

BUILT = [
    kind
    for kind in (*CAUSAL_WITHOUT_SGLANG, *CAUSAL_OTHERS)
    if kind not in CANNOT_BE_BUILT
]


def sglang_architectures() -> set[str]:
    """Names of the classes that SGLang's sources offer, on whatever platform.

    Its registry, once imported, lacks those that this platform cannot import.
    """
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0], "srt", "models")
    names: set[str] = set()
    for source in folder.glob("*.py"):
        text = source.read_text(encoding="utf-8")
        at = text.rfind("\nEntryClass")
        if at >= 0:
            names |= {
                node.id
                for node in ast.walk(ast.parse(text[at:]))
                if isinstance(node, ast.Name)
            }
    return names


def runs_on_sglang(kind: str, native: set[str]) -> bool:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    architectures = [named] if isinstance(named, str) else named
    return any(
        name in native or getattr(transformers, name).is_backend_compatible()
        for name in architectures
    )


def test_the_lists_are_what_sglang_and_transformers_say() -> None:
    native = sglang_architectures()
    without = [
        kind
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if not runs_on_sglang(kind, native)
    ]
    assert sorted(without) == list(CAUSAL_WITHOUT_SGLANG)
    assert all(runs_on_sglang(kind, native) for kind in CAUSAL_OTHERS)


def test_types_with_an_encoder_have_such_a_model_in_transformers() -> None:
    assert set(SEQ2SEQ) <= set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("kind", BUILT)
@torch.no_grad()
def test_a_causal_model_gives_finite_logits(kind: str) -> None:
    logits = tiny_model(kind)(input_ids=PROMPT).logits
    assert logits.shape == (1, 8, VOCAB)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("kind", BUILT)
@torch.no_grad()
def test_greedy_answers_vary(kind: str) -> None:
    model = tiny_model(kind)
    ids = PROMPT
    gaps = []
    for _ in range(12):
        two = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
        gaps.append(float(two.values[0] - two.values[1]))
        ids = torch.cat([ids, two.indices[None, :1]], dim=1)
    assert len(set(ids[0, 8:].tolist())) >= 4
    assert min(gaps) > 1e-4


@pytest.mark.parametrize("kind", SEQ2SEQ)
@torch.no_grad()
def test_a_model_with_an_encoder_gives_finite_logits(kind: str) -> None:
    model = tiny_model(kind, encoder_decoder=True)
    logits = model(input_ids=PROMPT, decoder_input_ids=PROMPT[:, :4]).logits
    assert logits.shape == (1, 4, VOCAB)
    assert logits.isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "jamba"])
def test_the_seed_decides_the_weights(kind: str) -> None:
    first, again, other = (tiny_model(kind, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    tiny_model("llama")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", CANNOT_BE_BUILT)
def test_a_type_that_cannot_be_built_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(ValueError, match=CANNOT_BE_BUILT[kind]):
        tiny_config(kind)


def test_no_type_is_listed_twice() -> None:
    assert not set(CAUSAL_WITHOUT_SGLANG) & set(CAUSAL_OTHERS)
    assert set(CANNOT_BE_BUILT) <= set(tiny_models.CAUSAL_WITHOUT_SGLANG)
