"""An order for jobs whose output lengths are still unknown."""

from __future__ import annotations

import numpy as np

from ..prefixes.prefix_tree import PrefixTree
from .order import Order

# Most requests of one family.
_FAMILY = 16


def families_mixed(tree: PrefixTree, seed: int) -> Order:
    """Families of requests one after the other, in random order.

    Whatever the lengths turn out to be, every stretch of this order has about the same
    mix of requests as the job. A family is all leaves below the highest node that has
    at most 16 of them.
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
