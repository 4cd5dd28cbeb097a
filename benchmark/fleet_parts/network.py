"""A node that is cut off from the head for a while: lines lost and doubled. Needs root.

One of two nodes of a Ray cluster is in a network namespace of its own (``ip netns``). With
lines in flight, all its packets are dropped (``tc``) for 4, 10 and 90 seconds: less than
the lease of its engine, more, and so long that Ray counts the node as dead.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from report import Figure, print_table

from sglang_batch.run.demo_model import write_demo_model

from . import faults, local_cluster
from .local_cluster import LocalCluster

CUTS_S = (4.0, 10.0, 90.0)
_SPACE, _HERE, _THERE = "sgl-batch", "sglb0", "sglb1"
_HEAD_IP, _NODE_IP = "10.77.31.1", "10.77.31.2"


def measure(quick: bool) -> list[Figure]:
    """One job for each cut."""
    if os.geteuid() != 0:
        raise SystemExit("error: this part makes a network namespace; run it as root.")
    cuts = CUTS_S[:2] if quick else CUTS_S
    rows: list[list[object]] = []
    lost = doubled = different = 0
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as scratch, _network():
        place = Path(scratch)
        write_demo_model(place / "model")
        for cut_s in cuts:
            with local_cluster.local_cluster(1) as cluster, _node(cluster):
                if not rows:
                    wanted, _ = faults.run_job(cluster, place, None, random.Random(0))
                answers, twice, log, seconds = _job(cluster, place, cut_s)
            missing = len(wanted) - len(answers)
            other = sum(answers.get(k) != v for k, v in wanted.items())
            lost, doubled, different = (
                lost + missing,
                doubled + twice,
                different + other,
            )
            rows.append(
                [f"{cut_s:g}", missing, twice, other, _losses(log), f"{seconds:.0f}"]
            )
    print_table(
        f"{len(wanted)} lines on two nodes, one of them cut off",
        ["cut s", "lost", "doubled", "different", "engines lost", "seconds"],
        rows,
    )
    return [
        Figure("cut network: lines lost", lost, target=("<=", 0)),
        Figure("cut network: lines doubled", doubled, target=("<=", 0)),
        Figure("cut network: answers that differ", different, target=("<=", 0)),
    ]


def _job(
    cluster: LocalCluster, place: Path, cut_s: float
) -> tuple[dict[int, bytes], int, str, float]:
    directory = place / "job"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    results = directory / "results.jsonl"
    begun = time.monotonic()
    head = faults.start_head(cluster, directory, place / "model", wait_for=2)
    try:
        local_cluster.wait_until(
            lambda: faults.num_lines(results) >= faults.KILL_FROM, faults.JOB_S
        )
        _cut(True)
        time.sleep(cut_s)
        _cut(False)
        if head.wait(faults.JOB_S) != 0:
            raise RuntimeError(f"the head ended with status {head.returncode}")
    finally:
        _cut(False)
        head.kill()
    answers, doubled = faults.answers_in(results)
    log = directory / "head.log"
    return answers, doubled, log.read_text(), time.monotonic() - begun


def _losses(log: str) -> int:
    return log.count("is lost")


@contextmanager
def _network() -> Iterator[None]:
    """A network namespace, and a link to it."""
    _ip("netns", "add", _SPACE)
    try:
        _ip("link", "add", _HERE, "type", "veth", "peer", "name", _THERE)
        _ip("link", "set", _THERE, "netns", _SPACE)
        _ip("addr", "add", f"{_HEAD_IP}/24", "dev", _HERE)
        _ip("link", "set", _HERE, "up")
        for command in (
            ("addr", "add", f"{_NODE_IP}/24", "dev", _THERE),
            ("link", "set", _THERE, "up"),
            ("link", "set", "lo", "up"),
            # All addresses of this machine are behind the link.
            ("route", "add", "default", "via", _HEAD_IP),
        ):
            _ip("-n", _SPACE, *command)
        yield
    finally:
        subprocess.run(["ip", "link", "del", _HERE], check=False)
        _ip("netns", "del", _SPACE)


@contextmanager
def _node(cluster: LocalCluster) -> Iterator[None]:
    """A node in the namespace."""
    ray = str(Path(sys.executable).with_name("ray"))
    with tempfile.TemporaryFile() as said:
        node = subprocess.Popen(
            ["ip", "netns", "exec", _SPACE, ray, "start", "--block", "--num-cpus=1",
             f"--address={cluster.address}", f"--node-ip-address={_NODE_IP}"],
            stdout=said, stderr=said,
        )  # fmt: skip
        try:
            cluster.wait_for_nodes(3)
            yield
        finally:
            node.terminate()
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()


def _cut(down: bool) -> None:
    """Lose all packets of the link, or none."""
    if down:
        command = ["tc", "qdisc", "add", "dev", _HERE, "root", "blackhole"]
    else:
        command = ["tc", "qdisc", "del", "dev", _HERE, "root"]
    subprocess.run(command, check=down, stderr=subprocess.DEVNULL)
    inside = ["ip", "netns", "exec", _SPACE, *command]
    inside[inside.index(_HERE)] = _THERE
    subprocess.run(inside, check=down, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
