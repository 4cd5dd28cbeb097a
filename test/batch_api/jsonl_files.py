"""The outcome of validating a file under the tests' rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import CHAT, MODEL

from sglang_batch.batch_api.jsonl import BatchFile, validate
from sglang_batch.batch_api.lines import LineError, LineRules

RULES = LineRules(endpoint=CHAT, models=(MODEL,))


def errors_of(path: Path, rules: LineRules = RULES) -> list[LineError]:
    result = validate(path, rules)
    if isinstance(result, BatchFile):
        with result.closing():
            pytest.fail(f"accepted {len(result)} lines")
    return result.listed


def custom_ids_of(path: Path, rules: LineRules = RULES) -> list[str]:
    result = validate(path, rules)
    assert isinstance(result, BatchFile), result
    with result.closing():
        return [result[i].custom_id for i in range(len(result))]
