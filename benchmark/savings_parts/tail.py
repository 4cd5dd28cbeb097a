"""The end of a job: seconds in which the engine is less than half full.

Job 5 of throughput_jobs.py has two tasks in one file, and answers of unknown length. In the other job one
of its short prompts in a hundred does not end at its stop, but after 1,500 tokens. Both run with
``sglang-batch run`` on the demo model, to the last answer and with ``--enough 99%``.

Then the engine seconds of a fleet, simulated, whose engines end when nothing is left for
them, and of one whose engines all stay to the last answer.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fleet_parts.simulated_fleet import World
from fleet_parts.virtual_time import run_virtually
from report import Figure
from throughput_engine import run_task, task_of
from throughput_jobs import ThroughputJob, blend, blend_draft

from sglang_batch.run.demo_model import write_demo_model

PAIRS, SEED, RUNS = 768, 0, 2
ENOUGH = 0.99
LONG, LONG_SHARE = 1500, 0.01
# Without --policy, and the order that ends with short answers.
POLICIES = ("dfs", "dfs-longest")
URL = "/v1/completions"
# The simulated fleet: lines of each engine, how many run in it at a time, mean seconds of a
# line, and how much longer some of them take.
FLEET_ENGINES, FLEET_LINES, FLEET_ROWS, FLEET_S, FLEET_LONG = 16, 200, 16, 2.5, 20

Kind = tuple[str, str, bool]


def measure(quick: bool) -> list[Figure]:
    """Both jobs by each policy, to the last answer and to enough answers."""
    with tempfile.TemporaryDirectory(prefix="bench-tail-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        draft = blend_draft(SEED, num_pairs=PAIRS // 8 if quick else PAIRS)
        whole = task_of(
            draft.whole_answers, place / "model", ours=False, policy="fcfs", mixed=False
        )
        job = blend(draft, run_task(whole).output_ids)
        jobs = {
            "job 5": bodies(job),
            f"job 5, {LONG_SHARE:.0%} long": with_long_answers(bodies(job)),
        }
        found: dict[Kind, list[dict[str, Any]]] = {}
        for name, each in jobs.items():
            source = place / "in.jsonl"
            source.write_text("".join(map(line, range(len(each)), each)))
            for _ in range(RUNS):
                for policy in POLICIES:
                    for enough in (False, True):
                        summary = run(place, job, policy, enough)
                        found.setdefault((name, policy, enough), []).append(summary)
                        told = f"{name}, {policy}{' --enough' * enough}"
                        print(
                            f"{told}: {summary['seconds']} s, {summary['tail']}",
                            file=sys.stderr,
                        )
    return [figure for name in jobs for figure in figures(name, found)] + [
        *fleet_figures("mixed lengths", 0.0, ("<=", 0.9)),
        *fleet_figures(f"{LONG_SHARE:.0%} long", LONG_SHARE, ("<=", 0.5)),
    ]


def fleet_figures(
    name: str, long_share: float, target: tuple[str, float]
) -> list[Figure]:
    """Engine seconds of simulated fleets whose engines end early, and stay."""
    rng = random.Random(SEED)
    seconds = [
        rng.expovariate(1 / FLEET_S) * (FLEET_LONG if rng.random() < long_share else 1)
        for _ in range(FLEET_ENGINES * FLEET_LINES)
    ]
    stay, end = (
        run_virtually(
            World(
                SEED, num_lines=len(seconds), num_workers=FLEET_ENGINES,
                rows=FLEET_ROWS, faults=0, loss=0.0, releases=releases, seconds=seconds,
            ).run(),
            36_000.0,
        )
        for releases in (False, True)
    )  # fmt: skip
    if set(end.computed.values()) != {1} or len(end.answered) != len(seconds):
        raise RuntimeError("a released engine lost a line")
    what = f"{FLEET_ENGINES} simulated engines, {name}"
    return [
        Figure(
            f"{what}: engine seconds, those without work released, against all kept",
            end.engine_s / stay.engine_s, target=target,
            note=f"{end.engine_s:,.0f} of {stay.engine_s:,.0f} s; the last answer after "
            f"{end.seconds:,.1f} and {stay.seconds:,.1f} s",
        )
    ]  # fmt: skip


def figures(name: str, found: dict[Kind, list[dict[str, Any]]]) -> list[Figure]:
    """Those of one job."""
    tails = {
        (policy, enough): min(x["tail"]["engine_s"] for x in runs)
        for (job, policy, enough), runs in found.items()
        if job == name
    }
    whole = tails[POLICIES[0], False]
    rows = []
    for (policy, enough), tail in tails.items():
        runs = found[name, policy, enough]
        seconds = min(x["seconds"] for x in runs)
        given_up = max(x["given_up"] for x in runs)
        rows.append(
            Figure(
                f"{name}, {policy}{f' --enough {ENOUGH:.0%}' * enough}: engine seconds "
                "less than half full",
                tail, unit="s", note=f"of {seconds:.2f} s; {given_up} lines given up",
            )
        )  # fmt: skip
    # Where nothing is left to save, a ratio of milliseconds says nothing.
    seconds = min(x["seconds"] for x in found[name, POLICIES[0], False])
    if whole < 0.01 * seconds:
        rows.append(
            Figure(
                f"{name}: tail of {POLICIES[0]} to the last answer, of all seconds",
                whole / seconds, target=("<=", 0.01),
            )
        )  # fmt: skip
    else:
        rows.append(
            Figure(
                f"{name}: with --enough {ENOUGH:.0%}, of the tail of {POLICIES[0]} to the "
                "last answer",
                min(tails[policy, True] for policy in POLICIES) / whole,
                target=("<=", 1 / 3),
            )
        )  # fmt: skip
    return rows


def bodies(job: ThroughputJob) -> list[dict[str, Any]]:
    """The bodies of a job's requests."""
    return [
        {
            "model": "demo",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": params["max_new_tokens"],
            "stop_token_ids": params["stop_token_ids"],
        }
        for prompt, params in zip(job.prompts, job.sampling_params, strict=True)
    ]


def with_long_answers(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, some of the short prompts with long answers."""
    short = min(len(each["prompt"]) for each in requests)
    places = [i for i, each in enumerate(requests) if len(each["prompt"]) == short]
    rng = random.Random(SEED)
    long = set(rng.sample(places, max(1, int(LONG_SHARE * len(requests)))))
    return [
        {**each, "max_tokens": LONG, "stop_token_ids": [], "ignore_eos": True}
        if i in long
        else {**each, "max_tokens": LONG}
        for i, each in enumerate(requests)
    ]


def line(number: int, body: dict[str, Any]) -> str:
    entry = {"custom_id": f"{number}", "method": "POST", "url": URL, "body": body}
    return json.dumps(entry) + "\n"


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
