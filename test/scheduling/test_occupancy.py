"""What the running requests hold, read and will need, against sums over all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

import pytest
from scheduling_jobs import line_of

from sglang_batch.scheduling.line import Line
from sglang_batch.scheduling.occupancy import MARGIN_MAX, MARGIN_MIN, Occupancy


@dataclass
class Known:
    """What a test knows of a running line."""

    line: Line
    length: int  # decode steps that it really takes
    steps: int = 0
    decoding: bool = False


def check_sums(occupancy: Occupancy, running: list[Known]) -> None:
    for side in range(3):
        own = [each for each in running if each.line.side == side]
        rows = [each for each in own if each.decoding]
        assert all(each.line.takes_steps(occupancy.clock) for each in rows)
        assert occupancy.decoding[side] == len(rows)
        assert occupancy.kv[side] == sum(k.line.own + k.steps for k in own)
        assert occupancy.reads[side] == sum(k.line.read_len + k.steps + 1 for k in rows)
    assert occupancy.running == len(running)
    assert occupancy.complete == sum(not each.decoding for each in running)
    assert occupancy.lines == [each.line for each in running]
    assert MARGIN_MIN <= occupancy.margin <= MARGIN_MAX
    assert 1.0 <= occupancy.bias <= 16.0


def most_kv(running: list[Known], own: int, remaining: int) -> int:
    """Most KV, in tokens, while a newcomer runs; each grows until its estimate."""
    highest = 0
    for ahead in range(remaining + 1):
        total = own + ahead
        for known in running:
            left = max(known.line.estimate - known.steps, 1)
            if left >= ahead:
                total += known.line.own + known.steps + ahead
        highest = max(highest, total)
    return highest


def check_forecast(occupancy: Occupancy, running: list[Known], random: Random) -> None:
    """Room for a newcomer is what the sums say, up to a step's growth of each."""
    if not running:
        return
    newcomer = line_of(own=random.randint(1, 50), estimate=random.randint(1, 100))
    newcomer.max_steps = newcomer.estimate
    peak = most_kv(running, newcomer.own, newcomer.estimate)
    capacity, margin = occupancy.capacity, occupancy.margin
    slack = len(running) + 2
    occupancy.margin = 0.0
    occupancy.capacity = peak - 1
    assert not occupancy.fits(newcomer, 0, 0)
    occupancy.capacity = peak + slack
    assert occupancy.fits(newcomer, 0, 0)
    assert not occupancy.fits(newcomer, 10 * slack, 0)
    assert not occupancy.fits(newcomer, 0, 10 * slack)
    occupancy.capacity, occupancy.margin = capacity, margin


def nothing_is_left(occupancy: Occupancy) -> None:
    assert occupancy.kv == occupancy.reads == occupancy.decoding == [0, 0, 0]
    assert occupancy.running == 0
    assert occupancy._lines == {}
    assert occupancy._events == occupancy._ends == {}
    assert occupancy.complete == 0
    forecast = occupancy._forecast
    for sums in (forecast.ends, forecast.base, forecast.running, forecast.short):
        assert not sums.any()


def new_line(random: Random) -> Known:
    max_steps = random.choice([0, 1, 5, 400])
    line = line_of(
        own=random.randint(1, 40),
        estimate=min(random.randint(0, 80), max_steps),
        max_steps=max_steps,
        side=random.randrange(3),
    )
    line.input_len = line.own + random.randint(0, 60)
    length = min(max_steps, random.randint(0, 150))
    return Known(line, length)


@pytest.mark.parametrize("seed", range(25))
def test_like_sums_over_all(seed: int) -> None:
    random = Random(seed)
    occupancy = Occupancy(1000)
    running: list[Known] = []
    parked: list[Known] = []
    for step in range(400):
        if random.random() < 0.3:
            known = parked.pop() if parked and random.random() < 0.5 else None
            known = known or new_line(random)
            occupancy.join(known.line)
            occupancy.begin_decoding(known.line)
            known.decoding = known.steps < known.line.max_steps
            running.append(known)
        if random.random() < 0.1 and running:
            known = running.pop(random.randrange(len(running)))
            occupancy.leave(known.line)
            assert known.line.steps == known.steps
            parked.append(known)
        if random.random() < 0.02:
            occupancy.cover(random.choice([50, 600, 2000]) if step > 300 else 400)
        if random.random() < 0.02:
            occupancy.ran_out()
        end_those_that_are_complete(occupancy, running)
        check_sums(occupancy, running)
        if step < 300:  # later a bucket has several steps
            check_forecast(occupancy, running, random)
        tick(occupancy, running)
        check_sums(occupancy, running)
    for known in running:
        occupancy.leave(known.line)
    nothing_is_left(occupancy)


def end_those_that_are_complete(occupancy: Occupancy, running: list[Known]) -> None:
    for known in [each for each in running if each.steps >= each.length]:
        running.remove(known)
        occupancy.leave(known.line)
        assert known.line.steps == known.steps
        occupancy.ended(known.line)


