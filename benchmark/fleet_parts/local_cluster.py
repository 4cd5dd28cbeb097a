"""A Ray cluster on this machine: a head without room, and nodes of one CPU each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil  # type: ignore[import-untyped]

# Raylets on a busy machine start slowly.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
# Ray lets its children wait for everything else.
os.environ.setdefault("RAY_worker_niceness", "0")
_ACTOR, _SCHEDULER = "ray::RayWorker", "sglang::scheduler"
# Known by their environment, where a parent is killed too. A process that changes its title would
# write over it by default.
_MARK = ("SGLANG_BATCH_LOCAL_CLUSTER", f"{os.getpid()}-{time.time_ns()}")
os.environ.update([_MARK, ("SPT_NOENV", "1")])


class LocalCluster:
    """Starts and kills the processes of a cluster."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self.start()

    def start(self) -> None:
        """Start all nodes."""
        from ray.cluster_utils import Cluster

        make: Any = Cluster
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = make(initialize_head=True, head_node_args=head)
        self._nodes = [
            self._cluster.add_node(num_cpus=1) for _ in range(self._num_nodes)
        ]

    @property
    def address(self) -> str:
        """For ``--ray``."""
        return str(self._cluster.address)

    def wait_for_nodes(self, count: int) -> None:
        """Wait until the cluster has so many nodes, its head among them."""
        self._cluster.connect(namespace="sglang-batch")
        try:
            import ray

            wait_until(lambda: sum(n["Alive"] for n in ray.nodes()) >= count, 120.0)  # type: ignore[no-untyped-call]
        finally:
            ray.shutdown()

    def kill_node(self) -> None:
        """Kill the raylet of a node. Its engine works on until Ray gives the node up."""
        self._kill_processes(self._nodes.pop(0), "raylet")

    def add_node(self) -> None:
        """Add a node of one CPU."""
        self._nodes.append(self._cluster.add_node(num_cpus=1))

    def kill_head(self) -> None:
        """Kill the process that knows the cluster (GCS)."""
        self._kill_processes(self._cluster.head_node, "gcs_server")

    def stop(self) -> None:
        """End all processes."""
        with suppress(Exception):
            self._cluster.shutdown()
        for process in processes(_ACTOR, "raylet", "gcs_server"):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _kill_processes(self, node: Any, kind: str) -> None:
        for info in node.all_processes[kind]:
            with suppress(ProcessLookupError):
                os.kill(info.process.pid, signal.SIGKILL)


@contextmanager
def local_cluster(num_nodes: int) -> Iterator[LocalCluster]:
    """A cluster for the length of a block."""
    cluster = LocalCluster(num_nodes)
    try:
        yield cluster
    finally:
        cluster.stop()


def processes(*names: str) -> list[psutil.Process]:
    """The processes that this one has started, or Ray for it, that have such a title."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            titled = any(name in " ".join(process.cmdline()[:1]) for name in names)
            if titled and process.environ().get(_MARK[0]) == _MARK[1]:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def kill_actor() -> None:
    """Kill the process of an engine's actor."""
    processes(_ACTOR)[0].kill()


def kill_scheduler() -> None:
    """Kill a scheduler process of SGLang."""
    processes(_SCHEDULER)[0].kill()


def wait_until(condition: Any, patience_s: float) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it does not come true.
    """
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {patience_s:g} s")
        time.sleep(0.05)
