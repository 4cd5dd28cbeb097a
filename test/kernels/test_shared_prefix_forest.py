"""Which nodes of a forest the planner keeps."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from attention_cases import SMALL, Batch, batches, make_batch, make_planner
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel_ext.shared_prefix_attention import forest
from sgl_kernel_ext.shared_prefix_attention import tasks as fields


def brute_force_cost(
    batch: Batch, kept: set[int], tile: int, kv: int, part: int, task: int
) -> int:
    """The documented cost of keeping exactly these nodes."""
    group = 3
    parents, ends = batch.node_parent, batch.node_end

    def start_of(node: int) -> int:
        while node >= 0 and node not in kept:
            node = parents[node]
        return int(ends[node]) if node >= 0 else 0

    def is_below(node: int, above: int) -> bool:
        while node >= 0 and node != above:
            node = parents[node]
        return node == above

    total = 0
    for node in kept:
        below = [is_below(each, node) for each in batch.request_node]
        rows = int(batch.q_len[below].sum()) * group
        tiles = math.ceil(rows / tile)
        total += tiles * (int(ends[node]) - start_of(parents[node])) * kv
        total += rows * part + tiles * task
    for i, node in enumerate(batch.request_node):
        tiles = math.ceil(int(batch.q_len[i]) * group / tile)
        total += tiles * (int(batch.kv_len[i]) - start_of(node)) * kv
    return total


@given(
    batch=batches(longest=200),
    part=st.sampled_from([1, 100, 500]),
    task=st.sampled_from([0, 3000]),
)
@settings(max_examples=examples(60), deadline=None)
def test_no_other_choice_of_nodes_is_cheaper(
    batch: Batch, part: int, task: int
) -> None:
    num_nodes = len(batch.node_parent)
    keep = np.zeros(num_nodes, np.bool_)
    arrays = (getattr(batch, name) for name in forest.Batch._fields)
    forest.keep_nodes(forest.Batch(*arrays), forest.Costs(3, 64, 128, part, task), keep)
    chosen = brute_force_cost(
        batch, set(np.flatnonzero(keep).tolist()), 64, 128, part, task
    )
    below = [0] * num_nodes
    for node in batch.request_node:
        while node >= 0:
            below[node] += 1
            node = batch.node_parent[node]
    shared = [node for node in range(num_nodes) if below[node] >= 2]
    assert not any(keep[node] for node in range(num_nodes) if below[node] < 2)
    for size in range(len(shared) + 1):
        for kept in itertools.combinations(shared, size):
            assert chosen <= brute_force_cost(batch, set(kept), 64, 128, part, task)


def kept_nodes(task_bytes: int = 0, **changes: object) -> int:
    """How many nodes are kept at float32, head_dim 32, two query heads per KV head."""
    batch = make_batch(**changes)  # type: ignore[arg-type]
    config = replace(SMALL, task_bytes=task_bytes)
    return make_planner(batch, config=config).plan(*batch.planned()).num_kept_nodes


def test_when_a_node_is_kept() -> None:
    """One node, n decodes: n * L * 256 bytes against L * 256 + n * 2 * 264."""
    group = {"node_parent": [-1], "own_len": [4] * 4, "request_node": [0] * 4}
    assert kept_nodes(node_end=[2], **group) == 0  # 2048 against 512 + 2112
    assert kept_nodes(node_end=[3], **group) == 1  # 3072 against 768 + 2112
    assert kept_nodes(node_end=[3], task_bytes=193, **group) == 0
    assert kept_nodes(node_end=[3], task_bytes=191, **group) == 1
    alone = {"node_parent": [-1], "own_len": [4, 4], "request_node": [0, -1]}
    assert kept_nodes(node_end=[500], **alone) == 0


def test_a_folded_root_makes_its_children_longer() -> None:
    """A few tokens that all share are read by each group, not by a task for all."""
    batch = make_batch(
        node_parent=[-1, 0, 0],
        node_end=[3, 80, 90],
        request_node=[1, 1, 1, 2, 2, 2],
        own_len=[4] * 6,
        heads=(16, 1),
    )
    plan = make_planner(batch, max_tile=64).plan(*batch.planned())
    assert plan.num_kept_nodes == 2
    nodes = plan.task_table[plan.task_table[:, fields.IS_NODE] == 1]
    assert nodes[:, fields.KV_BEGIN].min() == 0
