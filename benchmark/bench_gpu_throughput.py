"""SGLang on a GPU: its own scheduling and this package's, on the same jobs.

    python benchmark/bench_gpu_throughput.py                   a model of 8B, all jobs
    python benchmark/bench_gpu_throughput.py --jobs 1 --engines stock ours
    python benchmark/bench_gpu_throughput.py --alone --kv-tokens all --engines lpm ours
    python benchmark/bench_gpu_throughput.py --quick           the demo model, on any machine
    python benchmark/bench_gpu_throughput.py --write DIR       jobs and model, for ``plan``

The model has the shape of Llama 3.1 8B and random weights, in bf16: the time of a step
depends on shapes alone. All engines have the same KV cache, limit of running requests and
CUDA graphs, are on the GPU at the same time, and run each job one after another, in an
empty cache, while the others sleep. With ``--alone`` one engine after another has the GPU for
itself and runs all jobs. Requests are shuffled, decoding is greedy, lengths are fixed.

A policy of SGLang: SGLang with it and the attention that it chooses for the machine.
    ``+mixed`` behind it adds ``--enable-mixed-chunk``, ``+hicache``
    ``--enable-hierarchical-cache``.
best: SGLang with the policy that took the least time for the jobs in the files of
    ``--results``, or ``dfs-weight`` if there are none.
stock, stock-mixed: dfs-weight, dfs-weight+mixed. It is SGLang's policy for shared prefixes
    that also works above 128 waiting requests.
ours: this package with its defaults, except for the policy ``auto``.
ours-order: the same with SGLang's attention and without split steps: the order alone.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_models import LLAMA, LOADABLE, config_of, room_for_kv, write_model
from report import (
    Figure,
    add_save,
    finish,
    print_figures,
    print_table,
    save_as_they_come,
    write_unfinished,
)
from throughput_engine import Engine, Run, Task
from throughput_jobs import NUM_IDS, ThroughputJob, exactly, groups

from sglang_batch.run.demo_model import write_demo_model

ORDER_ALONE = {"attention": "stock", "overlap": "off"}
# Further arguments by name.
OURS: dict[str, list[str]] = {
    "ours": [],
    "ours-order": [f"--offline-batch-config={json.dumps(ORDER_ALONE)}"],
}
POLICIES = (
    "dfs-weight", "lpm", "fcfs", "hrrn", "shortest-prefill-first", "lof", "random",
    "routing-key",
)  # fmt: skip
ADDED = {"mixed": "--enable-mixed-chunk", "hicache": "--enable-hierarchical-cache"}
NICKNAMES = {"stock": "dfs-weight", "stock-mixed": "dfs-weight+mixed"}
BEST = "best"


class Kind(NamedTuple):
    """An engine: whether it is ours, its policy, and further arguments."""

    ours: bool
    policy: str
    arguments: list[str]


def kind_of(name: str, results: Path | None = None) -> Kind:
    """The engine with this name.

    Raises:
        ValueError: there is none.
    """
    if name in OURS:
        return Kind(True, "auto", OURS[name])
    policy, *added = NICKNAMES.get(name, name).split("+")
    if policy == BEST:
        policy = best_policy(results)
    if policy not in POLICIES or not set(added) <= ADDED.keys():
        raise ValueError(
            f"{name!r} is no engine: use {', '.join(OURS)}, {BEST} or a policy of SGLang "
            f"({', '.join(POLICIES)}), with +{' or +'.join(ADDED)} behind it."
        )
    return Kind(False, policy, [ADDED[each] for each in added])


def best_policy(results: Path | None) -> str:
    """The policy whose file in ``results`` has the least seconds for the jobs of all."""
    seconds: dict[str, Counter[str]] = {}
    for policy in POLICIES:
        file = None if results is None else results / f"{policy}.json"
        if file is not None and file.exists():
            runs = json.loads(file.read_text()).get("runs", [])
            found = Counter[str]()
            for run in runs:
                found[run["job"]] += run["seconds"]
            if found:
                seconds[policy] = found
    if not seconds:
        return "dfs-weight"
    common = set.intersection(*(set(found) for found in seconds.values()))
    return min(seconds, key=lambda policy: sum(seconds[policy][j] for j in common))


@cache
def make_job(
    number: int, kv_tokens: int, max_running: int, scale: int
) -> ThroughputJob:
    """Lengths and numbers of requests are divided by ``scale``."""
    s = scale
    if number == 3:
        return two_kinds(3, 384 // s, s, kv_tokens, max_running)
    shapes = {
        # The shape of BatchLLM's micro-benchmark (section 6.1).
        1: (64, 2000, 200, 100, 16),
        2: (16, 8000, 100, 128, 64),
        # BatchLLM's public benchmark.
        4: (400, 2000, 200, 100, 16),
    }
    num_groups, shared, own, output, siblings = shapes[number]
    return groups(
        number, num_groups // s, shared // s, own // s, output // s,
        kv_tokens, max_running, seed=0, siblings=siblings // s,
    )  # fmt: skip


def two_kinds(
    number: int, pairs: int, scale: int, kv_tokens: int, max_running: int
) -> ThroughputJob:
    """Half long prompts with short answers, half short prompts with long ones."""
    rng = np.random.default_rng(number)
    requests = []
    for _ in range(pairs):
        for prompt, output in ((1500, 16), (64, 500)):
            length = int(prompt * rng.uniform(0.7, 1.3)) // scale
            tokens = rng.integers(0, NUM_IDS, length).tolist()
            most = max(int(output * rng.uniform(0.5, 1.5)) // scale, 1)
            requests.append((tokens, most))
    order = rng.permutation(len(requests))
    return ThroughputJob(
        f"{number} two kinds, {pairs} x (1500->16, 64->500)",
        [requests[i][0] for i in order],
        [exactly(requests[i][1]) for i in order],
        kv_tokens,
        max_running,
    )


def arguments_of(options: argparse.Namespace, model: Path) -> list[str]:
    """Of the server, the same for all engines."""
    arguments = [
        f"--model-path={model}",
        "--sleep-on-idle",
        f"--max-running-requests={options.max_running}",
    ]
    if options.kv_tokens is not None:
        arguments.append(f"--max-total-tokens={options.kv_tokens}")
    if options.quick:
        return [*arguments, "--dtype=float32", "--mem-fraction-static=0.3"]
    # By default SGLang has graphs for 256 rows on one H200, and ours for all that may run.
    rows = f"--cuda-graph-max-bs-decode={options.max_running}"
    return [*arguments, "--dtype=bfloat16", "--load-format=dummy", rows]


def print_job(job: ThroughputJob, runs: dict[str, list[Run]]) -> list[Figure]:
    """A table with a row for each run, and how ours compares with the best stock."""
    prompt, output = job.num_prompt_tokens, sum(job.output_lens)
    seconds = {name: min(run.seconds for run in each) for name, each in runs.items()}
    stock = [seconds[name] for name in runs if name not in OURS]
    best = min(stock, default=float("nan"))
    room = max(run.kv_tokens for each in runs.values() for run in each)
    print_table(
        f"{job.name}: {len(job.prompts)} requests, {prompt:,} prompt tokens, {output:,} of"
        f" answers, possible {job.tree().prefix_sharing_ratio:.1%}; KV {room:,},"
        f" {job.max_running} running",
        [
            "engine", "seconds", "over best stock", "requests/s", "answer tokens/s",
            "all tokens/s", "cached", "steps", "prefilled", "retractions", "host ms",
            "shared steps", "KV not read, GB", "startup s",
        ],
        [
            [
                name, f"{run.seconds:.2f}", f"{best / run.seconds:.2f}",
                f"{len(job.prompts) / run.seconds:.1f}", f"{output / run.seconds:,.0f}",
                f"{(prompt + output) / run.seconds:,.0f}", f"{run.cached_share:.1%}",
                run.num_steps, f"{run.prefill_tokens:,}", run.retractions,
                f"{run.host_ms:.2f}", run.attention["attention_steps_shared"],
                f"{run.attention['kv_read_bytes_saved'] / 1e9:,.0f}",
                f"{run.startup_s:.0f}",
            ]
            for name, each in runs.items()
            for run in each
        ],
    )  # fmt: skip
    return [
        Figure(
            f"{job.name}: {name}, times as fast as the best stock", best / seconds[name]
        )
        for name in runs
        if name in OURS and stock
    ]


class Measurement:
    """Jobs on engines. Results are saved as they come, and tables printed in the end."""

    def __init__(self, options: argparse.Namespace, model: Path, scratch: Path) -> None:
        self._options, self._model, self._scratch = options, model, scratch
        scale = 16 if options.quick else 1
        self._jobs = jobs_of(options, scale)
        self._begin = time.monotonic()
        self._runs: dict[int, dict[str, list[Run]]] = {}
        self.results: dict[str, Any] = {"runs": []}

    def measure(self) -> None:
        names = self._options.engines
        for together in [[name] for name in names] if self._options.alone else [names]:
            with self._ready(together) as engines:
                for number in self._options.jobs if engines else ():
                    self._run(number, engines)
        figures = []
        for number, runs in self._runs.items():
            figures += print_job(self._jobs[number], runs)
        if figures:
            print_figures("Figures", figures)
        self.results["figures"] = [figure.as_json for figure in figures]

    @contextmanager
    def _ready(self, names: Sequence[str]) -> Iterator[dict[str, Engine]]:
        """The engines that have started, as long as the context."""
        options = self._options
        engines: dict[str, Engine] = {}
        # One repeat more than is run: the last would end the engine.
        repeats = len(options.jobs) * options.repeats + 1
        try:
            for name in names:
                kind = kind_of(name, options.results)
                (self._scratch / name).mkdir()
                arguments = [*arguments_of(options, self._model), *kind.arguments]
                task = Task(kind.ours, kind.policy, arguments, [], [], repeats=repeats)
                engines[name] = Engine(task, self._scratch / name)
                print(f"  {name}: policy {kind.policy}", flush=True)
            for name in list(engines):
                try:
                    engines[name].until_ready()
                except RuntimeError as error:
                    if name not in options.may_fail:
                        raise
                    print(f"left out: {error}")
                    engines.pop(name).kill()
            spent = time.monotonic() - self._begin
            print(f"engines ready after {spent:.0f} s", flush=True)
            yield engines
        finally:
            for engine in engines.values():
                engine.kill()

    def _run(self, number: int, engines: dict[str, Engine]) -> None:
        """One job on each engine, in turn as often as there are repeats."""
        job = self._jobs[number]
        for _ in range(self._options.repeats):
            if time.monotonic() - self._begin > 60 * self._options.minutes:
                print(f"left out: job {number}, the time is up")
                break
            for name, engine in engines.items():
                run = Run.of(job, engine.run(job))
                of_job = self._runs.setdefault(number, {})
                of_job.setdefault(name, []).append(run)
                self.results["runs"].append(
                    {"job": job.name, "engine": name, **asdict(run)}
                )
                print(f"  {name}: {run.seconds:.2f} s", flush=True)
                write_unfinished()


def jobs_of(options: argparse.Namespace, scale: int = 1) -> dict[int, ThroughputJob]:
    """Those that the options name, by number."""
    # Without a limit, the engine has as much KV as the GPU has room for.
    kv_tokens = options.kv_tokens or 0
    return {
        number: make_job(number, kv_tokens, options.max_running, scale)
        for number in options.jobs
    }


def kv_tokens(text: str) -> int | None:
    return None if text == "all" else int(text)


def engine_name(text: str) -> str:
    try:
        kind_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, nargs="+", choices=(1, 2, 3, 4), default=[1, 2, 3],
        help="numbers of the jobs, in the order of their runs (default: 1 2 3)",
    )  # fmt: skip
    parser.add_argument(
        "--engines", nargs="+", type=engine_name, metavar="ENGINE",
        default=["stock", "stock-mixed", "ours"],
        help="in the order of their runs (default: stock stock-mixed ours)",
    )  # fmt: skip
    parser.add_argument(
        "--alone", action="store_true", help="one engine after another has the GPU"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR",
        help="files that --save has written, POLICY.json, for the engine best",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each job, engines in turn"
    )
    parser.add_argument(
        "--model", choices=LOADABLE, default=LLAMA, help=f"default: {LLAMA}"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="keep only the first of the model's"
    )
    parser.add_argument(
        "--may-fail", nargs="*", type=engine_name, metavar="ENGINE", default=[],
        help="engines that are left out if they do not start",
    )  # fmt: skip
    parser.add_argument(
        "--kv-tokens",
        type=kv_tokens,
        default=160_000,
        help="KV cache in tokens, or all: what the GPU has room for (default: 160000)",
    )
    parser.add_argument("--max-running", type=int, default=256, help="default: 256")
    parser.add_argument(
        "--minutes", type=float, default=60,
        help="begin no job after this time, engines' start included (default: 60)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="the demo model and jobs of a few seconds"
    )
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="only write model and jobs there"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only check the options and print jobs"
    )
    add_save(parser)
    options = parser.parse_args(argv)
    if options.kv_tokens is None and not options.alone and len(options.engines) > 1:
        parser.error("--kv-tokens all: one engine takes the whole GPU; add --alone.")
    return options


def check(options: argparse.Namespace) -> None:
    """Print the jobs, and whether model and requests fit.

    Raises:
        ValueError: the weights, or the longest request of a job, do not fit.
    """
    config = config_of(options.model, options.layers)
    room = room_for_kv(config)
    limit = min(room, options.kv_tokens or room)
    print(f"{options.model}: room for {room:,} tokens of KV on 80 GB, {limit:,} used")
    for job in jobs_of(options).values():
        pairs = zip(job.prompts, job.output_lens, strict=True)
        longest = max(len(prompt) + output for prompt, output in pairs)
        if longest > min(limit, config.get("max_position_embeddings", limit)):
            raise ValueError(
                f"{job.name}: a request of {longest:,} tokens does not fit"
            )
        print(f"  {job.name}: {len(job.prompts)} requests, longest {longest:,} tokens")


def write_jobs(path: Path, options: argparse.Namespace) -> None:
    """``path/model`` and ``path/job1.jsonl`` and so on, for ``sglang-batch plan``."""
    model = path / "model"
    write_model(model, options.model, options.layers)
    for number, job in jobs_of(options).items():
        with (path / f"job{number}.jsonl").open("w") as lines:
            for index, (prompt, params) in enumerate(
                zip(job.prompts, job.sampling_params, strict=True)
            ):
                body = {
                    "model": str(model),
                    "prompt": prompt,
                    "max_tokens": params["max_new_tokens"],
                    "temperature": 0,
                    "ignore_eos": True,
                }
                line = {
                    "custom_id": str(index),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": body,
                }
                lines.write(json.dumps(line) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    if options.dry_run:
        check(options)
        return
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        write_jobs(options.write, options)
        return
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        if options.quick:
            write_demo_model(model)
        else:
            write_model(model, options.model, options.layers)
        measurement = Measurement(options, model, Path(name))
        results = measurement.results
        if torch.cuda.is_available():
            results["gpu"] = torch.cuda.get_device_name()
        save_as_they_come(options.save, results)
        measurement.measure()
    finish(results, options.save)


if __name__ == "__main__":
    main()
