"""Lines lost and doubled when processes are killed: 1,000 simulated jobs and 50 real ones.

A real job runs on two engines of a Ray cluster on this machine. With lines in flight, one of
these is killed (SIGKILL), in turn: the head of the job, an engine's actor, its scheduler, a
node's raylet, the process that knows the cluster (GCS). After a head or the cluster is gone,
the same command runs again. Every answer is compared with that of an undisturbed job.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from report import Figure, print_table
from tqdm import tqdm

from sglang_batch.run.demo_model import write_demo_model

from . import local_cluster
from .local_cluster import LocalCluster
from .local_cluster import local_cluster as cluster_of
from .simulated_fleet import World
from .virtual_time import run_virtually

DATA = Path(__file__).parents[1] / "data" / "demo_requests.jsonl"
SIMULATED, REAL = 1000, 50
KINDS = ("driver", "actor", "scheduler", "raylet", "GCS")
POLICIES = ("dfs", "dual-scan", "auto", "lpt", "fcfs")
# Least and most lines that are done when something is killed.
KILL_FROM, KILL_TO = 24, 150
JOB_S = 400.0
# Of these the engine dies at once. One whose raylet is gone works and answers until Ray gives
# its node up. Its jobs have the lines of the file several times, so that they have not ended
# when it is lost.
DEADLY = ("actor", "scheduler")
COPIES = {"raylet": 5}
# Lines that an engine has in flight: those that run, and those that it was sent ahead.
IN_FLIGHT = 8 + 16


def measure(quick: bool) -> list[Figure]:
    """Simulated and real runs."""
    simulated = SIMULATED // 20 if quick else SIMULATED
    return [*simulate(simulated), *run_real(len(KINDS) if quick else REAL)]


# Simulated -----------------------------------------------------------------------------


def simulate(num_runs: int) -> list[Figure]:
    """Jobs with up to 13 faults each, a lossy network, and lines that kill engines."""
    logging.disable(logging.CRITICAL)
    lost = doubled = wrong = again = losses = heads = 0
    begun = time.monotonic()
    for seed in tqdm(range(num_runs), desc="Simulated", unit="job"):
        poison = frozenset({seed % 120, (7 * seed + 3) % 120} if seed % 3 == 0 else ())
        world = World(
            seed,
            faults=4 if poison else seed % 14,
            loss=(0.0, 0.01, 0.05, 0.2)[seed % 4],
            num_workers=1 + seed % 5,
            policy=POLICIES[seed % len(POLICIES)],
            poison=poison,
            releases=seed % 2 == 1,
        )
        outcome = run_virtually(world.run(), 36_000)
        lost += 120 - len(outcome.answered)
        doubled += sum(count - 1 for count in outcome.answered.values())
        wrong += len(outcome.failed ^ poison)
        again += sum(count - 1 for count in outcome.computed.values())
        losses += outcome.losses
        heads += outcome.heads - 1
    logging.disable(logging.NOTSET)
    print(
        f"{num_runs:,} simulated jobs of 120 lines: {losses:,} workers and {heads:,} heads "
        f"lost, {again:,} lines computed again, {time.monotonic() - begun:.0f} s"
    )
    return [
        Figure("simulated: lines lost", lost, target=("<=", 0)),
        Figure("simulated: lines doubled", doubled, target=("<=", 0)),
        Figure(
            "simulated: lines with a wrong error, or without theirs", wrong,
            target=("<=", 0), note="lines that kill engines are found, no others blamed",
        ),
        Figure(
            "simulated: lines computed again for each worker or head lost",
            again / max(1, losses + heads),
        ),
    ]  # fmt: skip


# Real ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One job and what happened.

    heads: processes of heads that it took.
    noticed_s: seconds until the head knew of a lost engine. None where none was killed.
    """

    kind: str
    lost: int
    doubled: int
    different: int
    heads: int
    seconds: float
    noticed_s: float | None


