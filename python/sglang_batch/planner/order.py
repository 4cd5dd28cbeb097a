"""From what is known of a job to the order in which its requests get their turn.

An order is a permutation of the requests, int64 ``[n]``. Names are SGLang's where it
has the policy too:

==============  ========================================================================
fcfs            input order
random          shuffled with the plan's seed
lof             longest output first, by the declared ``max_new_tokens``
lpt             longest processing time first, by expected decode time
dfs             depth-first through the prefix tree
dfs-weight      depth-first, at each node the subtree with most requests first
prefix-groups   BatchLLM's groups, those with the most decoding per prompt token first
dual-scan       BlendServe's sorted tree, taken from both ends
==============  ========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..config import POLICIES
from ..errors import ConfigError
from .cost_model import CostModel, compute_density
from .density import (
    LeafWork,
    depth_first,
    layer_sort,
    leaf_compute,
    leaf_work,
    root_density,
    smooth_density,
    sort_children,
)
from .prefix_groups import group_order, prefix_groups
from .prefix_tree import PrefixTree
from .requests import Bools, Floats, Int64s, PlanRequests
from .splitting import split_by_threshold, split_in_two

# Requests that stay together where families are mixed, at most.
_FAMILY = 16
# Those that need no simulation to be chosen among.
ORDERS = tuple(policy for policy in POLICIES if policy != "auto")


@dataclass(frozen=True, slots=True)
class Order:
    """A policy's order.

    requests: int64 ``[n]``.
    density: float64 ``[n]`` by place, compute density of the neighbourhood; for
        dual-scan, which takes requests from both ends. None for orders that are simply
        followed.
    num_left: requests on the compute-intensive side.
    repeated_tokens: shared prompt tokens that the order gives up on purpose.
    """

    requests: Int64s
    density: Floats | None = None
    num_left: int = 0
    repeated_tokens: int = 0

    def renumbered(self, numbers: Int64s) -> Order:
        """The same order of requests that go by other numbers, int64 ``[n]``."""
        return replace(self, requests=numbers[self.requests])

    def beginning_with(self, first: Int64s) -> Order:
        """The same order after some requests that go before all others.

        first: int64, requests of the sample whose answers the estimates need.
        """
        rest = ~np.isin(self.requests, first)
        density = self.density
        if density is not None and len(density):
            # A sample is taken from everywhere: it has the density of the left side.
            among_left = density[: max(1, self.num_left)]
            density = np.concatenate(
                [np.full(len(first), np.median(among_left)), density[rest]]
            )
        return replace(
            self,
            requests=np.concatenate([first, self.requests[rest]]),
            density=density,
            num_left=0
            if density is None
            else len(first) + int(rest[: self.num_left].sum()),
        )


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """How orders are made.

    seed: of ``random``, and of the lengths that ``auto`` simulates with.
    min_sharing_kept: share of the shared prompt tokens that dual-scan keeps when it
        takes outliers out of their subtrees.
    algorithm_2: take them out as in the paper, a subtree into all its parts, and not
        into two.
    """

    seed: int = 0
    min_sharing_kept: float = 0.998
    algorithm_2: bool = False


def make_order(
    policy: str,
    tree: PrefixTree,
    requests: PlanRequests,
    cost: CostModel,
    estimate: Floats,
    estimate_sq: Floats,
    settings: OrderSettings,
) -> Order:
    """The order of one policy.

    Args:
        estimate, estimate_sq: float64 ``[n]`` by request, first and second moment of
            the expected output lengths.

    Raises:
        ConfigError: the policy is not known.
    """
    n = len(requests)
    if policy == "fcfs":
        return Order(np.arange(n, dtype=np.int64))
    if policy == "random":
        return Order(np.random.default_rng(settings.seed).permutation(n))
    if policy == "lof":
        return Order(np.argsort(-requests.max_new_tokens, kind="stable"))
    if policy == "lpt":
        return Order(np.argsort(-estimate, kind="stable"))
    if policy == "dfs":
        return Order(tree.order)
    if policy == "dfs-weight":
        return Order(tree.order[_by_weight(tree)])
    if policy == "prefix-groups":
        return Order(group_order(tree, prefix_groups(tree), estimate))
    if policy == "dual-scan":
        work = leaf_work(tree, cost, estimate, estimate_sq)
        return _dual_scan(tree, cost, work, settings)
    raise ConfigError(
        f"policy={policy!r} is not known; choose one of {', '.join(ORDERS)}."
    )


def families_mixed(tree: PrefixTree, seed: int) -> Order:
    """Families one after the other in random order: for lengths that nobody knows yet.

    Every stretch of it has about the job's own mix of requests, whatever their lengths
    turn out to be. A family is what hangs from the highest node with few leaves.
    """
    n = tree.num_requests
    few = tree.leaf_end - tree.leaf_begin <= _FAMILY
    has_few_above = (tree.parent >= 0) & few[tree.parent]
    heads = np.flatnonzero(few & ~has_few_above)
    # A leaf begins a family unless it is inside one.
    inside = np.zeros(n + 1, np.int64)
    np.add.at(inside, np.minimum(tree.leaf_begin[heads] + 1, tree.leaf_end[heads]), 1)
    np.add.at(inside, tree.leaf_end[heads], -1)
    family = np.cumsum(np.cumsum(inside[:n]) == 0) - 1
    place = np.random.default_rng(seed).permutation(family.max(initial=-1) + 1)
    return Order(tree.order[np.argsort(place[family], kind="stable")])


def _by_weight(tree: PrefixTree) -> Int64s:
    """Depth-first with heavy subtrees first; leaves have weight 1."""
    weights = (tree.leaf_end - tree.leaf_begin)[1:].astype(np.float64)
    leaves = np.ones(tree.num_requests)
    return depth_first(*sort_children(tree, weights, leaves), tree.num_nodes)


def _dual_scan(
    tree: PrefixTree, cost: CostModel, work: LeafWork, settings: OrderSettings
) -> Order:
    """Left side, then right side, each in falling density."""
    if tree.num_requests == 0:
        return Order(tree.order, density=np.zeros(0))
    target = root_density(tree, cost, work)
    compute = leaf_compute(tree, cost, work)
    if settings.algorithm_2:
        leaves, num_left, extra = _by_units(tree, cost, work, target, settings)
    else:
        # A request on the wrong side has so much time too much of one kind there.
        harm = compute - (target if np.isfinite(target) else 0.0) * work.memory_s
        shared = tree.num_tokens - tree.num_unique_tokens
        budget = int(shared * (1.0 - settings.min_sharing_kept))
        right, extra = split_in_two(tree, harm < 0.0, np.abs(harm), budget)
        sides = [_sorted_side(tree, cost, work, side) for side in (~right, right)]
        leaves, num_left = np.concatenate(sides), len(sides[0])
    return Order(
        requests=tree.order[leaves],
        density=smooth_density(compute[leaves], work.memory_s[leaves]),
        num_left=num_left,
        repeated_tokens=extra,
    )


def _by_units(
    tree: PrefixTree,
    cost: CostModel,
    work: LeafWork,
    target: float,
    settings: OrderSettings,
) -> tuple[Int64s, int, int]:
    """BlendServe's Algorithm 2: units in falling density, each sorted layer by layer.

    After this one pass its loop has ended: units hang from the root in order (C1), and
    inside them every cut costs more than the threshold (C2).

    Returns:
        Leaf positions, how many of them are on the left, tokens computed again.
    """
    unit, extra = split_by_threshold(tree, settings.min_sharing_kept)
    compute = leaf_compute(tree, cost, work)
    n = tree.num_requests
    density = compute_density(
        np.bincount(unit, compute, n), np.bincount(unit, work.memory_s, n)
    )[unit]
    inside = np.empty(n, np.int64)
    inside[layer_sort(tree, cost, work)] = np.arange(n)
    leaves = np.lexsort((inside, -density))
    return leaves, int((density >= target).sum()), extra


def _sorted_side(
    tree: PrefixTree, cost: CostModel, work: LeafWork, chosen: Bools
) -> Int64s:
    """The chosen leaves, as positions in the whole tree, sorted layer by layer."""
    leaves = np.flatnonzero(chosen)
    side = tree.restricted_to(leaves)
    return leaves[layer_sort(side, cost, work.take(leaves))]
