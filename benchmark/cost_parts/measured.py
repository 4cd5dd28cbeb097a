"""Predicted against measured seconds of jobs 1 to 5 on this CPU, after a calibration.

``sglang-batch calibrate`` times steps of random prompts for the demo model. Then each of the
jobs of ``throughput_jobs.py`` is predicted with these costs alone, and run: prompts and decodes
mixed where that pays, greedy, one thread. A prediction knows the answers' lengths, but for the
order, which is made with the engine's knowledge. Each round calibrates anew, since the speed of
a shared machine changes from one minute to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench_offline_throughput import make_job
from report import Figure, print_table
from throughput_jobs import ThroughputJob

from sglang_batch.run.demo_model import write_demo_model

ENGINE = Path(__file__).parents[1] / "cost_engine.py"
# What ``auto`` takes by these costs, and last the order that it leaves for job 5.
RUNS = ((1, "dfs"), (2, "dfs"), (3, "dfs"), (4, "dfs"), (5, "dfs"), (5, "dual-scan"))
MOST_ERROR = 0.10
MOST_CALIBRATION_S = 120.0
ROUNDS = 3
# As large as the largest job's.
CALIBRATED = (
    "--dtype=float32", "--mem-fraction-static=0.3", "--max-total-tokens=25600",
    "--max-running-requests=128", "--chunked-prefill-size=512", "--enable-mixed-chunk",
)  # fmt: skip


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. ``quick`` takes job 1 alone, once."""
    options = argparse.Namespace(seed=0, quick=False, trace=None)
    runs = RUNS[:1] if quick else RUNS
    found: dict[tuple[int, str], list[dict[str, Any]]] = {each: [] for each in runs}
    calibrations = []
    with TemporaryDirectory(prefix="sglang-batch-costs-") as scratch:
        directory = Path(scratch)
        model = directory / "demo"
        write_demo_model(model)
        jobs = {number: make_job(number, options, model) for number, _ in runs}
        for _ in range(1 if quick else ROUNDS):
            shutil.rmtree(directory / "data", ignore_errors=True)
            calibrations.append(calibrate(model, directory / "data"))
            for number, policy in runs:
                found[number, policy].append(
                    run(jobs[number], policy, model, directory)
                )
    figures = [
        Figure(
            "seconds of calibrate", max(calibrations), "s", ("<=", MOST_CALIBRATION_S)
        )
    ]
    rows = []
    for (number, policy), each in found.items():
        errors = [one["predicted_s"] / one["measured_s"] - 1 for one in each]
        rows.append(
            [
                jobs[number].name,
                policy,
                *(
                    " ".join(f"{one[name]:.2f}" for one in each)
                    for name in ("measured_s", "predicted_s")
                ),
                " ".join(f"{error:+.1%}" for error in errors),
                *(
                    " ".join(str(one[name]) for one in each)
                    for name in ("measured_steps", "predicted_steps")
                ),
            ]
        )
        figures.append(
            Figure(
                f"job {number}, {policy}: median error of the predicted seconds",
                abs(median(errors)),
                "",
                ("<=", MOST_ERROR) if (number, policy) != RUNS[-1] else None,
            )
        )
    print_table(
        "Jobs on this CPU, seconds in each round",
        ("job", "order", "measured", "predicted", "error", "steps", "predicted"),
        rows,
    )
    return figures


def calibrate(model: Path, data: Path) -> float:
    """Time steps of the demo model; returns the seconds that it takes."""
    begin = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_batch", "calibrate"),
            *(f"--model-path={model}", *CALIBRATED),
        ],
        env=_environment(data),
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    if "Costs of " not in done.stdout:
        raise RuntimeError(f"calibrate: {done.stderr[-3000:]}")
    return time.monotonic() - begin


def run(
    job: ThroughputJob, policy: str, model: Path, directory: Path
) -> dict[str, Any]:
    """Predict a job and run it, with the calibrated costs alone."""
    data = directory / "run"
    shutil.rmtree(data, ignore_errors=True)
    shutil.copytree(directory / "data", data)
    task = directory / "task.json"
    arguments = [f"--model-path={model}", "--enable-mixed-chunk", *job.server_arguments]
    task.write_text(
        json.dumps(
            {
                "policy": policy,
                "arguments": arguments,
                "prompts": job.prompts,
                "sampling_params": job.sampling_params,
                "output_lens": job.output_lens,
            }
        )
    )
    done = subprocess.run(
        [sys.executable, str(ENGINE), str(task)],
        env=_environment(data),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{job.name}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not found["timed"]:
        raise RuntimeError(f"{job.name}: the calibrated costs were not used")
    return found


def _environment(data: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_DATA_HOME": str(data)}
