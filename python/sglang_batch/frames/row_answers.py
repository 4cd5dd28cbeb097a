"""The answer of a line of results, as a value for a column."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..batch_api.error_reasons import line_error
from ..batch_api.jsonl import read_lines


def answers_of(
    path: Path, endpoint: str, num_rows: int
) -> tuple[list[Any], list[str | None]]:
    """The answer and the error of each row. One of both is None.

    Args:
        path: lines of results, whose custom ids are the numbers of rows.
    """
    answers: list[Any] = [None] * num_rows
    errors: list[str | None] = ["no answer"] * num_rows
    value: Callable[[dict[str, Any]], Any] = _VALUES.get(endpoint, _whole)
    with open(path, "rb") as file:
        for _, _, line in read_lines(file):
            entry = json.loads(line)
            row = int(entry["custom_id"])
            errors[row] = _error(entry)
            if errors[row] is None:
                answers[row] = value(entry["response"]["body"])
    return answers, errors


def _error(entry: dict[str, Any]) -> str | None:
    response = entry.get("response") or {}
    if entry.get("error") is None and response.get("status_code") == 200:
        return None
    return line_error(entry)


def _whole(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False)


def _texts(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts if "text" in part)


def _output_text(body: dict[str, Any]) -> str:
    return "".join(_texts(item.get("content") or []) for item in body["output"])


_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "/v1/chat/completions": lambda body: body["choices"][0]["message"]["content"],
    "/v1/completions": lambda body: body["choices"][0]["text"],
    "/v1/messages": lambda body: _texts(body["content"]),
    "/v1/responses": _output_text,
    "/v1/embeddings": lambda body: body["data"][0]["embedding"],
    "/v1/audio/transcriptions": lambda body: body["text"],
}
