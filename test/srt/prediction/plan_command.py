"""Files of requests for ``sglang-batch plan``, and the command on them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from builders import CHAT, MODEL, make_file

from sglang_batch.__main__ import main

# Importing SGLang warns of missing accelerators. Import it once, before warnings become
# errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.entrypoints.engine
    import sglang.srt.entrypoints.http_server  # noqa: F401

# SGLang's own request class says so of a field that everybody uses.
MAX_TOKENS_IS_USED = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

SYSTEM = "You answer questions on the tide tables of the harbour. "


def line(custom_id: str, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, question: str, **options: Any) -> dict[str, Any]:
    """A line with a question. ``options`` become fields of its body."""
    messages = [
        {"role": "system", "content": SYSTEM * 4},
        {"role": "user", "content": question},
    ]
    return line(custom_id, {"model": MODEL, "messages": messages, **options})


def write(directory: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """A file ``in.jsonl`` of these lines."""
    return make_file(directory, map(json.dumps, lines), "in.jsonl")


def plan(path: Path, model: Path, *options: str) -> int:
    """Plan a file for the CPU. Returns the exit status."""
    return main(
        [
            *("plan", "-i", str(path), "--model-path", str(model)),
            *("--served-model-name", MODEL, "--hardware", "cpu", *options),
        ]
    )


def is_picture(path: Path) -> bool:
    """Whether it is a PNG with more than an empty frame."""
    written = path.read_bytes()
    return written.startswith(b"\x89PNG") and len(written) > 20_000
