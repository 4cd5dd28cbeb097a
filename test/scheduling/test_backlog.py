"""The backlog against a sorted list."""

from __future__ import annotations

import time
from random import Random

import pytest
from scheduling_jobs import request_of

from sglang_batch.scheduling.backlog import Backlog
from sglang_batch.scheduling.scheduled_request import ScheduledRequest


def by_turn(requests: list[ScheduledRequest]) -> list[ScheduledRequest]:
    return sorted(requests, key=lambda request: (request.position, request.arrival))


@pytest.mark.parametrize("seed", range(20))
def test_both_ends_like_a_sorted_list(seed: int) -> None:
    random = Random(seed)
    num_left = random.randint(0, 30)
    backlog = Backlog(num_left, both_ends=True)
    out = [request_of(random.randint(0, 30)) for _ in range(40)]
    waiting: list[ScheduledRequest] = []
    for _ in range(600):
        if out and random.random() < 0.5:
            request = out.pop(random.randrange(len(out)))
            backlog.add(request)
            waiting.append(request)
        elif waiting:
            choices = [random.choice(waiting), backlog.first(), backlog.last()]
            request = random.choice([each for each in choices if each is not None])
            backlog.remove(request)
            waiting.remove(request)
            out.append(request)
            assert not request.waiting
        ordered = by_turn(waiting)
        assert backlog.first() is (ordered[0] if ordered else None)
        last = [each for each in ordered if each.position == ordered[-1].position]
        right = last and last[0].position >= num_left
        assert backlog.last() is (last[0] if right else None)
        assert backlog.count == len(waiting)
        assert backlog.tokens == sum(each.input_len for each in waiting)
        assert set(backlog) == set(waiting)


def test_equal_turns_keep_the_order_of_arrival_when_put_back() -> None:
    backlog = Backlog(0, both_ends=False)
    requests = [request_of(7, leaf=-1) for _ in range(3)]
    for request in requests:
        backlog.add(request)
    backlog.remove(requests[0])
    backlog.add(requests[0])
    assert backlog.first() is requests[0]


def test_what_is_not_planned_is_never_on_the_right() -> None:
    backlog = Backlog(1, both_ends=True)
    planned, unplanned = request_of(3), request_of(1 << 40, leaf=-1)
    backlog.add(unplanned)
    backlog.add(planned)
    assert backlog.last() is planned
    backlog.remove(planned)
    assert backlog.last() is None
    assert backlog.first() is unplanned


def test_beam_searches_come_after_all_others() -> None:
    backlog = Backlog(0, both_ends=True)
    requests = [request_of(position) for position in range(4)]
    requests[0].rows = requests[3].rows = 2
    for request in requests:
        backlog.add(request)
    assert (backlog.first(), backlog.last()) == (requests[1], requests[2])
    for request in requests[1:3]:
        backlog.remove(request)
    assert (backlog.first(), backlog.last()) == (requests[0], requests[3])


def test_one_end_only() -> None:
    backlog = Backlog(0, both_ends=False)
    backlog.add(request_of(0))
    assert backlog.last() is None


@pytest.mark.parametrize("both_ends", [False, True])
def test_putting_back_leaves_nothing_behind(both_ends: bool) -> None:
    backlog = Backlog(0, both_ends=both_ends)
    request = request_of(0)
    for _ in range(1000):
        backlog.add(request)
        assert backlog.first() is request
        backlog.remove(request)
        assert backlog.first() is None
        assert backlog.last() is None
    assert not backlog._first
    assert not backlog._last


@pytest.mark.slow
@pytest.mark.parametrize("both_ends", [False, True])
def test_a_hundred_thousand_cost_microseconds_each(both_ends: bool) -> None:
    positions = list(range(100_000))
    Random(0).shuffle(positions)
    requests = [request_of(position) for position in positions]
    backlog = Backlog(50_000, both_ends=both_ends)
    begin = time.process_time()
    for request in requests:
        backlog.add(request)
    added = time.process_time() - begin
    begin = time.process_time()
    while (first := backlog.first()) is not None:
        backlog.remove(first)
        last = backlog.last()
        if last is not None:
            backlog.remove(last)
    taken = time.process_time() - begin
    print(f"add {added * 10:.2f} us, take {taken * 10:.2f} us")
    # Measured: 1 to 4 us each. A scan of all that wait would take milliseconds.
    assert added < 100_000 * 50e-6
    assert taken < 100_000 * 50e-6
