"""A job that runs while it is rendered: first answer, idle engine, calls of ``prepare``.

A file of 200,000 chat lines, stopped a minute after its first answer, and a job of 6,000
lines, run to its end twice: as it is rendered, and planned as a whole before the first
line is sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import stream_engine
from report import Figure

from sglang_batch.run.demo_model import write_demo_model

TIMEOUT_S = 1200


def measure(quick: bool) -> list[Figure]:
    task = {"mid": 2500, "long": 50_000, "stop_s": 15.0} if quick else _FULL
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        found = _run(Path(scratch), task)
    mid, long = f"{task['mid']} lines", f"{task['long']} lines"
    possible = 100 * found["share_whole"]
    figures = [
        Figure(
            f"{long}: first answer after 2,000 lines are read",
            found["first_answer_s"],
            "s",
            ("<=", 5.0),
            f"they were read in {found['first_read_s']:.1f} s",
        ),
        Figure(
            f"{long}: engine idle from then on",
            100 * found["idle"],
            "%",
            ("<=", 2.0),
            f"no batch to run; {100 * found['receiving']:.1f} % receives requests "
            f"and plans; {found['window_s']:.0f} s, {found['rendered']} lines "
            f"rendered, {found['answered']} answered",
        ),
        Figure(f"{mid}: calls of prepare per line", found["prepared"], "", ("=", 1.0)),
        Figure(f"{mid}: answers that differ", found["differing"], "", ("=", 0)),
        Figure(
            f"{mid}: cached share",
            100 * found["share_streamed"],
            "%",
            (">=", possible - 0.5),
            f"planned as a whole {possible:.2f} %",
        ),
        Figure(f"{mid}: control bytes per request", found["control_bytes"], "B"),
        Figure(f"{long}: memory per rendered line", found["bytes_per_line"], "B"),
    ]
    return [replace(figure, target=None) for figure in figures] if quick else figures


_FULL = {"mid": 6000, "long": 200_000, "stop_s": 60.0}


def _run(scratch: Path, task: dict[str, Any]) -> dict[str, Any]:
    write_demo_model(scratch / "model")
    task = task | {"model": str(scratch / "model")}
    (scratch / stream_engine.TASK_FILE).write_text(json.dumps(task))
    subprocess.run(
        [sys.executable, stream_engine.__file__, str(scratch)],
        check=True,
        timeout=TIMEOUT_S,
    )
    result: dict[str, Any] = json.loads(
        (scratch / stream_engine.RESULT_FILE).read_text()
    )
    return result
