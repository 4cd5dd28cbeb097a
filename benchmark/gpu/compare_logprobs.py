"""Log probabilities of this package's answers with its attention and with SGLang's.

    python benchmark/gpu/compare_logprobs.py
    python benchmark/gpu/compare_logprobs.py --quick    the demo model, on any machine

Two engines of this package run the same requests, in groups that share a prefix, one engine
after the other. They differ in the attention alone. In 16 bits near ties fall either way,
and the tokens after one are others. Therefore the figures are the largest difference of the
log probability of a request's tokens up to the first that differs, and the share of
requests whose tokens are all equal. The last line is one JSON document; the exit status is
1 if a first token's log probability differs by more than 0.05.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_gpu_throughput as jobs
from gpu_models import write_model
from report import (
    Figure,
    add_save,
    finish,
    print_figures,
    save_as_they_come,
    write_unfinished,
)
from throughput_engine import Engine, Task, TaskResult
from throughput_jobs import ThroughputJob, groups

from sglang_batch.run.demo_model import write_demo_model

ENGINES = ("ours-order", "ours")
TOLERANCE = 0.05


def job_of(options: argparse.Namespace) -> ThroughputJob:
    scale = 16 if options.quick else 1
    return groups(
        1, options.requests // 16, 2000 // scale, 200 // scale, 64 // scale,
        options.kv_tokens, options.max_running, seed=1, siblings=16,
    )  # fmt: skip


def measure(
    options: argparse.Namespace, scratch: Path, results: dict[str, Any]
) -> list[TaskResult]:
    model = scratch / "model"
    if options.quick:
        write_demo_model(model)
    else:
        write_model(model)
    job, done = job_of(options), []
    settings = [
        f"--offline-batch-config={json.dumps({'attention': options.attention})}"
    ]
    for name in ENGINES:
        (scratch / name).mkdir()
        kind = jobs.kind_of(name)
        more = settings if name == "ours" and options.attention else kind.arguments
        arguments = [*jobs.arguments_of(options, model), *more]
        task = Task(
            kind.ours, "dfs", arguments, job.prompts, job.sampling_params, logprobs=True
        )
        engine = Engine(task, scratch / name)
        try:
            engine.until_ready()
            done.append(engine.run())
        finally:
            engine.kill()
        results["runs"].append({"engine": name, "attention": done[-1].attention})
        write_unfinished()
    return done


def figures_of(stock: TaskResult, ours: TaskResult) -> list[Figure]:
    first, later, equal = 0.0, 0.0, 0
    for tokens, others, here, there in zip(
        stock.output_ids, ours.output_ids, stock.logprobs, ours.logprobs, strict=True
    ):
        same = zip(tokens, others, strict=True)
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], same))
        equal += length == len(tokens)
        gaps = [abs(a - b) for a, b in zip(here, there, strict=True)]
        first = max(first, gaps[0])
        later = max([later, *gaps[1:length]])
    return [
        Figure("first token: largest difference", first, target=("<=", TOLERANCE)),
        Figure("later tokens, while all are equal: largest difference", later),
        Figure("requests with equal tokens", equal / len(stock.output_ids)),
    ]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=256, help="a multiple of 16 (default: 256)"
    )
    parser.add_argument(
        "--attention", help="the setting of this name (default: this package's choice)"
    )
    parser.add_argument(
        "--kv-tokens", type=int, default=160_000, help="KV cache (default: 160000)"
    )
    parser.add_argument("--max-running", type=int, default=256, help="default: 256")
    parser.add_argument(
        "--quick", action="store_true", help="the demo model and short requests"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only check the options and print the job",
    )
    add_save(parser)
    options = parser.parse_args(argv)
    if options.requests < 16 or options.requests % 16:
        parser.error(f"--requests is {options.requests}; give a multiple of 16.")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.dry_run:
        print(job_of(options).name)
        return 0
    results: dict[str, Any] = {"runs": []}
    save_as_they_come(options.save, results)
    with tempfile.TemporaryDirectory() as scratch:
        stock, ours = measure(options, Path(scratch), results)
    figures = figures_of(stock, ours)
    print_figures("Log probabilities", figures)
    results["figures"] = [figure.as_json for figure in figures]
    finish(results, options.save)
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
