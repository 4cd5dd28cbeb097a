"""One engine in a process of its own, which runs several lists of prompts.

    python benchmark/mixed_engine.py DIRECTORY

``DIRECTORY/task.json`` has the engine's ``arguments`` and ``calls``, the keyword arguments
of ``Engine.generate`` by name. ``result.json`` gets, by name, the ``answers``, and the
``steps`` of an engine with a step log: prompt tokens and decodes of each.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import paths_given

from sglang_batch.planner.requests import SIDES
from sglang_batch.scheduling.step_record import read_steps

TASK_FILE, RESULT_FILE, STEPS_FILE = "task.json", "result.json", "steps.csv"
# An idle engine writes its last steps within this time.
IDLE_S = 1.0


def main() -> None:
    [scratch] = paths_given(__doc__, "DIRECTORY")
    task = json.loads((scratch / TASK_FILE).read_text())
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()  # SGLang on a CPU, and the flag
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(task["arguments"]))
    found = {}
    try:
        for name, arguments in task["calls"].items():
            engine.flush_cache()
            before = len(_steps(scratch))
            answers = engine.generate(**arguments)
            time.sleep(IDLE_S)
            steps = _steps(scratch)[before:]
            found[name] = {"answers": [_facts(a) for a in answers], "steps": steps}
    finally:
        engine.shutdown()
    (scratch / RESULT_FILE).write_text(json.dumps(found))


def _steps(scratch: Path) -> list[tuple[int, int]]:
    """Prompt tokens and decodes of each step."""
    path = scratch / STEPS_FILE
    if not path.exists():
        return []
    steps = read_steps(path)
    prefill, decode = (
        np.sum([steps[f"{kind}_{side}"] for side in SIDES], axis=0).tolist()
        for kind in ("prefill", "decode")
    )
    return list(zip(prefill, decode, strict=True))


def _facts(answer: dict[str, Any]) -> dict[str, Any]:
    """The tokens of an answer, and every number of its log probabilities."""
    info = answer["meta_info"]
    logprobs = [info.get(name) for name in sorted(info) if name.endswith("_logprobs")]
    return {
        "output_ids": answer["output_ids"],
        "cached_tokens": info["cached_tokens"],
        "logprobs": _numbers(logprobs),
    }


def _numbers(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    return [] if value is None or isinstance(value, str) else [float(value)]


if __name__ == "__main__":
    main()
