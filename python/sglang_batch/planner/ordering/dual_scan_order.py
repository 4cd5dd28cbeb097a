"""The order of ``dual-scan``: BlendServe's tree sorted by compute density."""

from __future__ import annotations

import numpy as np

from ..costs.cost_model import CostModel, compute_density
from ..costs.tree_work import LeafWork, leaf_compute, root_density
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int64s
from .layer_sort import layer_sort
from .order import Order, OrderSettings
from .splitting import split_by_threshold, split_in_two


def dual_scan_order(
    tree: PrefixTree, cost: CostModel, work: LeafWork, settings: OrderSettings
) -> Order:
    """The left side, then the right side, each in falling compute density."""
    if tree.num_requests == 0:
        return Order(tree.order, density=np.zeros(0))
    target = root_density(tree, cost, work)
    compute = leaf_compute(tree, cost, work)
    if settings.algorithm_2:
        leaves, num_left, extra = _by_units(tree, cost, work, target, settings)
    else:
        # Seconds of compute (or memory) time that a request has beyond the target: its
        # harm on the wrong side.
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

    One pass meets both stop conditions of the paper's loop: units below the root are in
    order (C1), and every further cut inside them costs more than the threshold (C2).

    Returns:
        Leaf positions, int64 ``[n]``, the number of them on the left, and the tokens
        computed again.
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


def smooth_density(compute_s: Floats, memory_s: Floats, num_units: int = 512) -> Floats:
    """Density of the neighbourhood of each position in an order, float64 ``[n]``.

    Consecutive requests are taken together until each unit has 1/``num_units`` of the
    job's compute or memory time, so that the dual scanner's budgets change smoothly.
    BlendServe (section 4) merges nodes for the same reason. Here the order, and with it
    the sharing, is not changed.
    """
    if compute_s.sum() + memory_s.sum() == 0.0:
        return np.ones(len(compute_s))
    shares = compute_s / max(compute_s.sum(), 1e-300)
    shares = np.maximum(shares, memory_s / max(memory_s.sum(), 1e-300))
    reached = np.cumsum(shares)
    unit = np.floor((reached - shares) * (num_units / reached[-1])).astype(np.int64)
    count = int(unit[-1]) + 1
    compute = np.bincount(unit, compute_s, count)
    memory = np.bincount(unit, memory_s, count)
    density: Floats = compute_density(compute, memory)[unit]
    return density
