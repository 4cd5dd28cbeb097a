"""One function per policy, from a job to the order of its requests.

:mod:`sglang_batch.config` has the table of all policies. To add one, add its entry
there and its function here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...config import ORDERS
from ...errors import ConfigError
from ..costs.cost_model import CostModel
from ..costs.tree_work import leaf_work
from ..output_lengths.estimates import OutputEstimates
from ..prefixes.prefix_groups import group_order, prefix_groups
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s, PlanRequests
from .dual_scan_order import dual_scan_order
from .kv_length_order import aligned_order, length_aligned_order, length_tree_order
from .order import Order, OrderSettings, by_adapter
from .tree_order import depth_first, longest_first, sort_children


class _Job(NamedTuple):
    """Everything an order may depend on; see :func:`make_order`."""

    tree: PrefixTree
    requests: PlanRequests
    cost: CostModel
    estimates: OutputEstimates
    settings: OrderSettings
    kv_capacity_tokens: int


def make_order(
    policy: str,
    tree: PrefixTree,
    requests: PlanRequests,
    cost: CostModel,
    estimates: OutputEstimates,
    settings: OrderSettings,
    kv_capacity_tokens: int = 1 << 62,
) -> Order:
    """The order of one policy, adapter by adapter where there are any.

    Args:
        policy: one of :data:`sglang_batch.config.ORDERS`.
        kv_capacity_tokens: of the engine.

    Raises:
        ConfigError: the policy is unknown.
    """
    if policy not in _FUNCTIONS:
        raise ConfigError(
            f"policy={policy!r} is not known; choose one of {', '.join(ORDERS)}."
        )
    job = _Job(tree, requests, cost, estimates, settings, kv_capacity_tokens)
    return by_adapter(_FUNCTIONS[policy](job), requests.adapter)


def _dfs_weight(job: _Job) -> Order:
    tree = job.tree
    weights = (tree.leaf_end - tree.leaf_begin)[1:].astype(np.float64)
    children, begin = sort_children(tree, weights, np.ones(tree.num_requests))
    return Order(tree.order[depth_first(children, begin, tree.num_nodes)])


def _dual_scan(job: _Job) -> Order:
    work = leaf_work(
        job.tree,
        job.cost,
        job.estimates.est_output_len,
        job.estimates.est_output_len_sq,
    )
    return dual_scan_order(job.tree, job.cost, work, job.settings)


def _sorted(falling: Floats | Int32s) -> Order:
    return Order(np.argsort(-falling, kind="stable"))


def _shuffled(job: _Job) -> Order:
    return Order(
        np.random.default_rng(job.settings.seed).permutation(len(job.requests))
    )


_FUNCTIONS: dict[str, Callable[[_Job], Order]] = {
    "fcfs": lambda job: Order(np.arange(len(job.requests), dtype=np.int64)),
    "random": _shuffled,
    "lof": lambda job: _sorted(job.requests.max_new_tokens),
    "lpt": lambda job: _sorted(job.estimates.est_output_len),
    "dfs": lambda job: Order(job.tree.order),
    "dfs-weight": _dfs_weight,
    "dfs-longest": lambda job: Order(
        longest_first(job.tree, job.estimates.est_output_len[job.tree.order])
    ),
    "prefix-groups": lambda job: Order(
        group_order(job.tree, prefix_groups(job.tree), job.estimates.est_output_len)
    ),
    "aligned": lambda job: Order(aligned_order(job.tree, job.estimates.est_output_len)),
    "length-tree": lambda job: length_tree_order(job.tree, job.settings.max_wait_steps),
    "length-aligned": lambda job: length_aligned_order(
        job.tree,
        job.cost,
        job.estimates.est_output_len,
        job.kv_capacity_tokens,
        job.settings.max_wait_steps,
    ),
    "dual-scan": _dual_scan,
}

if _FUNCTIONS.keys() != set(ORDERS):
    odd = ", ".join(sorted(_FUNCTIONS.keys() ^ set(ORDERS)))
    raise TypeError(f"policies need an entry in the table and a function each: {odd}")
