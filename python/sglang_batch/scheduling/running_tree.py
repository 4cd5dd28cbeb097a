"""The prefix trees of the open jobs as they are now: which prefixes are in the cache, and
why.

Computed only when somebody asks. The time grows with the requests of the open jobs, by
milliseconds for a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict

import numpy as np

from ..planner.requests import Floats, Int32s, Int64s
from .job_state import JobState

ABSENT, COMPUTING, KEPT = "absent", "computing", "kept"


class NodeNow(TypedDict):
    """A prefix that requests of a job share.

    job: the id of the job, and ``node`` the number in its plan.
    parent: the nearest prefix of the answer that this one continues, 0 for none.
    prefix_tokens: tokens up to its end, ``tokens`` those after the prefix above it, both
        in whole pages.
    state: ``kept`` in the cache, ``computing`` by a running request, or ``absent``.
    pinned: whether it is kept for later requests.
    running: requests that use it now, and ``uses_left`` those that are still to come.
    next_use: requests of the job that start before one needs it, by the plan. None if
        none does.
    density: compute time / memory time of the requests to come below it, without shared
        prefixes. None if there are none or they read no KV.
    """

    job: str
    node: int
    parent: int
    prefix_tokens: int
    tokens: int
    state: str
    pinned: bool
    running: int
    uses_left: int
    next_use: int | None
    density: float | None


class JobNow(TypedDict):
    """An open job.

    waiting: its requests that have arrived and do not run, without offloaded ones.
    followers: those of them that wait for a prefix that another one computes.
    prefixes: number of its shared prefixes that requests use or will use.
    in_use_tokens: tokens of prefixes that running requests use.
    kept_tokens: tokens of prefixes that are kept for later requests only.
    """

    job: str
    policy: str
    priority: int
    waiting: int
    followers: int
    prefixes: int
    in_use_tokens: int
    kept_tokens: int


class TreeNow(TypedDict):
    """The trees of one replica. ``nodes`` are in depth-first order. ``admission`` and
    ``admissions`` are why the next request in line did not join the last step, and steps so
    far by that reason, which is the name of an :class:`~.step_record.Admission` in small
    letters."""

    jobs: list[JobNow]
    nodes: list[NodeNow]
    admission: NotRequired[str]
    admissions: NotRequired[dict[str, int]]


def running_tree(jobs: Iterable[JobState], limit: int) -> TreeNow:
    """The jobs, and up to ``limit`` prefixes: half of them the longest that are in the
    cache or being computed, the others those that save most tokens."""
    found: TreeNow = {"jobs": [], "nodes": []}
    each = list(jobs)
    # Nodes that are used or will be, and add a page at least.
    shared = [
        np.flatnonzero((uses.length > 0) & ((uses.uses_left > 0) | (uses.running > 0)))
        for uses in (job.uses for job in each)
    ]
    for job, nodes in zip(each, shared, strict=True):
        found["jobs"].append(
            {
                "job": job.job_id,
                "policy": job.plan.policy,
                "priority": job.priority,
                "waiting": job.num_waiting,
                "followers": job.num_followers,
                "prefixes": len(nodes),
                "in_use_tokens": job.uses.locked_tokens,
                "kept_tokens": job.uses.idle_tokens,
            }
        )
    for job, nodes in zip(each, _largest(each, shared, limit), strict=True):
        found["nodes"] += _nodes(job, nodes)
    return found


def _largest(jobs: list[JobState], shared: list[Int64s], limit: int) -> list[Int64s]:
    """For each job its nodes among the ``limit`` largest of all."""
    sizes = [len(nodes) for nodes in shared]
    if sum(sizes) <= limit:
        return shared
    held, saved = [], []
    for uses, nodes in zip((job.uses for job in jobs), shared, strict=True):
        number = uses.uses_left[nodes] + uses.running[nodes].astype(np.int64)
        there = uses.running > 0
        there[list(uses.pins)] = True
        held.append(uses.length[nodes] * there[nodes])
        saved.append(uses.length[nodes] * number)
    chosen = np.zeros(sum(sizes), np.bool_)
    in_cache = np.concatenate(held).astype(np.int64)
    chosen[_top(in_cache, -(-limit // 2))] = True
    chosen &= in_cache > 0
    rest = np.where(chosen, -1, np.concatenate(saved))
    chosen[_top(rest, limit - int(chosen.sum()))] = True
    parts = np.split(chosen, np.cumsum(sizes)[:-1])
    return [nodes[part] for nodes, part in zip(shared, parts, strict=True)]


def _top(values: Int64s, count: int) -> Int64s:
    """The places of the ``count`` largest values, of fewer than all."""
    top: Int64s = np.argpartition(-values, count)[:count]
    return top


def _nodes(job: JobState, nodes: Int64s) -> list[NodeNow]:
    if not len(nodes):
        return []
    uses = job.uses
    # The lowest rank of a request that is still to start.
    front = int(uses.rank[~uses.started].min(initial=np.iinfo(np.int32).max))
    density = _densities(job, nodes)
    shown = set(nodes.tolist())
    # Depth first: a node before those below it, in the order of their leaves.
    order = np.lexsort((uses.depth[nodes], uses.begin[nodes]))
    found: list[NodeNow] = []
    for at in order:
        node = int(nodes[at])
        parent = int(uses.parent[node])
        while parent > 0 and parent not in shown:
            parent = int(uses.parent[parent])
        left, running = int(uses.uses_left[node]), int(uses.running[node])
        state = KEPT if node in uses.pins or running else ABSENT
        found.append(
            {
                "job": job.job_id,
                "node": node,
                "parent": max(parent, 0),
                "prefix_tokens": int(uses.depth[node]),
                "tokens": int(uses.length[node]),
                "state": COMPUTING if node in uses.computing else state,
                "pinned": node in uses.pins,
                "running": running,
                "uses_left": left,
                "next_use": max(0, uses.next_use(node) - front) if left else None,
                "density": float(density[at]) if np.isfinite(density[at]) else None,
            }
        )
    return found


def _densities(job: JobState, nodes: Int64s) -> Floats:
    plan, cost, uses = job.plan, job.plan.cost, job.uses
    own = plan.input_len - uses.depth[plan.node]
    steps = plan.est_decode_steps
    compute = (own + steps) * cost.token_time_s
    memory = (
        plan.read_len * steps + plan.est_decode_steps_sq / 2
    ) * cost.kv_read_time_s
    below = [
        _sums(np.where(uses.started, 0.0, times), uses.begin[nodes], uses.end[nodes])
        for times in (compute, memory)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        density: Floats = below[0] / below[1]
    density[uses.uses_left[nodes] <= 0] = np.nan
    return density


def _sums(values: Floats, begin: Int32s, end: Int32s) -> Floats:
    before: Floats = np.concatenate(([0.0], np.cumsum(values)))
    sums: Any = before[end] - before[begin]
    # A difference of long sums may be left over where there is nothing.
    rounding: Floats = np.where(sums > before[-1] * 1e-12, sums, 0.0)
    return rounding
