"""Logs of finished requests to test with."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from sglang_batch.request import Usage
from sglang_batch.store.result_log import ResultLog

USAGE = Usage(input_tokens=4, cached_tokens=3, output_tokens=2, reasoning_tokens=1)


def make_result(index: int) -> bytes:
    return json.dumps({"index": index, "text": f"answer \u00e9 {index}"}).encode()


def put(log: ResultLog, index: int, *, ok: bool = True, usage: Usage = USAGE) -> None:
    log.put(index, make_result(index), ok=ok, usage=usage)


def make_log(path: Path, indices: list[int], num_requests: int = 5) -> Path:
    """A log with these results, as a process leaves it."""
    log = ResultLog(path, num_requests)
    for index in indices:
        put(log, index)
    log.close()
    return path


def ordered(log: ResultLog, **kwargs: Any) -> tuple[bytes, bytes, tuple[int, int]]:
    outputs, errors = io.BytesIO(), io.BytesIO()
    counts = log.write_ordered(outputs, errors, **kwargs)
    return outputs.getvalue(), errors.getvalue(), counts


def lines_of(*indices: int) -> bytes:
    return b"".join(make_result(index) + b"\n" for index in indices)
