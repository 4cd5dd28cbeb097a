"""Stock SGLang in a process of its own, which answers jobs and measures itself.

    python benchmark/stock_engine.py ARGUMENTS_OF_THE_SERVER

A line of stdin has a job: prompts as token ids, and how many tokens each answer has. A
line of stdout has its ``answers``, the processor seconds of all processes of the engine,
``cpu_s``, and ``wall_s``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import psutil  # type: ignore[import-untyped]


def main() -> None:
    # Everything else that is printed goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()  # a plugin makes SGLang run on a CPU
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(sys.argv[1:]))
    try:
        for line in sys.stdin:
            prompts, lengths = json.loads(line)
            print(json.dumps(_run(engine, prompts, lengths)), file=answers, flush=True)
    finally:
        engine.shutdown()


def _run(engine: Any, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    params = [
        {"temperature": 0, "ignore_eos": True, "max_new_tokens": most}
        for most in lengths
    ]
    engine.flush_cache()
    begin, begin_cpu = time.perf_counter(), _processor_s()
    found = engine.generate(input_ids=prompts, sampling_params=params)
    wall_s, cpu_s = time.perf_counter() - begin, _processor_s() - begin_cpu
    tokens = [list(map(int, answer["output_ids"])) for answer in found]
    return {"answers": tokens, "cpu_s": cpu_s, "wall_s": wall_s}


def _processor_s() -> float:
    """Of this process, which has the tokenizer's manager, and of the scheduler's."""
    this = psutil.Process()
    times = [each.cpu_times() for each in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


if __name__ == "__main__":
    main()
