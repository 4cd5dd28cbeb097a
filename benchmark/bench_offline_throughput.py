"""SGLang on a CPU: its own scheduling policies and this package's, on the same jobs.

    python benchmark/bench_offline_throughput.py                all jobs, 3 repeats
    python benchmark/bench_offline_throughput.py --jobs 1 5     some of them
    python benchmark/bench_offline_throughput.py --trace FILE   job 4 from a Mooncake trace

Every run has its own process and engine, with the same server arguments, the demo model
and greedy decoding. Stock SGLang gets all prompts in one call of
``sglang.Engine.generate``, this package gets them as one job. Both run with and without
``--enable-mixed-chunk``, and the faster run of each policy counts. The engines of a job are
all started and then timed one after another, while the others sleep.

possible: share of the prompt tokens that a perfect prefix cache would save.
cached: share that came from the cache in the first prefill of each request.
recomputed: tokens prefilled again after a retraction, of prompts and of answers.
blend: distance of the steps from the job's own mix of compute (tokens) and memory (KV
    tokens that decodes read). Each step has a share of the job's least compute and one
    of its memory. Blend is the standard deviation of compute / (compute + memory),
    weighted by their sum: 0 if all steps are alike, 0.5 if each is only one of them.
host ms: mean time of a step in the scheduler's own methods.
cpu s: processor time of all steps in the scheduler process. Unlike seconds, it hardly
    depends on other programs on the machine.

Answers that differ from those of stock ``fcfs`` end the benchmark with status 1, as do
missed targets. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from report import (
    Figure,
    add_save,
    end_engines_at_sigterm,
    finish,
    print_figures,
    print_table,
)
from throughput_engine import Run, run_task, run_tasks, task_of
from throughput_jobs import (
    ThroughputJob,
    blend,
    blend_draft,
    from_trace,
    groups,
    two_levels,
)
from tqdm import tqdm

from sglang_batch.run.demo_model import write_demo_model

STOCK = ("fcfs", "lpm", "dfs-weight")
OURS = ("dfs", "dual-scan")
# With unknown lengths, SGLang's policy against running out of KV is measured too.
STOCK_OF_BLEND = (*STOCK, "lof")
MIXED = {"both": (False, True), "no": (False,), "yes": (True,)}


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine with one policy."""

    ours: bool
    policy: str
    mixed: bool

    @property
    def name(self) -> str:
        """``stock fcfs`` or ``ours dfs``."""
        return f"{'ours' if self.ours else 'stock'} {self.policy}"


def measure_job(
    job: ThroughputJob, variants: Sequence[Variant], repeats: int, model: Path
) -> dict[Variant, list[Run]]:
    """Every variant ``repeats`` times.

    Raises:
        RuntimeError: answers differ from those of the first variant's first run.
    """
    runs: dict[Variant, list[Run]] = {variant: [] for variant in variants}
    expected: list[list[int]] = []
    tasks = [
        task_of(
            job, model,
            ours=variant.ours, policy=variant.policy, mixed=variant.mixed,
        )
        for variant in variants
    ]  # fmt: skip
    for number in range(repeats):
        # Rotate the order, so that the first place gives no advantage.
        first = number % len(variants)
        results = run_tasks([*tasks[first:], *tasks[:first]] if expected else tasks)
        in_order = [*variants[first:], *variants[:first]] if expected else variants
        progress = tqdm(results, f"{job.name}, {number + 1}", len(tasks), unit="run")
        for variant, done in zip(in_order, progress, strict=True):
            expected = expected or done.output_ids
            check_answers(job, variant, done.output_ids, expected)
            runs[variant].append(Run.of(job, done))
    return runs


def check_answers(
    job: ThroughputJob,
    variant: Variant,
    answers: list[list[int]],
    expected: list[list[int]],
) -> None:
    """Same answers as the first run, and as long as the job says."""
    differing = [i for i, answer in enumerate(answers) if answer != expected[i]]
    if differing:
        raise RuntimeError(
            f"{job.name}, {variant.name}: {len(differing)} answers differ from those of"
            f" stock fcfs, the first that of request {differing[0]}."
        )
    if [len(answer) for answer in answers] != job.output_lens:
        raise RuntimeError(
            f"{job.name}, {variant.name}: the lengths of the answers are not the job's."
        )


