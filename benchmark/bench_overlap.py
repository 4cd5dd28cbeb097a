"""Mixed steps as two forwards at the same time: what that is worth on this machine.

    python benchmark/bench_overlap.py                 on a CPU: job 5, end to end
    python benchmark/bench_overlap.py --model-path M  on a GPU: the trial, shape by shape

**On a CPU** the engine runs job 5 of throughput_jobs.py (two tasks in one file, lengths
unknown) with a random model whose matrix products take the time. Decodes of a split step
run in one thread and prompts in another. Compared are, with one and with two OpenMP
threads, steps that never mix prompts with decodes (the default on a CPU), mixed steps as
one forward, and mixed steps that are split: at once, and with the halves in turn, which
tells how much of the gain is concurrency. Stock SGLang with ``fcfs`` runs beside them.
Engines of a round take turns on an otherwise idle machine. Answers that differ from those
of the first are counted. "seconds" is the median; where other programs use the machine,
the least time of each is closer to what it takes.

**On a GPU** it starts an engine with the setting ``"overlap": "auto"`` and prints the
table of its trial. Nobody has run that yet.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from report import add_save, finish, print_table
from throughput_engine import COUNTS, Run, Task, run_task, run_tasks, task_of
from throughput_jobs import ThroughputJob, blend, blend_draft
from tqdm import tqdm

from sglang_batch.run.demo_model import write_demo_model


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the steps of a job.

    threads: OpenMP threads.
    overlap: the setting. None is stock SGLang with ``fcfs``.
    """

    name: str
    threads: int
    mixed: bool
    overlap: str | None = "off"
    in_turn: bool = False

    def task(self, job: ThroughputJob, model: Path, policy: str) -> Task:
        ours = self.overlap is not None
        task = task_of(
            job,
            model,
            ours=ours,
            policy=policy if ours else "fcfs",
            mixed=self.mixed,
        )
        arguments = list(task.arguments)
        if ours:
            settings = json.dumps({"overlap": self.overlap})
            arguments.append(f"--offline-batch-config={settings}")
        return replace(
            task, arguments=arguments, threads=self.threads, in_turn=self.in_turn
        )


