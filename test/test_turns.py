"""Which batches run and which go first, as a function of what is known of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.runner import in_hours
from sglang_batch.turns import RISEN, Turn, in_danger, priorities, to_start

DAY = 86_400


def turn(name: str, seq: int = 1, priority: int = 0, **fields: float | bool) -> Turn:
    return replace(Turn(name, seq, priority, expires_at=DAY, num_left=100), **fields)  # type: ignore[arg-type]


def started(turns: list[Turn], most: int, now: float = 0) -> list[str]:
    return to_start(turns, priorities(turns, now), most)


def test_the_oldest_of_the_most_important_start() -> None:
    turns = [turn("c", 3), turn("b", 2, 5), turn("a", 1), turn("d", 4, 5)]
    assert started(turns, 1) == ["b"]
    assert started(turns, 3) == ["b", "d", "a"]
    assert started(turns, 9) == ["b", "d", "a", "c"]


def test_a_batch_does_not_wait_for_less_important_ones() -> None:
    turns = [turn("low", running=True), turn("same", 2), turn("high", 3, 1)]
    assert started(turns, 1) == ["high"]


def test_a_batch_waits_for_as_many_that_matter_as_much() -> None:
    turns = [turn("x", running=True), turn("y", 2, 7, running=True), turn("z", 3)]
    assert started(turns, 2) == []
    assert started(turns, 3) == ["z"]


@pytest.mark.parametrize(
    ("left", "now", "danger"), [(79, DAY - 100, False), (81, DAY - 100, True)]
)
def test_a_batch_rises_when_its_own_rate_does_not_suffice(
    left: int, now: float, danger: bool
) -> None:
    one = turn("a", num_left=left, lines_per_s=1.0, running=True)
    assert in_danger(one, now, usual_rate=1000.0) is danger
    assert priorities([one], now)["a"] == (RISEN if danger else 0)


def test_a_batch_that_waits_is_judged_by_the_servers_rate() -> None:
    busy = turn("busy", running=True, lines_per_s=10.0)
    late = turn("late", 2, num_left=9000, expires_at=1000)
    turns = [busy, late]
    assert priorities(turns, 0) == {"busy": 0, "late": RISEN}
    assert started(turns, 1) == ["late"]
    assert priorities([replace(busy, lines_per_s=0.0), late], 0)["late"] == 0


def test_what_has_risen_stays_up() -> None:
    assert priorities([turn("a", risen=True)], 0)["a"] == RISEN


@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.booleans(), st.integers(0, 50)), max_size=12
    ),
    st.integers(1, 4),
)
def test_the_best_always_runs_and_none_starts_past_a_better_one(
    shapes: list[tuple[int, bool, int]], most: int
) -> None:
    turns = [
        turn(str(i), i, priority, running=running, num_left=left)
        for i, (priority, running, left) in enumerate(shapes)
    ]
    priority = priorities(turns, 0)
    ids = to_start(turns, priority, most)
    running = {t.batch_id for t in turns if t.running} | set(ids)
    waiting = [t for t in turns if t.batch_id not in running]
    for one in waiting:
        peers = [i for i in running if priority[i] >= priority[one.batch_id]]
        assert len(peers) >= most
    for one in ids:
        better = [i for i in ids if priority[i] >= priority[one]]
        already = [
            t for t in turns if t.running and priority[t.batch_id] >= priority[one]
        ]
        assert len(better) + len(already) <= most or len(better) == 1
    assert ids == to_start(turns, priority, most)


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
def test_hours_may_go_past_midnight(
    hours: tuple[int, int] | None, minute: int, inside: bool
) -> None:
    assert in_hours(hours, minute) is inside
