"""The second pool of models with windows or states, in admission."""

from __future__ import annotations

import pytest
from scheduling_jobs import request_of

from sglang_batch.planner.machine_model import PoolShares, has_room, share
from sglang_batch.scheduling.kv_accounting import KvAccounting

WINDOW = 32


def windows(capacity: int) -> PoolShares:
    return PoolShares(
        capacity, prompt_tokens=WINDOW, answer_tokens=WINDOW, prefix_tokens=WINDOW
    )


@pytest.mark.parametrize(
    ("own", "steps", "units"),
    [(10, 5, 15), (1000, 5, 37), (10, 1000, 42), (1000, 1000, 64)],
)
def test_a_share_stops_growing_at_the_window(own: int, steps: int, units: int) -> None:
    assert share(windows(100), own, steps) == units


def test_states_count_one_by_one() -> None:
    states = PoolShares(4, row_units=1, prefix_units=1)
    assert share(states, 1000, 50) == 1
    assert has_room(states, 0, 1, 3, 0.0)
    assert not has_room(states, 0, 1, 4, 0.0)


def test_the_smaller_pool_limits_admission() -> None:
    kv_accounting = KvAccounting(100_000, second=windows(200))
    kv_accounting.extend_forecast(1000)
    admitted = []
    for _ in range(10):
        request = request_of(own=500, est_decode_steps=500)
        if not kv_accounting.fits(request, 0, 0, num_prefixes=1):
            break
        kv_accounting.admit(request)
        admitted.append(request)
    # One prefix and two requests: 32 + 2 * 64 of 200, and 1 % stays free.
    assert len(admitted) == 2
    assert kv_accounting.second_held == 128
    for request in admitted:
        kv_accounting.remove(request)
    assert kv_accounting.second_held == 0