def run_real(num_runs: int) -> list[Figure]:
    """Jobs on real engines, each disturbed once."""
    random_ = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        with cluster_of(2) as cluster:
            wanted, _ = run_job(cluster, place, None, random_)
            runs = []
            for i in tqdm(range(num_runs), desc="Real", unit="job"):
                kind = KINDS[i % len(KINDS)]
                answers, run = run_job(cluster, place, kind, random_)
                num_lines = len(wanted) * COPIES.get(kind, 1)
                run.lost = num_lines - len(answers)
                run.different = sum(
                    answers.get(line) != wanted[line % len(wanted)]
                    for line in range(num_lines)
                )
                runs.append(run)
    rows = []
    for kind in KINDS:
        these = [run for run in runs if run.kind == kind]
        noticed = [run.noticed_s for run in these if run.noticed_s is not None]
        rows.append(
            [
                kind, len(these), sum(r.lost for r in these),
                sum(r.doubled for r in these), sum(r.different for r in these),
                f"{max(noticed):.1f}" if noticed else "-",
                f"{sum(r.seconds for r in these) / max(1, len(these)):.0f}",
            ]
        )  # fmt: skip
    print_table(
        f"{num_runs} jobs of {len(wanted)} lines (raylet: {COPIES['raylet']} times as many), "
        "each disturbed by one SIGKILL",
        ["killed", "jobs", "lost", "doubled", "different", "noticed s", "seconds"],
        rows,
    )
    noticed = [
        r.noticed_s for r in runs if r.kind in DEADLY and r.noticed_s is not None
    ]
    nodes = [
        r.noticed_s for r in runs if r.kind == "raylet" and r.noticed_s is not None
    ]
    return [
        Figure("real: lines lost", sum(r.lost for r in runs), target=("<=", 0)),
        Figure("real: lines doubled", sum(r.doubled for r in runs), target=("<=", 0)),
        Figure(
            "real: answers that differ from the undisturbed job's",
            sum(r.different for r in runs), target=("<=", 0),
        ),
        Figure(
            "real: seconds until a dead engine is noticed, most", max(noticed),
            target=("<=", 10.0),
        ),
        Figure(
            "real: seconds until a node without its raylet is given up, most",
            max(nodes, default=0.0), note="by Ray; its engine answers until then",
        ),
    ]  # fmt: skip


def run_job(
    cluster: LocalCluster, place: Path, kind: str | None, random_: random.Random
) -> tuple[dict[int, bytes], _Run]:
    """Run a job to its end, and kill something on the way."""
    directory = place / "job"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    results = directory / "results.jsonl"
    kill_at = random_.randrange(KILL_FROM, KILL_TO)
    begun, heads, noticed_s = time.monotonic(), 0, None
    done = False
    while not done:
        heads += 1
        # Both engines are there when one is killed.
        wait_for = 2 if heads == 1 else 1
        copies = COPIES.get(kind or "", 1)
        head = start_head(cluster, directory, place / "model", wait_for, copies)
        try:
            if kind is not None and heads == 1:
                _wait_for(results, kill_at, head)
                killed_at = time.time()
                _kill(kind, cluster, head)
                head.wait(JOB_S)
                noticed_s = _noticed_s(directory / "head.log", killed_at)
                _mend(kind, cluster)
            done = head.wait(JOB_S) == 0
        finally:
            head.kill()
        if heads == 4:
            raise RuntimeError(f"{kind}: the job does not end; see {directory}")
    answers, doubled = answers_in(results)
    seconds = time.monotonic() - begun
    if kind in ("driver", "GCS"):
        noticed_s = None
    return answers, _Run(kind or "", 0, doubled, 0, heads, seconds, noticed_s)


def _wait_for(results: Path, count: int, head: subprocess.Popen[bytes]) -> None:
    """Wait until so many lines are done, or the head has ended."""
    local_cluster.wait_until(
        lambda: num_lines(results) >= count or head.poll() is not None, JOB_S
    )


def start_head(
    cluster: LocalCluster,
    directory: Path,
    model: Path,
    wait_for: int = 1,
    copies: int = 1,
) -> subprocess.Popen[bytes]:
    """Start a head of the job in ``directory`` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fleet_parts.fault_driver", cluster.address, str(DATA),
         str(directory), str(model), "2", str(wait_for), str(copies)],
        cwd=Path(__file__).parents[1],
    )  # fmt: skip


def _kill(kind: str, cluster: LocalCluster, head: subprocess.Popen[bytes]) -> None:
    match kind:
        case "driver":
            head.kill()
        case "actor":
            local_cluster.kill_actor()
        case "scheduler":
            local_cluster.kill_scheduler()
        case "raylet":
            cluster.kill_node()
            cluster.add_node()
        case "GCS":
            cluster.kill_head()


def _mend(kind: str, cluster: LocalCluster) -> None:
    """A cluster whose head is gone is started again, as its owner would."""
    if kind == "GCS":
        cluster.stop()
        cluster.start()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def answers_in(path: Path) -> tuple[dict[int, bytes], int]:
    """The answers' texts by line, and how many records are there more than once."""
    answers: dict[int, bytes] = {}
    doubled = 0
    for line in path.read_bytes().splitlines():
        index, ok, _, body, *_ = json.loads(line)
        doubled += index in answers
        text = body["choices"] if ok else body
        answers[index] = json.dumps(text, sort_keys=True).encode()
    return answers, doubled


def _noticed_s(log: Path, killed_at: float) -> float | None:
    """Seconds from the kill to the head's first word of a lost engine."""
    for line in log.read_text().splitlines() if log.exists() else ():
        stamp, _, text = line.partition(" ")
        if "is lost" in text and float(stamp) >= killed_at - 0.5:
            return max(0.0, float(stamp) - killed_at)
    return None
