"""The command tree: the prefixes that running batches share, and why they are cached."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .batch_client import BatchClient, Shown, aligned

PATH = "/offline_batch/tree"

Answer = Mapping[str, Any]

_HEADER = ("prefix", "tokens", "state", "running", "to come", "next use", "density")


def tree(server: BatchClient, options: argparse.Namespace) -> Shown:
    replicas = server.call("GET", PATH, limit=options.limit)["replicas"]
    nodes = [
        {"replica": replica["replica"], **node}
        for replica in replicas
        for node in replica["nodes"]
    ]
    return Shown(nodes, tree_text(replicas))


def tree_text(replicas: Sequence[Answer]) -> str:
    """The trees as text, a paragraph for each job of each replica."""
    paragraphs = []
    for replica in replicas:
        where = f"replica {replica['replica']}, " if len(replicas) > 1 else ""
        for job in replica["jobs"]:
            nodes = [node for node in replica["nodes"] if node["job"] == job["job"]]
            paragraphs.append("\n".join([f"{where}{_title(job)}", *_lines(job, nodes)]))
    return "\n\n".join(paragraphs) or "no batch is running"


def _title(job: Answer) -> str:
    text = f"{job['job']}, {job['policy']}: {_count(job['waiting'], 'request')} waiting"
    if job["followers"]:
        text += f", {job['followers']:,} of them for a prefix that is being computed"
    return (
        f"{text}; prefixes of {job['in_use_tokens']:,} tokens in use, of "
        f"{job['kept_tokens']:,} kept for later"
    )


def _lines(job: Answer, nodes: Sequence[Answer]) -> list[str]:
    if not nodes:
        none = "no prefix is shared by requests that run or are to come"
        return [f"  {none if not job['prefixes'] else 'none of its prefixes is shown'}"]
    level: dict[int, int] = {}
    rows: list[tuple[str, ...]] = [_HEADER]
    for node in nodes:
        level[node["node"]] = level.get(node["parent"], -1) + 1
        rows.append(_row(node, level[node["node"]]))
    lines = [f"  {line}" for line in aligned(rows, "<><>>>>").splitlines()]
    if len(nodes) < job["prefixes"]:
        lines.append(f"  and {job['prefixes'] - len(nodes):,} smaller ones")
    return lines


def _row(node: Answer, level: int) -> tuple[str, ...]:
    return (
        f"{'  ' * level}{node['prefix_tokens']:,}",
        f"{node['tokens']:,}",
        state_text(node),
        f"{node['running']:,}",
        f"{node['uses_left']:,}",
        next_use_text(node),
        "" if node["density"] is None else f"{node['density']:.3g}",
    )


def state_text(node: Answer) -> str:
    """The state of a prefix, and why it is in the cache."""
    if node["state"] != "kept":
        return str(node["state"])
    reasons = ["in use"] if node["running"] else []
    reasons += ["for later"] if node["pinned"] else []
    return f"kept, {' and '.join(reasons)}"


def next_use_text(node: Answer) -> str:
    """When a prefix is needed next, in requests of the job."""
    if node["next_use"] is None:
        return "never"
    if node["next_use"] == 0:
        return "next"
    return f"after {node['next_use']:,}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
