"""Inputs of every kind, and the staged lines that they become."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import zstandard
from builders import make_line

from sglang_batch.inputs.job_input import JobInput, input_sources
from sglang_batch.inputs.local_input import LocalInput
from sglang_batch.inputs.staging import Staging
from sglang_batch.inputs.template import Template

# Importing the table readers raises deprecation warnings.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import datasets
    import pyarrow.parquet  # noqa: F401

datasets.disable_progress_bars()

QUESTION = Template({"messages": [{"role": "user", "content": "{{question}}"}]})


def batch_lines(*custom_ids: str) -> bytes:
    """Batch lines with these ids."""
    return b"".join(make_line(custom_id).encode() + b"\n" for custom_id in custom_ids)


def packed(data: bytes, suffix: str) -> bytes:
    """The data, compressed for this suffix."""
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    return zstandard.compress(data) if suffix == ".zst" else data


def staged(directory: Path, *names: object, **options: Any) -> LocalInput:
    """The inputs of these names, staged in a directory ``job`` next to them."""
    job = directory / "job"
    job.mkdir(exist_ok=True)
    return Staging(job).stage(JobInput(input_sources(map(str, names)), **options))


def lines_of(found: LocalInput) -> list[dict[str, Any]]:
    """The lines of a staged input, parsed."""
    return [json.loads(line) for line in found.path.read_text().splitlines()]


def ids_of_lines(found: LocalInput) -> list[str]:
    return [line["custom_id"] for line in lines_of(found)]


def contents_of(found: LocalInput) -> list[Any]:
    """The user message of every line made by ``QUESTION``."""
    return [line["body"]["messages"][0]["content"] for line in lines_of(found)]