def faster(runs: dict[Variant, list[Run]]) -> dict[str, Variant]:
    """By name, the faster of with and without mixed chunks."""
    best: dict[str, Variant] = {}
    for variant in sorted(runs, key=lambda v: _seconds(runs[v]), reverse=True):
        best[variant.name] = variant
    return {variant.name: best[variant.name] for variant in runs}


def _seconds(runs: Sequence[Run]) -> float:
    return median(run.seconds for run in runs)


# Tables -------------------------------------------------------------------------------


def print_job(job: ThroughputJob, runs: dict[Variant, list[Run]]) -> list[Figure]:
    """A job's table, and the figures that have targets."""
    possible = job.tree().prefix_sharing_ratio
    best = faster(runs)
    stock = {n: v for n, v in best.items() if not v.ours}
    stock_s = min(_seconds(runs[variant]) for variant in stock.values())
    rows = [
        _row(variant, measured, stock_s, counted=variant == best[variant.name])
        for variant, measured in runs.items()
    ]
    print_table(
        f"{job.name}: {len(job.prompts)} requests, {job.num_prompt_tokens:,} prompt"
        f" tokens, possible {possible:.1%}; KV {job.kv_tokens:,},"
        f" {job.max_running} running",
        [
            "policy", "mixed chunk", "seconds", "from-to", "over best stock", "counts",
            "cached", "steps", "prefilled", "recomputed", "retractions", "blend",
            "host ms", "cpu s",
        ],
        rows,
    )  # fmt: skip
    return _figures(job, runs, best)


def _row(
    variant: Variant, runs: Sequence[Run], stock_s: float, *, counted: bool
) -> list[str]:
    seconds = [run.seconds for run in runs]
    med = partial(_median, runs)
    return [
        variant.name, "yes" if variant.mixed else "no", f"{median(seconds):.2f}",
        f"{min(seconds):.2f}-{max(seconds):.2f}", f"{stock_s / median(seconds):.2f}",
        "*" if counted else "", f"{med('cached_share'):.1%}",
        f"{med('num_steps'):,.0f}", f"{med('prefill_tokens'):,.0f}",
        f"{med('recomputed_tokens'):,.0f}", f"{med('retractions'):,.0f}",
        f"{med('blend_spread'):.3f}", f"{med('host_ms'):.2f}",
        f"{med('cpu_s'):.2f}",
    ]  # fmt: skip


def _median(runs: Sequence[Run], name: str) -> float:
    return float(median(getattr(run, name) for run in runs))


def _figures(
    job: ThroughputJob, runs: dict[Variant, list[Run]], best: dict[str, Variant]
) -> list[Figure]:
    """The figures of a job that have a target, for the policy that the job is for."""
    number = int(job.name.split()[0])
    variant = best.get("ours dual-scan" if number == 5 else "ours dfs")
    if variant is None:
        return []
    ours = runs[variant]
    stock = {name: runs[v] for name, v in best.items() if not v.ours}
    fastest = min(stock.values(), key=_seconds)
    cached = _median(ours, "cached_share") / job.tree().prefix_sharing_ratio
    figures = [
        Figure(
            f"{job.name}: times as fast as the best stock",
            _seconds(fastest) / _seconds(ours),
            target=(">=", 1.0) if number in (1, 2, 3) else None,
            note=f"best stock {_seconds(fastest):.2f} s",
        ),
        Figure(
            f"{job.name}: cached / possible", cached,
            target=(">=", 0.98 if number == 4 else 0.995) if number < 5 else None,
        ),
        Figure(
            f"{job.name}: recomputed tokens", _median(ours, "recomputed_tokens"),
            target=("<=", 0.0),
        ),
    ]  # fmt: skip
    if number == 5:
        fewest = min(_median(r, "num_steps") for r in stock.values())
        figures.append(
            Figure(
                f"{job.name}: steps / fewest of stock",
                _median(ours, "num_steps") / fewest,
                target=("<=", 0.999),
                note=f"stock {fewest:.0f}",
            )
        )
    if number == 5 and "stock dfs-weight" in stock:
        uneven = _median(stock["stock dfs-weight"], "blend_spread")
        figures.append(
            Figure(
                f"{job.name}: blend / that of dfs-weight",
                _median(ours, "blend_spread") / uneven,
                target=("<=", 0.5),
                note=f"dfs-weight {uneven:.3f}",
            )
        )
    return figures


