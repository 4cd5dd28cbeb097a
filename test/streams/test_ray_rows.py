"""What the processor for Ray Data makes of rows and of results, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sglang_batch.errors import EngineError
from sglang_batch.inputs.cells import json_value
from sglang_batch.lang.ray_processor import _body, _columns


def body_of(row: dict[str, Any]) -> Any:
    return json_value(_body(row))


def test_rows_become_completions() -> None:
    # As Arrow gives them: every key in every row, and lists as arrays.
    params = {"max_new_tokens": np.int64(5), "top_k": None, "stop": np.array(["x"])}
    row = {"prompt": "Hi", "tokenized_prompt": np.array([1, 2]), "id": 7}
    assert body_of({**row, "sampling_params": params}) == {
        "prompt": [1, 2], "max_tokens": 5, "stop": ["x"],
    }  # fmt: skip
    # Without a stage that makes tokens. SGLang's default is 128, that of completions 16.
    params = {"min_new_tokens": 2, "sampling_seed": 3, "json_schema": "{}"}
    assert body_of({"prompt": "Hi", "sampling_params": params}) == {
        "prompt": "Hi", "max_tokens": 128, "min_tokens": 2, "seed": 3,
        "json_schema": "{}",
    }  # fmt: skip


def result(**fields: Any) -> bytes:
    return json.dumps({"custom_id": "4", "error": None, **fields}).encode()


def test_results_become_columns() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    usage["prompt_tokens_details"] = {"cached_tokens": 8}
    body = {"choices": [{"text": "yes"}], "usage": usage}
    line = result(response={"status_code": 200, "body": body})
    columns = {
        "generated_text": "yes", "num_input_tokens": 9, "num_cached_tokens": 8,
        "num_generated_tokens": 2,
    }  # fmt: skip
    assert _columns(line, continues=False) == columns
    assert _columns(line, continues=True) == {**columns, "__inference_error__": ""}


def test_a_row_that_failed_ends_the_job_or_has_an_error() -> None:
    line = result(error={"code": "engine_died", "message": "The engine died."})
    failed = _columns(line, continues=True)
    assert "The engine died." in failed.pop("__inference_error__")
    assert set(failed.values()) == {"", 0}
    said = "row 4 failed: .*The engine died.* should_continue_on_error=True"
    with pytest.raises(EngineError, match=said):
        _columns(line, continues=False)
