"""Orders of jobs whose requests run with LoRA adapters.

Few adapters are in the engine's memory at a time. So the requests of an adapter are sent one
after the other, and an adapter is loaded once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..requests import Int32s
from .order import Order


def by_adapter(order: Order, adapter: Int32s | None) -> Order:
    """The same order adapter by adapter, in ascending numbers.

    An order that is taken from both ends has the first adapter at both of them, and the
    last one in the middle. So the adapters in memory are the same on both sides, and their
    requests are blended. The numbers do not change from plan to plan, so no plan puts an
    adapter behind others that is in memory.

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
