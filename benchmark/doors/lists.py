"""``Engine.generate(list)``: cached share and seconds, and those of stock's policies.

Every engine gets all prompts in one call. Stock SGLang runs with each of its policies,
ours with ``offline_batch`` and default settings. Engines of a job start together and are
timed one after another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np
from report import Figure, print_table
from throughput_engine import Run, Task, run_task, run_tasks, task_of
from throughput_jobs import ThroughputJob, blend, blend_draft, groups, two_levels

from sglang_batch.run.demo_model import write_demo_model

SEED = 1
REPEATS = 3
STOCK = ("fcfs", "lpm", "dfs-weight")
OURS = "ours"
# How far the cached share may stay below the possible one.
SHARE = 0.002


def measure(quick: bool) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        for job in [turns(2)] if quick else jobs(model):
            figures += _figures(job, _measured(job, model, 1 if quick else REPEATS))
    if quick:
        return [replace(figure, target=None) for figure in figures]
    return figures


# Jobs -----------------------------------------------------------------------------------


def jobs(model: Path) -> Iterator[ThroughputJob]:
    """The five jobs of bench_offline_throughput.py, and two others."""
    yield groups(1, 32, 512, 32, 8, 6144, 32, SEED)
    yield groups(2, 40, 512, 32, 8, 6144, 32, SEED)
    yield groups(3, 60, 1024, 64, 32, 25_600, 64, SEED)
    yield two_levels(SEED)
    draft = blend_draft(SEED, 120)
    task = task_of(draft.whole_answers, model, ours=False, policy="fcfs", mixed=False)
    yield blend(draft, run_task(task).output_ids)
    yield turns(40)
    yield choices(24)


def turns(num_talks: int) -> ThroughputJob:
    """Every turn of each conversation is a request: its prompt is the last one's, longer."""
    rng = np.random.default_rng([SEED, 6])
    prompts = []
    for _ in range(num_talks):
        talk = rng.integers(0, 256, int(rng.integers(100, 400)), dtype=np.int32)
        for _ in range(int(rng.integers(2, 9))):
            more = rng.integers(0, 256, int(rng.integers(20, 120)), dtype=np.int32)
            talk = np.concatenate([talk, more])
            prompts.append(talk)
    return _shuffled(f"6 turns of {num_talks} talks", prompts, 12, rng)


def choices(num_tasks: int) -> ThroughputJob:
    """Multiple choice: examples, a question, and a request for each of 2 to 10 options.

    Tasks have one to forty questions, most of them few.
    """
    rng = np.random.default_rng([SEED, 7])
    prompts = []
    for task in range(num_tasks):
        examples = rng.integers(0, 256, int(rng.integers(150, 700)), dtype=np.int32)
        for _ in range(max(1, 40 // (task + 1))):
            question = rng.integers(0, 256, int(rng.integers(10, 60)), dtype=np.int32)
            for _ in range(int(rng.integers(2, 11))):
                option = rng.integers(0, 256, int(rng.integers(1, 12)), dtype=np.int32)
                prompts.append(np.concatenate([examples, question, option]))
    return _shuffled(f"7 choices of {num_tasks} tasks", prompts, 1, rng)


def _shuffled(
    name: str, prompts: list[np.ndarray], output: int, rng: np.random.Generator
) -> ThroughputJob:
    rng.shuffle(prompts)
    params = {"max_new_tokens": output, "temperature": 0, "ignore_eos": True}
    longest = max(map(len, prompts)) + output
    return ThroughputJob(
        name,
        [prompt.tolist() for prompt in prompts],
        [params] * len(prompts),
        kv_tokens=max(4096, 2 * longest),
        max_running=32,
        context_len=1 << (2 * longest).bit_length(),
    )


# Engines --------------------------------------------------------------------------------


def _measured(job: ThroughputJob, model: Path, repeats: int) -> dict[str, list[Run]]:
    tasks = {
        policy: task_of(job, model, ours=False, policy=policy, mixed=False)
        for policy in STOCK
    }
    tasks[OURS] = _offline(tasks["fcfs"])
    tasks = {name: replace(task, repeats=repeats) for name, task in tasks.items()}
    runs: dict[str, list[Run]] = {name: [] for name in tasks}
    answers: list[list[int]] | None = None
    for name, done in zip(cycle(tasks), run_tasks([*tasks.values()])):
        runs[name].append(Run.of(job, done))
        answers = answers or done.output_ids
        if done.output_ids != answers:
            raise RuntimeError(f"{job.name}: {name} answers otherwise than fcfs")
    return runs


def _offline(task: Task) -> Task:
    """The same call to an engine with the flag."""
    return replace(task, arguments=[*task.arguments, "--offline-batch"])


def _figures(job: ThroughputJob, runs: dict[str, list[Run]]) -> list[Figure]:
    possible = job.tree().prefix_sharing_ratio
    seconds = {name: median(run.seconds for run in of) for name, of in runs.items()}
    shares = {name: median(run.cached_share for run in of) for name, of in runs.items()}
    print_table(
        f"{job.name}: {len(job.prompts)} prompts, possible {possible:.1%}",
        ["engine", "seconds", "cached", "host ms", "cpu s"],
        [
            [
                name, f"{seconds[name]:.2f}", f"{shares[name]:.1%}",
                f"{median(run.host_ms for run in of):.2f}",
                f"{median(run.cpu_s for run in of):.1f}",
            ]
            for name, of in runs.items()
        ],
    )  # fmt: skip
    stock = min(seconds[policy] for policy in STOCK)
    note = f"stock's best {max(shares[policy] for policy in STOCK):.1%}"
    return [
        Figure(f"{job.name}: cached", shares[OURS], "", (">=", possible - SHARE), note),
        Figure(
            f"{job.name}: seconds over stock's", seconds[OURS] / stock, "", ("<=", 1.0)
        ),
    ]