def as_json(job: ThroughputJob, runs: dict[Variant, list[Run]]) -> dict[str, Any]:
    """Every run of every variant."""
    best = faster(runs)
    return {
        "job": job.name,
        "requests": len(job.prompts),
        "prompt_tokens": job.num_prompt_tokens,
        "possible_cached_share": job.tree().prefix_sharing_ratio,
        "arguments": job.server_arguments,
        "variants": [
            {
                **asdict(variant),
                "counts": variant == best[variant.name],
                "median_seconds": _seconds(measured),
                "runs": [asdict(run) for run in measured],
            }
            for variant, measured in runs.items()
        ],
    }


# The command --------------------------------------------------------------------------


def make_job(number: int, options: argparse.Namespace, model: Path) -> ThroughputJob:
    """Job 1 to 5 of the table in throughput_jobs.py."""
    seed = options.seed
    if number == 1:
        return groups(1, 8 if options.quick else 32, 512, 32, 8, 6144, 32, seed)
    if number == 2:
        return groups(2, 40, 512, 32, 8, 6144, 32, seed)
    if number == 3:
        return groups(3, 60, 1024, 64, 32, 25_600, 64, seed)
    if number == 4:
        return from_trace(options.trace, seed) if options.trace else two_levels(seed)
    # The stops of the requests are taken from their whole answers.
    draft = blend_draft(seed, num_pairs=768)
    task = task_of(draft.whole_answers, model, ours=False, policy="fcfs", mixed=False)
    return blend(draft, run_task(task).output_ids)


def variants_of(number: int, options: argparse.Namespace) -> list[Variant]:
    stock = options.stock or (STOCK_OF_BLEND if number == 5 else STOCK)
    # fcfs comes first: the others' answers are compared with its.
    return [
        Variant(ours, policy, mixed)
        for ours, policies in ((False, stock), (True, options.ours))
        for policy in policies
        for mixed in MIXED[options.mixed]
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", type=int, nargs="+", choices=range(1, 6),
        help="numbers of the jobs (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--stock", nargs="+", metavar="POLICY",
        help="SGLang's policies, fcfs first (default: "
        f"{' '.join(STOCK)}, on job 5 also lof)",
    )  # fmt: skip
    parser.add_argument(
        "--ours", nargs="*", metavar="POLICY",
        help=f"this package's policies (default: {' '.join(OURS)})",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, help="rounds (default: 3)")
    parser.add_argument(
        "--mixed", choices=MIXED,
        help="run with mixed chunks, without, or both, of which the faster counts "
        "(default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="Mooncake trace for job 4 (default: a synthetic job with two levels)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="only a small job 1 with fcfs and our dfs, once, without mixed chunks",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_save(parser)
    options = parser.parse_args()
    quick = options.quick
    options.jobs = options.jobs or ([1] if quick else [1, 2, 3, 4, 5])
    options.repeats = options.repeats or (1 if quick else 3)
    options.mixed = options.mixed or ("no" if quick else "both")
    if options.ours is None:
        options.ours = OURS[:1] if quick else OURS
    if options.stock is None and quick:
        options.stock = STOCK[:1]
    if options.stock and options.stock[0] != "fcfs":
        parser.error(
            "--stock must begin with fcfs: all answers are compared with its answers"
        )
    return options


def main() -> int:
    options = parse_options()
    end_engines_at_sigterm()
    figures: list[Figure] = []
    jobs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        for number in options.jobs:
            job = make_job(number, options, model)
            runs = measure_job(
                job, variants_of(number, options), options.repeats, model
            )
            figures += print_job(job, runs)
            jobs.append(as_json(job, runs))
    if options.quick:  # too small to compare times
        figures = [Figure(f.name, f.value, note=f.note) for f in figures]
    print_figures("Figures", figures)
    finish(
        {"jobs": jobs, "figures": [figure.as_json for figure in figures]},
        options.save,
    )
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
