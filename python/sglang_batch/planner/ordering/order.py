"""An order of a job's requests, its settings, and orders by adapter and of random families."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...errors import ConfigError
from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s, Int64s


@dataclass(frozen=True, slots=True)
class LengthKeys:
    """How requests are put into batches of similar KV length while they run.

    rule: of ``kv_lengths.batch_state``.
    key: int32 ``[n]``, the length of a request's KV when it joins, or its family's longest.
    family: int32 ``[n]``. Members of a family share a prefix and join one after the other. -1
        for requests without.
    max_wait_steps: decode steps after which a waiting request joins before all others.
        None: never with paged KV.
    """

    rule: int
    key: Int32s
    family: Int32s
    max_wait_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which requests are sent to the engine.

    requests: int64 ``[n]``, request indices by position.
    density: float64 ``[n]`` by position, compute density of the neighbourhood, for an
        order that is taken from both ends. None for one that is followed from its start.
    num_left: requests on the compute-intensive side, the first ones.
    repeated_tokens: shared prompt tokens that the order computes again on purpose.
    lengths: for an order whose requests join by the length of their KV.
    """

    requests: Int64s
    density: Floats | None = None
    num_left: int = 0
    repeated_tokens: int = 0
    lengths: LengthKeys | None = None

    @property
    def is_dynamic(self) -> bool:
        """Whether requests enter the engine in an order that depends on its state."""
        return self.density is not None or self.lengths is not None

    def beginning_with(self, first: Int64s) -> Order:
        """The same order after the requests of ``first``, int64, which are moved to the front."""
        rest = ~np.isin(self.requests, first)
        density = self.density
        if density is not None and len(density):
            # A sample comes from all over the job: count it with the left side.
            among_left = density[: max(1, self.num_left)]
            density = np.concatenate(
                [np.full(len(first), np.median(among_left)), density[rest]]
            )
        num_left = 0
        if density is not None:
            num_left = len(first) + int(rest[: self.num_left].sum())
        return replace(
            self,
            requests=np.concatenate([first, self.requests[rest]]),
            density=density,
            num_left=num_left,
        )


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """Settings of the orders.

    seed: of ``random``, and of the output lengths that ``auto`` simulates with.
    min_sharing_kept: share of the shared prompt tokens that dual-scan keeps when it
        moves outliers out of their subtrees, 0 to 1.
    max_wait_steps: see :class:`LengthKeys`.

    Raises:
        ConfigError: ``max_wait_steps`` is below 1.
    """

    seed: int = 0
    min_sharing_kept: float = 0.998
    max_wait_steps: int | None = None

    def __post_init__(self) -> None:
        if self.max_wait_steps is not None and self.max_wait_steps < 1:
            raise ConfigError(
                f"max_wait_steps={self.max_wait_steps!r} must be 1 or more; leave it out "
                "for no limit."
            )


# Most requests of one family.
_FAMILY = 16


def families_mixed(tree: PrefixTree, seed: int) -> Order:
    """Families of requests one after the other, in random order: whatever the lengths turn out to
    be, every stretch has about the same mix of requests as the job.

    A family is all leaves below the highest node that has at most 16 of them.
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


def by_adapter(order: Order, adapter: Int32s | None) -> Order:
    """The same order adapter by adapter, in ascending numbers.

    An order that is taken from both ends has the first adapter at both of them, so that the same
    adapters are in memory on both sides. Numbers do not change from plan to plan, so no plan
    puts an adapter behind others that is in memory.

    Args:
        adapter: int32 ``[n]`` by request. None if there are none.
    """
    if adapter is None or len(order.requests) == 0:
        return order
    rank = adapter[order.requests].astype(np.int64)
    if order.density is not None:
        right = np.arange(len(rank)) >= order.num_left
        rank = np.where(right, 2 * int(rank.max()) + 1 - rank, rank)
    places = np.argsort(rank, kind="stable")
    density = order.density
    return replace(
        order,
        requests=order.requests[places],
        density=None if density is None else density[places],
    )