def tick(occupancy: Occupancy, running: list[Known]) -> None:
    before = {id(known.line): known.line.estimate for known in running}
    rose = occupancy.tick()
    for known in running:
        if known.decoding:
            known.steps += 1
            known.decoding = known.steps < known.line.max_steps
    for line in rose:
        assert before[id(line)] < line.estimate <= line.max_steps
    for known in running:
        assert known.line.steps_done(occupancy.clock) == known.steps
        assert known.steps <= max(known.line.estimate, known.line.max_steps)
        if known.decoding:  # nothing outlives its estimate unnoticed
            assert known.steps <= known.line.estimate


def test_an_outlived_estimate_rises_to_the_most_at_last() -> None:
    occupancy = Occupancy(1000)
    line = line_of(estimate=2, max_steps=60)
    occupancy.join(line)
    occupancy.begin_decoding(line)
    seen = []
    for _ in range(60):
        seen += [each.estimate for each in occupancy.tick()]
    assert seen == sorted(set(seen))
    assert seen[-1] == line.max_steps
    assert not line.takes_steps(occupancy.clock)  # it has all its tokens
    assert occupancy.complete == 1
    occupancy.leave(line)
    nothing_is_left(occupancy)


def test_who_leaves_early_leaves_no_event() -> None:
    occupancy = Occupancy(1000)
    lines = [line_of(estimate=100) for _ in range(3)]
    for line in lines:
        occupancy.join(line)
        occupancy.begin_decoding(line)
        occupancy.tick()
    for line in lines:
        occupancy.leave(line)
    nothing_is_left(occupancy)


def test_a_thousand_ends_cost_what_one_does() -> None:
    """Requests of one length end together; the step before is not to pay for that."""
    seconds = {}
    for together in (False, True):
        occupancy = Occupancy(10**6)
        for number in range(2000):
            steps = 200 if together else 200 + number
            line = line_of(estimate=steps, max_steps=steps)
            occupancy.join(line)
            occupancy.begin_decoding(line)
        for _ in range(199):
            occupancy.tick()
        started = time.thread_time()
        occupancy.tick()
        seconds[together] = time.thread_time() - started
        assert occupancy.complete == (2000 if together else 1)
    assert seconds[True] < seconds[False] + 50e-6


def test_covering_more_in_the_middle_keeps_what_runs() -> None:
    occupancy = Occupancy(10_000)
    random = Random(1)
    running = [Known(line_of(own=9, estimate=40 + i), 99) for i in range(20)]
    for known in running:
        known.line.max_steps = 500
        occupancy.join(known.line)
        occupancy.begin_decoding(known.line)
        known.decoding = True
        tick(occupancy, running[: running.index(known) + 1])
    for longest in (100, 400, 300):
        occupancy.cover(longest)
        check_forecast(occupancy, running, random)
        check_sums(occupancy, running)


def test_margin_grows_when_room_ran_out_and_comes_back() -> None:
    occupancy = Occupancy(1000)
    for _ in range(20):
        occupancy.ran_out()
    assert occupancy.margin == MARGIN_MAX
    for _ in range(5000):
        occupancy.tick()
    assert occupancy.margin == MARGIN_MIN


def test_a_line_that_ran_before_needs_what_its_estimate_says() -> None:
    """Joining again does not raise its estimate, so room for more is not asked."""
    occupancy = Occupancy(1000)
    occupancy._came_out = 4 * occupancy._estimated
    line = line_of(own=10, estimate=100, max_steps=500)
    assert occupancy.expected(line) == 400
    occupancy.join(line)
    assert line.estimate == 400
    occupancy.begin_decoding(line)
    occupancy.tick()
    occupancy.leave(line)
    assert occupancy.expected(line) == 400
    occupancy.join(line)
    assert line.estimate == 400


def test_nothing_runs_so_anything_fits() -> None:
    occupancy = Occupancy(10)
    assert occupancy.fits(line_of(own=1000), 1000, 1000)


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_estimates_that_were_too_low_raise_the_next(ratio: int) -> None:
    occupancy = Occupancy(10**6)
    for _ in range(20):
        lines = [line_of(estimate=20, max_steps=1000) for _ in range(20)]
        for line in lines:
            occupancy.join(line)
            occupancy.begin_decoding(line)
        for _ in range(20 * ratio):
            occupancy.tick()
        for line in lines:
            occupancy.leave(line)
            occupancy.ended(line)
    assert 0.8 * ratio <= occupancy.bias <= 1.3 * ratio


def test_known_lengths_say_nothing_of_estimates() -> None:
    occupancy = Occupancy(10**6)
    for _ in range(50):
        line = line_of(estimate=20, max_steps=20)
        occupancy.join(line)
        occupancy.begin_decoding(line)
        for _ in range(20):
            occupancy.tick()
        occupancy.leave(line)
        occupancy.ended(line)
    assert occupancy._came_out == occupancy._estimated
