"""SGLang on a GPU: its own scheduling and this package's, on the same jobs.

    python benchmark/bench_gpu_throughput.py                   a model of 8B, all jobs
    python benchmark/bench_gpu_throughput.py --jobs 1 --engines stock ours
    python benchmark/bench_gpu_throughput.py --quick           the demo model, on any machine
    python benchmark/bench_gpu_throughput.py --write DIR       jobs and model, for ``plan``

The model has the shape of Llama 3.1 8B and random weights, in bf16: the time of a step
depends on shapes alone. All engines have the same KV cache and limit of running requests,
are on the GPU at the same time, and run each job one after another, in an empty
cache, while the others sleep. Requests are shuffled, decoding is greedy, lengths are fixed.

stock: SGLang with ``dfs-weight``, its policy for shared prefixes that also works
    above 128 waiting requests, and the attention that it chooses for the machine.
stock-mixed: the same with ``--enable-mixed-chunk``.
ours: this package with its defaults, except for the policy ``auto``.
ours-order: the same with SGLang's attention and without split steps: the order alone.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import RESULTS, Figure, finish, print_figures, print_table
from throughput_engine import Engine, Run, Task, TaskResult
from throughput_jobs import NUM_IDS, ThroughputJob, exactly, groups

from sglang_batch.prediction.models import MODELS
from sglang_batch.run.demo_model import write_demo_model

# What the model's configuration needs beyond the sizes that plans count with.
LOADABLE = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ORDER_ALONE = {"attention": "stock", "overlap": "off"}
# Whether it is ours, its policy, and further arguments.
ENGINES: dict[str, tuple[bool, str, list[str]]] = {
    "stock": (False, "dfs-weight", []),
    "stock-mixed": (False, "dfs-weight", ["--enable-mixed-chunk"]),
    "ours": (True, "auto", []),
    "ours-order": (
        True, "auto", [f"--offline-batch-config={json.dumps(ORDER_ALONE)}"],
    ),
}  # fmt: skip


def make_jobs(kv_tokens: int, max_running: int, scale: int) -> dict[int, ThroughputJob]:
    """By number. Lengths and numbers of requests are divided by ``scale``."""
    s = scale
    sized = partial(groups, kv_tokens=kv_tokens, max_running=max_running, seed=0)
    return {
        # The shape of BatchLLM's micro-benchmark (section 6.1).
        1: sized(1, 64 // s, 2000 // s, 200 // s, 100 // s, siblings=16 // s),
        2: sized(2, 16 // s, 8000 // s, 100 // s, 128 // s, siblings=64 // s),
        3: two_kinds(3, 384 // s, s, kv_tokens, max_running),
    }


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


def write_model(path: Path, *, whole: bool) -> None:
    """The demo model, or one of 8B without weights and with the demo model's tokenizer."""
    write_demo_model(path)
    if not whole:
        return
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    ids = json.loads((path / "config.json").read_text())
    kept = {key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (path / "config.json").write_text(
        json.dumps({**MODELS["llama-3.1-8b"], **LOADABLE, **kept})
    )


def arguments_of(options: argparse.Namespace, model: Path) -> list[str]:
    """Of the server, the same for all engines."""
    arguments = [
        f"--model-path={model}",
        "--sleep-on-idle",
        f"--max-total-tokens={options.kv_tokens}",
        f"--max-running-requests={options.max_running}",
    ]
    if options.quick:
        return [*arguments, "--dtype=float32", "--mem-fraction-static=0.3"]
    return [*arguments, "--dtype=bfloat16", "--load-format=dummy"]


def print_job(job: ThroughputJob, done: dict[str, TaskResult]) -> list[Figure]:
    """A table with a row for each engine, and how ours compares with the best stock."""
    runs = {name: Run.of(job, result) for name, result in done.items()}
    prompt, output = job.num_prompt_tokens, sum(job.output_lens)
    stock = [run.seconds for name, run in runs.items() if not ENGINES[name][0]]
    best = min(stock, default=float("nan"))
    print_table(
        f"{job.name}: {len(job.prompts)} requests, {prompt:,} prompt tokens, {output:,} of"
        f" answers, possible {job.tree().prefix_sharing_ratio:.1%}; KV {job.kv_tokens:,},"
        f" {job.max_running} running",
        [
            "engine", "seconds", "over best stock", "requests/s", "answer tokens/s",
            "all tokens/s", "cached", "steps", "prefilled", "retractions", "host ms",
        ],
        [
            [
                name, f"{run.seconds:.2f}", f"{best / run.seconds:.2f}",
                f"{len(job.prompts) / run.seconds:.1f}", f"{output / run.seconds:,.0f}",
                f"{(prompt + output) / run.seconds:,.0f}", f"{run.cached_share:.1%}",
                run.num_steps, f"{run.prefill_tokens:,}", run.retractions,
                f"{run.host_ms:.2f}",
            ]
            for name, run in runs.items()
        ],
    )  # fmt: skip
    return [
        Figure(
            f"{job.name}: {name}, times as fast as the best stock", best / run.seconds
        )
        for name, run in runs.items()
        if ENGINES[name][0] and stock
    ]


def measure(options: argparse.Namespace, model: Path, scratch: Path) -> dict[str, Any]:
    """Run the jobs on the engines, and print tables as results come."""
    jobs = make_jobs(options.kv_tokens, options.max_running, 16 if options.quick else 1)
    engines: dict[str, Engine] = {}
    figures: list[Figure] = []
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    try:
        for name in options.engines:
            ours, policy, more = ENGINES[name]
            (scratch / name).mkdir()
            arguments = [*arguments_of(options, model), *more]
            # One repeat more than is run: the last would end the engine.
            task = Task(ours, policy, arguments, [], [], repeats=len(options.jobs) + 1)
            engines[name] = Engine(task, scratch / name)
        for name in list(engines):
            try:
                engines[name].until_ready()
            except RuntimeError as error:
                if name not in options.may_fail:
                    raise
                print(f"left out: {error}")
                engines.pop(name).kill()
        print(f"engines ready after {time.monotonic() - begin:.0f} s", flush=True)
        for number in options.jobs:
            if time.monotonic() - begin > 60 * options.minutes:
                print(f"left out: job {number}, the time is up")
                continue
            job, done = jobs[number], {}
            for name, engine in engines.items():
                done[name] = engine.run(job)
                print(f"  {name}: {done[name].seconds:.2f} s", flush=True)
            figures += print_job(job, done)
            rows += [
                {"job": job.name, "engine": name, **asdict(Run.of(job, result))}
                for name, result in done.items()
            ]
    finally:
        for engine in engines.values():
            engine.kill()
    print_figures("Figures", figures)
    return {"runs": rows, "figures": [figure.as_json for figure in figures]}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3],
        help="numbers of the jobs (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=["stock", "stock-mixed", "ours"],
        help="in the order of their runs (default: stock stock-mixed ours)",
    )  # fmt: skip
    parser.add_argument(
        "--may-fail", nargs="*", choices=ENGINES, default=[],
        help="engines that are left out if they do not start",
    )  # fmt: skip
    parser.add_argument(
        "--kv-tokens",
        type=int,
        default=160_000,
        help="KV cache (default: 160000 tokens)",
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
    parser.add_argument("--save", metavar="NAME", help="also write results/NAME.json")
    return parser.parse_args()


def write_jobs(path: Path, options: argparse.Namespace) -> None:
    """``path/model`` and ``path/job1.jsonl`` and so on, for ``sglang-batch plan``."""
    model = path / "model"
    write_model(model, whole=True)
    for number, job in make_jobs(options.kv_tokens, options.max_running, 1).items():
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


def main() -> None:
    options = parse_options()
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        write_jobs(options.write, options)
        return
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_model(model, whole=not options.quick)
        results = measure(options, model, Path(name))
    if torch.cuda.is_available():
        results["gpu"] = torch.cuda.get_device_name()
    finish(results, RESULTS / f"{options.save}.json" if options.save else None)


if __name__ == "__main__":
    main()
