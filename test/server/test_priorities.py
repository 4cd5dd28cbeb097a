"""Which batches run and which go first, as a function of their rates and windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.server.runner import (
    URGENT,
    RunnableBatch,
    in_danger,
    in_hours,
    priorities,
    to_start,
)

DAY = 86_400


def batch(
    name: str, seq: int = 1, priority: int = 0, **fields: float | bool
) -> RunnableBatch:
    known = RunnableBatch(name, seq, priority, expires_at=DAY, num_left=100)
    return replace(known, **fields)  # type: ignore[arg-type]


def started(batches: list[RunnableBatch], most: int, now: float = 0) -> list[str]:
    return to_start(batches, priorities(batches, now), most)


def test_the_oldest_of_the_most_important_start() -> None:
    batches = [batch("c", 3), batch("b", 2, 5), batch("a", 1), batch("d", 4, 5)]
    assert started(batches, 1) == ["b"]
    assert started(batches, 3) == ["b", "d", "a"]
    assert started(batches, 9) == ["b", "d", "a", "c"]


def test_a_batch_does_not_wait_for_less_important_ones() -> None:
    batches = [batch("low", running=True), batch("same", 2), batch("high", 3, 1)]
    assert started(batches, 1) == ["high"]


def test_a_batch_waits_for_as_many_that_matter_as_much() -> None:
    batches = [batch("x", running=True), batch("y", 2, 7, running=True), batch("z", 3)]
    assert started(batches, 2) == []
    assert started(batches, 3) == ["z"]


@pytest.mark.parametrize(
    ("left", "now", "danger"), [(79, DAY - 100, False), (81, DAY - 100, True)]
)
def test_a_batch_is_urgent_when_its_own_rate_does_not_suffice(
    left: int, now: float, danger: bool
) -> None:
    one = batch("a", num_left=left, lines_per_s=1.0, running=True)
    assert in_danger(one, now, usual_rate=1000.0) is danger
    assert priorities([one], now)["a"] == (URGENT if danger else 0)


def test_a_batch_that_waits_is_judged_by_the_servers_rate() -> None:
    busy = batch("busy", running=True, lines_per_s=10.0)
    late = batch("late", 2, num_left=9000, expires_at=1000)
    batches = [busy, late]
    assert priorities(batches, 0) == {"busy": 0, "late": URGENT}
    assert started(batches, 1) == ["late"]
    assert priorities([replace(busy, lines_per_s=0.0), late], 0)["late"] == 0


def test_an_urgent_batch_stays_urgent() -> None:
    assert priorities([batch("a", urgent=True)], 0)["a"] == URGENT


@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.booleans(), st.integers(0, 50)), max_size=12
    ),
    st.integers(1, 4),
)
def test_the_best_always_runs_and_none_starts_past_a_better_one(
    shapes: list[tuple[int, bool, int]], most: int
) -> None:
    batches = [
        batch(str(i), i, priority, running=running, num_left=left)
        for i, (priority, running, left) in enumerate(shapes)
    ]
    priority = priorities(batches, 0)
    ids = to_start(batches, priority, most)
    running = {b.batch_id for b in batches if b.running} | set(ids)
    waiting = [b for b in batches if b.batch_id not in running]
    for one in waiting:
        peers = [i for i in running if priority[i] >= priority[one.batch_id]]
        assert len(peers) >= most
    for one in ids:
        better = [i for i in ids if priority[i] >= priority[one]]
        already = [
            b for b in batches if b.running and priority[b.batch_id] >= priority[one]
        ]
        assert len(better) + len(already) <= most or len(better) == 1
    assert ids == to_start(batches, priority, most)


@pytest.mark.parametrize(
    ("hours", "minute", "inside"),
    [
        (None, 0, True),
        ((60, 120), 59, False),
        ((60, 120), 60, True),
        ((60, 120), 119, True),
        ((60, 120), 120, False),
        ((1320, 360), 1320, True),
        ((1320, 360), 0, True),
        ((1320, 360), 359, True),
        ((1320, 360), 360, False),
        ((1320, 360), 1319, False),
    ],
)
def test_hours_may_span_midnight(
    hours: tuple[int, int] | None, minute: int, inside: bool
) -> None:
    assert in_hours(hours, minute) is inside


def test_batches_of_a_client_without_tokens_neither_start_nor_take_a_place() -> None:
    paused = [batch("a", 1, used_up=True), batch("b", 2, used_up=True)]
    assert started([*paused, batch("c", 3), batch("d", 4)], 1) == ["c"]
    late = [replace(paused[0], num_left=10**9), batch("x", running=True, lines_per_s=1)]
    assert priorities(late, 0)["a"] == 0