TIMES = ("fused_s", "split_s", "prompts_s", "decodes_s")
WAYS = (
    Way("prompts and decodes apart", 1, False),
    Way("prompts and decodes apart", 2, False),
    Way("mixed, one forward", 1, True),
    Way("mixed, one forward", 2, True),
    Way("mixed, halves in turn", 1, True, "on", in_turn=True),
    Way("mixed, halves in turn", 2, True, "on", in_turn=True),
    Way("mixed, halves at once", 1, True, "on"),
    Way("mixed, halves at once", 2, True, "on"),
    Way("stock fcfs, apart", 2, False, None),
)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Every way, ``repeats`` times, in rounds."""
    model = scratch / "model"
    write_demo_model(
        model,
        num_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_heads=options.hidden // 64,
        num_kv_heads=max(1, options.hidden // 256),
        head_dim=64,
    )
    draft = blend_draft(options.seed, num_pairs=options.pairs)
    # The stops of the requests are taken from their whole answers.
    whole = WAYS[1].task(draft.whole_answers, model, options.policy)
    job = blend(draft, run_task(whole).output_ids)
    ways = [
        way
        for way in WAYS
        if (not options.ways or way.name in options.ways)
        and options.threads in (None, way.threads)
    ]
    tasks = [way.task(job, model, options.policy) for way in ways]
    runs: dict[Way, list[Run]] = {way: [] for way in ways}
    differing = dict.fromkeys(ways, 0)
    expected: list[list[int]] = []
    # Each engine starts once, and they take turns.
    tasks = [replace(task, repeats=options.repeats) for task in tasks]
    number = options.repeats * len(ways)
    progress = tqdm(run_tasks(tasks), "runs", number, unit="run")
    for way, done in zip(ways * options.repeats, progress, strict=True):
        expected = expected or done.output_ids
        pairs = zip(done.output_ids, expected, strict=True)
        differing[way] += sum(one != other for one, other in pairs)
        runs[way].append(Run.of(job, done))
    print_ways(job, runs, differing)
    return {
        "job": job.name,
        "hidden": options.hidden,
        "layers": options.layers,
        "policy": options.policy,
        "ways": [
            {
                **asdict(way),
                "differing": differing[way],
                "runs": [asdict(run) for run in found],
            }
            for way, found in runs.items()
        ],
    }


def print_ways(
    job: ThroughputJob, runs: dict[Way, list[Run]], differing: dict[Way, int]
) -> None:
    fastest = min(_seconds(found) for found in runs.values())
    print_table(
        f"{job.name}: {len(job.prompts)} requests, {job.num_prompt_tokens:,} prompt "
        f"tokens, {sum(job.output_lens):,} generated",
        [
            "steps", "OMP threads", "seconds", "from-to", "over fastest", "number",
            "cpu s", "other answers",
        ],
        [
            [
                way.name, way.threads, f"{_seconds(found):.2f}",
                f"{min(r.seconds for r in found):.2f}-"
                f"{max(r.seconds for r in found):.2f}",
                f"{_seconds(found) / fastest:.2f}",
                f"{median(r.num_steps for r in found):.0f}",
                f"{median(r.cpu_s for r in found):.1f}", differing[way],
            ]
            for way, found in runs.items()
        ],
    )  # fmt: skip


def try_out(model_path: str, arguments: list[str]) -> dict[str, Any]:
    """The trial of a server with a GPU, as its scheduler reports it."""
    from sglang_batch.srt.engine import in_process

    settings = json.dumps({"overlap": "auto"})
    server_args = in_process.parse_server_args(
        [
            f"--model-path={model_path}",
            f"--offline-batch-config={settings}",
            *arguments,
        ]
    )
    with in_process.engine(server_args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        manager: Any = engine.manager
        state = loop.run_until_complete(manager.get_internal_state())
    found: dict[str, Any] = state[0]["offline_batch"]
    if "split_trial" not in found:
        raise SystemExit("There was no trial; the log above has the reason.")
    cells = found["split_trial"]
    print_table(
        f"{model_path}: mixed steps as one forward and split; exponent "
        f"{found['split_exponent'] or math.inf:.2f}",
        [
            "prompt tokens", "rows", "context", "SMs for prompts", "one forward, ms",
            "split, ms", "prompts alone", "decodes alone", "gain",
        ],
        [
            [
                cell["prompt_tokens"], cell["rows"], cell["context"],
                cell["sm_share"] or "all",
                *(f"{1e3 * cell[name]:.2f}" for name in TIMES),
                f"{cell['fused_s'] / cell['split_s'] - 1:+.1%}",
            ]
            for cell in cells
        ],
    )  # fmt: skip
    counts = {name: found.get(name, 0) for name in COUNTS}
    return {
        "model": model_path,
        "cells": cells,
        "exponent": found["split_exponent"],
        "attention": counts,
    }


def _seconds(runs: Sequence[Run]) -> float:
    return median(run.seconds for run in runs)


def parse_options(
    argv: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-path",
        help="on a GPU: the model of the trial; other options are the server's",
    )
    parser.add_argument("--hidden", type=int, default=1024, help="default: 1024")
    parser.add_argument("--layers", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--pairs", type=int, default=128, help="long requests of the job (default: 128)"
    )
    parser.add_argument("--policy", default="dual-scan", help="default: dual-scan")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--threads", type=int, help="only rows with so many")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--dry-run", action="store_true", help="only check the options")
    add_save(parser)
    options, others = parser.parse_known_args(argv)
    if others and not options.model_path:
        parser.error(f"unknown options: {' '.join(others)}")
    return options, others


def main(argv: Sequence[str] | None = None) -> int:
    options, others = parse_options(argv)
    if options.dry_run:
        print(f"the trial with {' '.join(others) or 'no options of the server'}")
        return 0
    if options.model_path:
        finish(try_out(options.model_path, others), options.save)
        return 0
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        found = measure(options, Path(scratch))
    finish(found, options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
