"""The text of ``sglang-batch tree``."""

from __future__ import annotations

from typing import Any

from sglang_batch.run.client.client_commands import tree_text

NODE = {
    "job": "batch_1", "node": 3, "parent": 0, "prefix_tokens": 1200, "tokens": 1200,
    "state": "kept", "pinned": True, "running": 2, "uses_left": 40, "next_use": 0,
    "density": 1.2345,
}  # fmt: skip
JOB = {
    "job": "batch_1", "policy": "dfs", "priority": 0, "waiting": 1234, "followers": 0,
    "prefixes": 3, "in_use_tokens": 1200, "kept_tokens": 96,
}  # fmt: skip


def replica(number: int, nodes: list[Any], **job: Any) -> dict[str, Any]:
    return {"replica": number, "jobs": [JOB | job], "nodes": nodes}


def test_a_tree_is_indented() -> None:
    below = NODE | {
        "node": 7, "parent": 3, "prefix_tokens": 1296, "tokens": 96, "running": 0,
        "uses_left": 5, "next_use": 35, "density": None,
    }  # fmt: skip
    spent = NODE | {
        "node": 9, "prefix_tokens": 64, "tokens": 64, "state": "computing",
        "uses_left": 0, "next_use": None, "density": None, "running": 1,
    }  # fmt: skip
    assert tree_text([replica(0, [NODE, below, spent])]) == (
        "batch_1, dfs: 1,234 requests waiting; prefixes of 1,200 tokens in use, of 96 "
        "kept for later\n"
        "  prefix   tokens  state                       running  to come  next use  density\n"
        "  1,200     1,200  kept, in use and for later        2       40      next     1.23\n"
        "    1,296      96  kept, for later                   0        5  after 35\n"
        "  64           64  computing                         1        0     never"
    )


def test_of_several_replicas_each_is_named_and_left_out_prefixes_are_counted() -> None:
    text = tree_text(
        [
            replica(0, [NODE], followers=4),
            replica(1, [], prefixes=0, waiting=1),
        ]
    )
    first, second = text.split("\n\n")
    assert first.startswith(
        "replica 0, batch_1, dfs: 1,234 requests waiting, 4 of them "
    )
    assert first.endswith("  and 2 smaller ones")
    assert second.startswith("replica 1, batch_1, dfs: 1 request waiting;")
    assert second.endswith("  no prefix is shared by requests that run or are to come")


def test_an_idle_server() -> None:
    idle = {"replica": 0, "jobs": [], "nodes": []}
    assert tree_text([idle]) == tree_text([]) == "no batch is running"
