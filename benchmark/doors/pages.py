"""KV in pages of 16, 32 and 64 tokens: no request is offloaded if lengths are known.

Each job has prompts and answers of known lengths, several times as much as fits. Steps
are compared with those with pages of one token, where no room is lost in pages that are not full.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from report import Figure, print_table

from doors.own_process import last_line_of

KV_TOKENS, ROWS = 4096, 160
PAGE_SIZES = (1, 16, 32, 64)
NUM_REQUESTS = 160
COLUMNS = ("steps", "offloaded", "recomputed_tokens")


def jobs(num_requests: int) -> dict[str, list[tuple[list[int], int]]]:
    """Prompts of token ids, and how many tokens their answers have."""
    rng = np.random.default_rng(7)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(5, 250, length)]

    shared = [prompt(77) for _ in range(num_requests // 16)]
    return {
        "50 + 50 tokens": [(prompt(50), 50) for _ in range(num_requests)],
        "50 + 63 tokens": [(prompt(50), 63) for _ in range(num_requests)],
        "mixed lengths": [
            (
                shared[i % len(shared)] * (i % 2) + prompt(20 + i % 50),
                40 + 7 * i % 60,
            )
            for i in range(num_requests)
        ],
    }


def measure(quick: bool) -> list[Figure]:
    from sglang_batch.run.demo_model import write_demo_model

    figures = []
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        found = {
            (page_size, mixed): run_engine(model, page_size, quick, mixed=mixed)
            for page_size in ((1, 16) if quick else PAGE_SIZES)
            for mixed in (False, True)
        }
    for (page_size, mixed), done in found.items():
        steps = "mixed steps" if mixed else "separate steps"
        name = f"page size {page_size}, {steps}"
        print_table(
            name, ["job", *COLUMNS], [[job, *one.values()] for job, one in done.items()]
        )
        for job, one in done.items():
            least = found[1, mixed][job]["steps"]
            figures.append(
                Figure(
                    f"{name}, {job}: offloads and recomputed tokens",
                    one["offloaded"] + one["recomputed_tokens"], "", ("<=", 0.0),
                    f"{one['steps']} steps, {least} with page size 1",
                )
            )  # fmt: skip
    return [replace(each, target=None) for each in figures] if quick else figures


def run_engine(
    model: Path, page_size: int, quick: bool, *, mixed: bool
) -> dict[str, dict[str, int]]:
    """The counts of each job, from an engine in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    num_requests = NUM_REQUESTS // 4 if quick else NUM_REQUESTS
    arguments = [str(model), str(page_size), str(num_requests), str(int(mixed))]
    found: dict[str, dict[str, int]] = last_line_of(__file__, *arguments)
    return found


def main() -> None:
    model, page_size, num_requests, mixed = sys.argv[1:]
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    arguments = [
        f"--model-path={model}", "--dtype=float32", "--offline-batch", "--log-level=error",
        f"--max-total-tokens={KV_TOKENS}", f"--max-running-requests={ROWS}",
        "--mem-fraction-static=0.3", f"--page-size={page_size}",
        *(["--enable-mixed-chunk", "--chunked-prefill-size=512"] * int(mixed)),
    ]  # fmt: skip
    engine = sglang.Engine(server_args=prepare_server_args(arguments))
    try:
        found = {
            name: run_job(engine, rows)
            for name, rows in jobs(int(num_requests)).items()
        }
    finally:
        engine.shutdown()
    print(json.dumps(found))


def run_job(engine: Any, rows: list[tuple[list[int], int]]) -> dict[str, int]:
    before = totals(engine)
    answers = engine.generate(
        input_ids=[prompt for prompt, _ in rows],
        sampling_params=[
            {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
            for _, length in rows
        ],
    )
    after = totals(engine)
    did = {name: after[name] - before[name] for name in after}
    computed = did["prefill_tokens"] + did["cached_tokens"]
    engine.flush_cache()
    return {
        "steps": did["steps"],
        "offloaded": did["offloaded"],
        "recomputed_tokens": computed
        - sum(answer["meta_info"]["prompt_tokens"] for answer in answers),
    }


def totals(engine: Any) -> dict[str, int]:
    state = engine.get_server_info()["internal_states"][0]["offline_batch"]
    names = ("steps", "offloaded", "prefill_tokens", "cached_tokens")
    return {name: state[name] for name in names}


if __name__ == "__main__":
    main()
