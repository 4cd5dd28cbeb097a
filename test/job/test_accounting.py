"""The tail of a job, and the answers after which it may end."""

import pytest

from sglang_batch.job.early_stop import num_enough
from sglang_batch.job.occupancy import NAMED, Occupancy, Tail
from sglang_batch.job.replicas import Replica
from sglang_batch.planner.requests import LEFT


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def occupancy(clock: Clock, events: list[tuple[float, int]]) -> Occupancy:
    """Of requests that start (1) or end (-1) at these times."""
    found, running = Occupancy(clock), 0
    for number, (time, change) in enumerate(events):
        clock.now = time
        if change > 0:
            running += change
            found.runs(running)
        else:
            found.ended(number, running)
            running -= 1
    return found


def test_the_tail_begins_when_an_engine_is_last_half_full() -> None:
    clock = Clock()
    starts = [(0.0, 8)]
    ends = [(1.0, -1)] * 4 + [(2.0, -1)] * 2 + [(5.0, -1), (9.0, -1)]
    found = occupancy(clock, starts + ends)
    # Of 8, 4 are half: the fifth one to end leaves fewer.
    assert Occupancy.tail([found]) == Tail(7.0, 3, (8, 7, 6))


def test_an_engine_that_fills_again_has_no_tail_so_far() -> None:
    clock = Clock()
    found = occupancy(
        clock, [(0.0, 4), (1.0, -1), (2.0, -1), (3.0, -1), (4.0, 3), (5.0, -1)]
    )
    assert Occupancy.tail([found]).engine_s == 0.0
    # Of 4 at the last start, one has ended.
    clock.now = 7.0
    found.ended(6, 3)
    assert Occupancy.tail([found]).engine_s == 0.0
    clock.now = 9.0
    found.ended(7, 1)
    assert Occupancy.tail([found]) == Tail(2.0, 1, (7,))


def test_requests_that_end_together_leave_no_tail() -> None:
    found = occupancy(Clock(), [(0.0, 6)] + [(3.0, -1)] * 6)
    assert Occupancy.tail([found]).engine_s == 0.0


def test_the_tails_of_replicas_add_up_until_the_job_ends() -> None:
    clock = Clock()
    short = occupancy(clock, [(0.0, 2), (1.0, -1), (1.0, -1)])
    long = occupancy(clock, [(0.0, 2), (1.0, -1), (6.0, -1)])
    unused = Occupancy(clock)
    assert Occupancy.tail([short, long, unused]).engine_s == 5.0
    assert Occupancy.tail([unused]) == Tail()


def test_only_the_last_requests_are_named() -> None:
    clock = Clock()
    found = occupancy(clock, [(0.0, 100)] + [(1.0 + i, -1) for i in range(100)])
    tail = Occupancy.tail([found])
    assert len(tail.last) == NAMED
    assert tail.last[0] == 100
    assert tail.requests == 49


@pytest.mark.parametrize("tells", [False, True])
def test_a_replica_runs_what_has_joined(tells: bool) -> None:
    replica = Replica(None, tells=tells)
    clock = Clock()
    replica.occupancy = Occupancy(clock)
    for number in range(8):
        replica.add_in_flight(number, LEFT)
    replica.joined([0, 1])
    clock.now = 1.0
    replica.remove_in_flight(0)
    clock.now = 3.0
    replica.remove_in_flight(1)
    clock.now = 4.0
    replica.joined([2, 3])
    assert replica.occupancy.tail([replica.occupancy]).engine_s == 0.0
    clock.now = 6.0
    for number in range(2, 8):
        replica.remove_in_flight(number)
    tail = replica.occupancy.tail([replica.occupancy])
    assert (tail.engine_s, tail.requests) == ((0.0, 0) if tells else (0.0, 3))


@pytest.mark.parametrize(
    ("share", "total", "failed", "wanted"),
    [
        (0.99, 100, 0, 99),
        (0.07, 100, 0, 7),
        (0.5, 5, 0, 3),
        (1, 7, 2, 5),
        (0.5, 2, 2, 0),
    ],
)
def test_enough_is_a_share_of_those_that_did_not_fail(
    share: float, total: int, failed: int, wanted: int
) -> None:
    assert num_enough(share, total, failed) == wanted
