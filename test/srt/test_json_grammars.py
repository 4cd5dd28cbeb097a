"""Strings of limited length in answers to schemas, on both engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from transformers import AutoTokenizer

from sglang_batch.run.demo_model import SPECIAL_IDS, VOCAB_SIZE, write_demo_model
from sglang_batch.srt.dense.grammars import Grammars
from sglang_batch.srt.scheduler.answer_ends import keep_to_json

EOS = SPECIAL_IDS["<|end|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("demo")
    write_demo_model(folder)
    return AutoTokenizer.from_pretrained(folder)


def dense_allowed(tokenizer: Any, kind: str, text: str, begin: str) -> set[int]:
    grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_ids=[EOS])
    row = grammars.row(kind, text)
    for token in begin.encode():
        assert row.accept_token(token)
    mask = grammars.mask([row])
    assert mask is not None
    logits = torch.zeros(1, VOCAB_SIZE)
    mask(logits)
    return set((logits[0] == 0).nonzero().flatten().tolist())


def sglang_allowed(tokenizer: Any, kind: str, text: str, begin: str) -> set[int]:
    backend = XGrammarGrammarBackend(tokenizer, VOCAB_SIZE, [EOS])
    keep_to_json(None, backend)
    compiled = {
        "json_schema": backend.dispatch_json,
        "structural_tag": backend.dispatch_structural_tag,
    }[kind](text)
    for token in begin.encode():
        compiled.accept_token(token)
    mask = compiled.allocate_vocab_mask(VOCAB_SIZE, 1, "cpu")
    compiled.fill_vocab_mask(mask, 0)
    bits = mask[0].tolist()
    return {i for i in range(VOCAB_SIZE) if bits[i // 32] >> (i % 32) & 1}


SHORT = {"type": "string", "maxLength": 300}
LIMITED: dict[str, tuple[str, Any, str]] = {
    "maxLength": ("json_schema", SHORT, '"'),
    "minLength": ("json_schema", {"type": "string", "minLength": 2}, '"'),
    "name": (
        "json_schema",
        {"type": "object", "propertyNames": {"maxLength": 9}},
        '{"',
    ),
    "tag": (
        "structural_tag",
        {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<a>",
                "content": {"type": "json_schema", "json_schema": SHORT},
                "end": "</a>",
            },
        },
        '<a>"',
    ),
    "older tag": (
        "structural_tag",
        {
            "structures": [{"begin": "<a>", "schema": SHORT, "end": "</a>"}],
            "triggers": ["<a"],
        },
        '<a>"',
    ),
}


@pytest.mark.parametrize("case", LIMITED)
@pytest.mark.parametrize("allowed", [dense_allowed, sglang_allowed])
def test_strings_of_limited_length_are_json(
    tokenizer: Any, allowed: Callable[..., set[int]], case: str
) -> None:
    kind, grammar, begin = LIMITED[case]
    found = allowed(tokenizer, kind, json.dumps(grammar), begin)
    assert set(b"az 09{") <= found
    assert not found & set(range(0x20))
