"""Where the time of prefill and decode steps goes on a GPU, kernel by kernel.

    python benchmark/gpu/trace_steps.py --traces DIR
    python benchmark/gpu/trace_steps.py --quick --traces DIR    the demo model, on any machine

One wave of 256 requests in groups of 16 runs three times on each engine. In the second run
SGLang's profiler records 2 prefill steps, in the third 20 decode steps after the last
prompt. Of both it prints the time of a step, the share in which the GPU computes, and the
kernels that take most. The traces stay in DIR, for https://ui.perfetto.dev. The last line
is one JSON document.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_gpu_throughput as jobs
from gpu_models import write_model
from report import (
    add_save,
    finish,
    print_table,
    save_as_they_come,
    write_unfinished,
)
from throughput_engine import Engine, Run, Task
from throughput_jobs import ThroughputJob, groups

from sglang_batch.run.demo_model import write_demo_model

STEPS = {"prefill": 2, "decode": 20}
MOST_KERNELS = 12
NUM_REQUESTS, KV_TOKENS = 256, 160_000


class Times(NamedTuple):
    """Of a trace, in microseconds.

    span: from the first operation on the device to the end of the last.
    busy: in which at least one of them runs.
    kernels: sums by name, the largest first. Some may run at the same time.
    """

    span: float
    busy: float
    kernels: dict[str, float]


def times_of(trace: Path) -> Times:
    """Of the operations on a device in a trace of torch's profiler."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"}
    found = sorted(
        (float(each["ts"]), float(each["dur"]), str(each["name"]))
        for each in events
        if each.get("cat") in wanted
    )
    sums: dict[str, float] = {}
    busy, end = 0.0, float("-inf")
    for begin, took, name in found:
        sums[name] = sums.get(name, 0.0) + took
        busy += max(0.0, begin + took - max(begin, end))
        end = max(end, begin + took)
    span = end - found[0][0] if found else 0.0
    return Times(span, busy, dict(sorted(sums.items(), key=lambda each: -each[1])))


def print_trace(engine: str, stage: str, times: Times) -> None:
    steps = STEPS[stage]
    busy = times.busy / times.span if times.span else 0.0
    print_table(
        f"{engine}, {steps} {stage} steps: {times.span / 1e3 / steps:.2f} ms a step, the"
        f" device computes in {busy:.0%} of it",
        ["kernel", "ms a step", "of the step"],
        [
            [name[:90], f"{took / 1e3 / steps:.3f}", f"{took / times.span:.1%}"]
            for name, took in list(times.kernels.items())[:MOST_KERNELS]
        ],
    )


def job_of(options: argparse.Namespace) -> ThroughputJob:
    """One wave, so that no prompt comes after the decodes have begun."""
    s = 16 if options.quick else 1
    return groups(
        1,
        16 // s,
        2000 // s,
        200 // s,
        100,
        KV_TOKENS,
        NUM_REQUESTS,
        seed=2,
        siblings=16,
    )


def measure(
    options: argparse.Namespace, scratch: Path, results: dict[str, Any]
) -> None:
    model = scratch / "model"
    if options.quick:
        write_demo_model(model)
    else:
        write_model(model)
    for name in options.engines:
        (scratch / name).mkdir()
        kind = jobs.kind_of(name)
        arguments = [*jobs.arguments_of(options, model), *kind.arguments]
        task = Task(kind.ours, kind.policy, arguments, [], [], repeats=4)
        engine = Engine(task, scratch / name)
        try:
            engine.until_ready()
            for found in traces_of(engine, name, options):
                results["traces"].append(found)
                write_unfinished()
        finally:
            engine.kill()


def traces_of(
    engine: Engine, name: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Two traces of an engine, printed, and the part of each that the results keep."""
    job = job_of(options)
    prefilled = engine.run(job).steps["prefill_tokens"]
    decodes_begin = int(np.flatnonzero(prefilled)[-1]) + 1
    for stage, first in (("prefill", 1), ("decode", decodes_begin + 4)):
        folder = options.traces.resolve() / f"{name}-{stage}"
        folder.mkdir(parents=True, exist_ok=True)
        profile = {
            "output_dir": str(folder),
            "start_step": engine.num_steps() + 1 + first,
            "num_steps": STEPS[stage],
            "with_stack": False,
            "record_shapes": False,
        }
        run = Run.of(job, engine.run(job, profile))
        found: dict[str, Any] = {"engine": name, "stage": stage}
        found["attention"] = run.attention
        traces = sorted(folder.glob("*.trace.json.gz"))
        times = times_of(traces[-1]) if traces else None
        if times is not None and times.kernels:
            found |= {"span_us": times.span, "busy_us": times.busy}
            print_trace(name, stage, times)
        else:
            print(f"{name}: {len(traces)} traces, without operations of a device")
        yield found


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", type=jobs.engine_name, metavar="ENGINE",
        default=["ours", "dfs-weight"],
        help="as in bench_gpu_throughput.py (default: ours dfs-weight)",
    )  # fmt: skip
    parser.add_argument(
        "--traces",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the traces",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the demo model and a job of a few seconds"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only check the options and print the job",
    )
    add_save(parser)
    options = parser.parse_args(argv)
    options.kv_tokens, options.max_running = KV_TOKENS, NUM_REQUESTS
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    if options.dry_run:
        print(job_of(options).name)
        return
    results: dict[str, Any] = {"traces": []}
    save_as_they_come(options.save, results)
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, Path(scratch), results)
    finish(results, options.save)


if __name__ == "__main__":
    main()
