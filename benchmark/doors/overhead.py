"""The batch service: wall time of a batch over ``Engine.generate`` of stock SGLang.

The row ``overhead`` of soak_batch_service.py, with tiny prompts: hardly any work for the
engine, and so the most of the service's own.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from report import Figure
from soak_server import running
from soak_service import overhead_rows

from sglang_batch.run.demo_model import write_demo_model

LINES, REPEATS = 5000, 7


def measure(quick: bool) -> list[Figure]:
    lines, repeats = (500, 1) if quick else (LINES, REPEATS)
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as directory:
        scratch = Path(directory)
        model = scratch / "model"
        write_demo_model(model)
        with running(model, scratch) as server:
            figures = overhead_rows(server, model, scratch, {"tiny": lines}, repeats)
    return [replace(figure, target=None) for figure in figures] if quick else figures
