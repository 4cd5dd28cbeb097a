"""The end of a job: seconds in which the engine is less than half full, on job 5.

Job 5 of throughput_jobs.py has two tasks in one file, and answers of unknown length. It runs with
``sglang-batch run`` on the demo model, by each policy to its last answer and with
``--enough 99%``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Figure
from throughput_engine import run_task, task_of
from throughput_jobs import ThroughputJob, blend, blend_draft

from sglang_batch.demo_model import write_demo_model

PAIRS, SEED, RUNS = 768, 0, 2
ENOUGH = 0.99
# What `run` does without --policy, and the orders that end with short answers.
TODAY = "dfs"
POLICIES = (TODAY, "dfs-longest", "auto")
URL = "/v1/completions"


def measure(quick: bool) -> list[Figure]:
    """Job 5 by each policy, to its last answer and to enough answers."""
    with tempfile.TemporaryDirectory(prefix="bench-tail-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        draft = blend_draft(SEED, num_pairs=PAIRS // 8 if quick else PAIRS)
        whole = task_of(
            draft.whole_answers, place / "model", ours=False, policy="fcfs", mixed=False
        )
        job = blend(draft, run_task(whole).output_ids)
        (place / "in.jsonl").write_text("".join(lines(job)))
        found: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for _ in range(RUNS):
            for policy in POLICIES:
                for enough in (False, True):
                    summary = run(place, job, policy, enough)
                    found.setdefault((policy, enough), []).append(summary)
                    told = f"{policy}{' --enough' * enough}: {summary['seconds']} s, "
                    print(told + f"tail {summary['tail']}", file=sys.stderr)
    tails = {
        kind: min(x["tail"]["engine_s"] for x in runs) for kind, runs in found.items()
    }
    seconds = {kind: min(x["seconds"] for x in runs) for kind, runs in found.items()}
    today = tails[TODAY, False]
    figures = [
        Figure(
            f"{policy}{f' --enough {ENOUGH:.0%}' * enough}: engine seconds less than half full",
            tails[policy, enough], unit="s",
            note=f"{tails[policy, enough] / today:.2f} of {TODAY}'s, "
            f"{seconds[policy, enough]:.2f} s in all",
        )
        for policy in POLICIES for enough in (False, True)
    ]  # fmt: skip
    best = min(tails[policy, True] for policy in POLICIES)
    return [
        *figures,
        Figure(
            f"with --enough {ENOUGH:.0%}, of those of {TODAY} to the last answer",
            best / today, target=("<=", 1 / 3),
        ),
    ]  # fmt: skip


def lines(job: ThroughputJob) -> list[str]:
    """The batch lines of a job."""
    found = []
    for number, (prompt, params) in enumerate(
        zip(job.prompts, job.sampling_params, strict=True)
    ):
        body = {"model": "demo", "prompt": prompt, "temperature": 0}
        body |= {
            "max_tokens": params["max_new_tokens"],
            "stop_token_ids": params["stop_token_ids"],
        }
        entry = {"custom_id": f"{number}", "method": "POST", "url": URL, "body": body}
        found.append(json.dumps(entry) + "\n")
    return found


def run(place: Path, job: ThroughputJob, policy: str, enough: bool) -> dict[str, Any]:
    """Run the job. Returns its summary."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_batch", "run", "--overwrite"),
            *("-i", str(place / "in.jsonl"), "-o", str(place / "out.jsonl")),
            *(f"--model-path={place / 'model'}", "--served-model-name=demo"),
            *(f"--policy={policy}", *job.server_arguments, "--disable-overlap-schedule"),
            *([f"--enough={ENOUGH}"] if enough else []),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
