"""Orders of requests that run with adapters: each adapter's one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_batch.config import ORDERS
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.ordering.order import Order, OrderSettings, by_adapter
from sglang_batch.planner.ordering.order_functions import make_order
from sglang_batch.planner.output_lengths.estimates import OutputEstimates
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, Int32s, PlanRequests


def runs(values: Int32s) -> list[int]:
    """The values without repetitions of neighbours."""
    return [int(v) for i, v in enumerate(values) if i == 0 or v != values[i - 1]]


@pytest.mark.parametrize("policy", ORDERS)
def test_every_policy_sends_adapter_by_adapter(policy: str) -> None:
    rng = np.random.default_rng(0)
    n, length = 120, 40
    tokens = rng.integers(0, 3, n * length).astype(np.int32)
    adapter = rng.integers(0, 5, n).astype(np.int32)
    tokens[::length] += 100 * adapter
    most = rng.integers(1, 200, n).astype(np.int32)
    requests = PlanRequests(
        tokens, length * np.arange(n + 1), most, np.full(n, UNKNOWN, np.int32), adapter
    )
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    cost = CostModel(token_time_s=1e-5, kv_read_time_s=1e-8)
    order = make_order(
        policy,
        tree,
        requests,
        cost,
        OutputEstimates(most.astype(float), most.astype(float) ** 2),
        OrderSettings(),
    )
    assert np.array_equal(np.sort(order.requests), np.arange(n))
    sent = adapter[order.requests]
    if order.density is None:
        assert runs(sent) == [0, 1, 2, 3, 4]
    else:  # from both ends
        assert 0 < order.num_left < n
        assert runs(sent[: order.num_left]) == [0, 1, 2, 3, 4]
        assert runs(sent[order.num_left :]) == [4, 3, 2, 1, 0]


def test_within_an_adapter_the_order_stays_and_densities_move_along() -> None:
    order = Order(np.array([3, 1, 2, 0, 4]), np.array([9.0, 7.0, 5.0, 3.0, 1.0]), 2)
    adapter = np.array([1, 0, 1, 0, 0], np.int32)
    moved = by_adapter(order, adapter)
    assert moved.requests.tolist() == [3, 1, 2, 0, 4]
    adapter = np.array([0, 0, 1, 1, 0], np.int32)
    moved = by_adapter(order, adapter)
    assert moved.requests.tolist() == [1, 3, 2, 0, 4]
    assert moved.density is not None
    assert moved.density.tolist() == [7.0, 9.0, 5.0, 3.0, 1.0]
    assert by_adapter(order, None) is order
