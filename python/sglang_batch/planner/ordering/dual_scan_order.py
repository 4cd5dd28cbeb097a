"""The order of ``dual-scan``: BlendServe's tree sorted by compute density.

A subtree may have compute-intensive and memory-intensive requests, such as answers of
one word and of ten thousand to the same document. As a whole, it is sorted to one side,
and its minority is misplaced. Split, both sides compute its prefix.

In BlendServe's Algorithm 2 all children of an opened node become units of their own. In ours,
:func:`split_in_two`, an opened node is cut only once, between the compute-intensive and the
memory-intensive requests below it, so its prefix is computed twice and not once per child.
For a given price per second of misplaced work, one pass over the tree from the leaves up
finds the best nodes to open.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit
from ..costs.cost_model import CostModel, compute_density
from ..costs.tree_work import LeafWork, leaf_compute, root_density
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Bools, Floats, Int32s, Int64s
from .order import Order, OrderSettings
from .tree_order import layer_sort


def dual_scan_order(
    tree: PrefixTree, cost: CostModel, work: LeafWork, settings: OrderSettings
) -> Order:
    """The left side, then the right side, each in falling compute density."""
    if tree.num_requests == 0:
        return Order(tree.order, density=np.zeros(0))
    target = root_density(tree, cost, work)
    compute = leaf_compute(tree, cost, work)
    # Seconds of compute (or memory) time that a request has beyond the target: its harm on
    # the wrong side.
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
    BlendServe (section 4) merges nodes for the same reason.
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


_BISECTIONS = 40
# Tokens per second of harm at which every node with both kinds is cut.
_ANY_PRICE = 1e30
_LEFT, _RIGHT = 1, 2


def split_in_two(
    tree: PrefixTree, is_right: Bools, weight: Floats, max_extra_tokens: int
) -> tuple[Bools, int]:
    """Choose the requests that are scanned from the right.

    Args:
        is_right: bool ``[n]`` by leaf, memory-intensive by its own density.
        weight: float64 ``[n]`` by leaf, harm of the wrong side, in seconds.
        max_extra_tokens: prompt tokens that may be computed twice.

    Returns:
        Whether each leaf is on the right, bool ``[n]``, and the tokens computed twice.
    """
    right = tree.subtree_sums(np.where(is_right, weight, 0.0))
    left = tree.subtree_sums(np.where(is_right, 0.0, weight))
    harm = np.minimum(left, right)
    kinds = _kinds_at_nodes(tree.num_nodes, tree.leaf_parent, is_right)
    mostly = np.where(right > left, _RIGHT, _LEFT).astype(np.int8)

    def cut(price: float) -> tuple[Bools, int]:
        return _open_nodes(tree.parent, tree.own_len, price * harm, kinds, mostly)

    opened, extra = cut(_ANY_PRICE)
    if extra > max_extra_tokens:
        low, high = 0.0, 1.0
        while cut(high)[1] <= max_extra_tokens:
            high *= 16.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            fits = cut(middle)[1] <= max_extra_tokens
            low, high = (middle, high) if fits else (low, middle)
        opened, extra = cut(low)
    return _sides(tree.parent, tree.leaf_parent, opened, mostly, is_right), extra


@jit
def _kinds_at_nodes(
    num_nodes: int, leaf_parent: Int32s, is_right: Bools
) -> NDArray[np.int8]:
    """Kinds of the leaves directly below each node, as bits, int8 ``[m]``."""
    kinds = np.zeros(num_nodes, np.int8)
    for leaf in range(len(leaf_parent)):
        kinds[leaf_parent[leaf]] |= _RIGHT if is_right[leaf] else _LEFT
    return kinds


@jit
def _open_nodes(
    parent: Int32s, length: Int32s, harm: Floats, kinds: NDArray[np.int8],
    mostly: NDArray[np.int8],
) -> tuple[Bools, int]:  # fmt: skip
    """Nodes to cut, bool ``[m]``: those with more harm than tokens paid for all cuts in the
    subtree. And the tokens of nodes with leaves on both sides."""
    m = len(parent)
    paid = np.zeros(m)
    extra = np.zeros(m, np.int64)
    sides = kinds.copy()
    opened = np.zeros(m, np.bool_)
    for node in range(m - 1, -1, -1):
        cost = length[node] + paid[node]
        opened[node] = cost < harm[node]
        if not opened[node]:
            cost, extra[node], sides[node] = harm[node], 0, mostly[node]
        elif sides[node] == _LEFT | _RIGHT:
            extra[node] += length[node]
        if node > 0:
            paid[parent[node]] += cost
            extra[parent[node]] += extra[node]
            sides[parent[node]] |= sides[node]
    return opened, int(extra[0])


@jit
def _sides(
    parent: Int32s, leaf_parent: Int32s, opened: Bools, mostly: NDArray[np.int8],
    is_right: Bools,
) -> Bools:  # fmt: skip
    """Whether each leaf is on the right, bool ``[n]``: by itself, or by the uncut subtree
    around it."""
    m = len(parent)
    uncut = np.full(m, -1, np.int32)
    side = np.empty(len(is_right), np.bool_)
    for node in range(m):
        above = uncut[parent[node]] if node > 0 else -1
        if above >= 0:
            uncut[node] = above
        elif not opened[node]:
            uncut[node] = node
    for leaf in range(len(side)):
        node = uncut[leaf_parent[leaf]]
        side[leaf] = is_right[leaf] if node < 0 else mostly[node] == _RIGHT
    return side
