"""Compute and memory time of requests and subtrees, and their ratio, the density.

Compute density is compute time over memory time: above 1 compute-intensive, below 1
memory-intensive. A shared prefix is computed once, so the compute time of a subtree
counts its *unique* tokens (BlendServe 5.1: ``rho(R) = (1 - s) T_comp / T_mem``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s, Int64s
from .cost_model import CostModel, compute_density


class LeafWork(NamedTuple):
    """Estimated work of the requests at a tree's leaves, each float64 ``[n]``.

    decode_s: compute time of the output tokens, in seconds.
    memory_s: memory time of all decode steps, in seconds.
    """

    decode_s: Floats
    memory_s: Floats

    def take(self, leaves: Int64s) -> LeafWork:
        return LeafWork(self.decode_s[leaves], self.memory_s[leaves])


def leaf_work(
    tree: PrefixTree, cost: CostModel, est_output_len: Floats, est_output_len_sq: Floats
) -> LeafWork:
    """Estimated work at the leaves, from both moments by request, float64 ``[n]``."""
    lengths = est_output_len[tree.order]
    lengths_sq = est_output_len_sq[tree.order]
    memory = cost.memory_time_s(read_len(tree, cost), lengths, lengths_sq)
    return LeafWork(lengths * cost.token_time_s, memory)


def read_len(tree: PrefixTree, cost: CostModel) -> Floats:
    """Prompt tokens that each request reads in a decode step, float64 ``[n]`` by leaf.

    The whole prompt, or with ``shared_kv_read_once`` (BlendServe 6.2) the request's share of it:
    a prefix's tokens are spread evenly over the requests below it. States and windows are added,
    as tokens that take as long to read.
    """
    more = cost.more_reads(tree.input_len)
    if cost.shared_kv_read_once:
        return _spread(tree, 1) + more
    return tree.input_len + more


def decode_step_moments(
    est_output_len: Floats, est_output_len_sq: Floats
) -> tuple[Floats, Floats]:
    """``est_decode_steps`` and ``est_decode_steps_sq`` in SGLang, each float64 ``[n]``: the first
    token comes with the prompt, and ``E[(d - 1)^2] = E[d^2] - 2 E[d] + 1``."""
    steps = np.maximum(est_output_len - 1.0, 0.0)
    steps_sq = est_output_len_sq - 2.0 * est_output_len + 1.0
    return steps, np.maximum(steps_sq, steps**2)


def planned_work(
    tree: PrefixTree, cost: CostModel, steps: Floats, steps_sq: Floats, least: int = 1
) -> tuple[float, float]:
    """Estimated compute and memory time of the whole job, in seconds.

    Args:
        steps, steps_sq: float64 ``[n]`` by request, both moments of its decode steps.
        least: steps that a request takes.
    """
    lengths = steps[tree.order]
    computed = tree.num_unique_tokens + np.maximum(least, np.rint(lengths)).sum()
    compute = computed * cost.token_time_s + attended(tree) * cost.attention_time_s
    compute += _encoder_s(tree, cost)
    reads = read_len(tree, cost)
    memory = cost.memory_time_s(reads, lengths, steps_sq[tree.order])
    return float(compute), float(memory.sum())


def node_work(
    tree: PrefixTree, cost: CostModel, work: LeafWork
) -> tuple[Floats, Floats]:
    """Compute and memory time below each node, float64 ``[m]`` each, in seconds. A node's prefix,
    from the root on, counts once, as if no request outside shared it."""
    prefill = tree.unique_below(tree.input_len, tree.lcp) * float(cost.token_time_s)
    if cost.attention_time_s:
        prefill += cost.attention_time_s * tree.unique_below(*_squares(tree))
    if tree.media is not None:
        prefill += cost.encoder_token_time_s * tree.unique_below(*tree.media)
    return prefill + tree.subtree_sums(work.decode_s), tree.subtree_sums(work.memory_s)


def attended(tree: PrefixTree) -> float:
    """Sum of p^2 of the whole job, shared prefixes once."""
    squares, shared = _squares(tree)
    return float((squares - shared).sum())


def _squares(tree: PrefixTree) -> tuple[Floats, Floats]:
    return tree.input_len.astype(np.float64) ** 2, tree.lcp.astype(np.float64) ** 2


def root_density(tree: PrefixTree, cost: CostModel, work: LeafWork) -> float:
    """Compute density of the whole job, which every step should have."""
    compute = tree.num_unique_tokens * cost.token_time_s + work.decode_s.sum()
    if cost.attention_time_s:
        compute += attended(tree) * cost.attention_time_s
    compute += _encoder_s(tree, cost)
    return float(compute_density(compute, work.memory_s.sum()))


def leaf_compute(tree: PrefixTree, cost: CostModel, work: LeafWork) -> Floats:
    """Compute time of each request, float64 ``[n]`` in seconds. The cost of a prefix is divided
    evenly among the requests below it."""
    compute: Floats = _spread(tree, 1) * cost.token_time_s + work.decode_s
    if cost.attention_time_s:
        compute += _spread(tree, 2) * cost.attention_time_s
    if tree.media is not None:
        depth = tree.media.depth(tree.leaf_begin, tree.leaf_end)
        media = _spread_of(tree, depth, tree.media.input_len)
        compute += media * cost.encoder_token_time_s
    return compute


def _encoder_s(tree: PrefixTree, cost: CostModel) -> float:
    """Seconds to encode the images and sounds of all prompts, shared ones once."""
    media = 0 if tree.media is None else tree.media.num_unique
    return media * cost.encoder_token_time_s


def leaf_densities(tree: PrefixTree, cost: CostModel, work: LeafWork) -> Floats:
    """Density of each request, shared prefixes spread, float64 ``[n]`` by leaf."""
    return compute_density(leaf_compute(tree, cost, work), work.memory_s)


def _spread(tree: PrefixTree, power: int) -> Floats:
    """Each leaf's share of the sum of ``p ** power``, float64 ``[n]``, prefixes divided evenly."""
    reached = tree.depth.astype(np.float64) ** power
    return _spread_of(tree, reached, tree.input_len.astype(np.float64) ** power)


def _spread_of(
    tree: PrefixTree, reached: Floats | Int32s, whole: Floats | Int32s
) -> Floats:
    """Each leaf's share, float64 ``[n]``, of a count that reaches ``reached[m]`` at the end of each
    node and ``whole[n]`` at the end of each prompt."""
    gained = reached - np.where(tree.parent >= 0, reached[tree.parent], 0.0)
    per_leaf = gained / np.maximum(tree.leaf_end - tree.leaf_begin, 1)
    above = _sum_over_path(tree.parent, per_leaf)
    return whole - reached[tree.leaf_parent] + above[tree.leaf_parent]


@jit
def _sum_over_path(parent: Int32s, values: Floats) -> Floats:
    """Sum of ``values`` over each node and its ancestors. Parents come first."""
    sums = values.copy()
    for node in range(1, len(parent)):
        sums[node] += sums[parent[node]]
    return sums
