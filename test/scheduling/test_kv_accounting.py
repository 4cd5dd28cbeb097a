"""What the running requests hold, read and will need, against sums over all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

import pytest
from scheduling_jobs import job_of, plan_of, request_of

from sglang_batch.scheduling.kv_accounting import MARGIN_MAX, MARGIN_MIN, KvAccounting
from sglang_batch.scheduling.scheduled_request import ScheduledRequest


@dataclass
class Known:
    """What a test knows of a running request."""

    request: ScheduledRequest
    length: int  # decode steps that it really takes
    steps: int = 0
    decoding: bool = False


def in_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def check_sums(
    kv_accounting: KvAccounting, running: list[Known], page_size: int = 1
) -> None:
    for side in range(3):
        own = [each for each in running if each.request.side == side]
        rows = [each for each in own if each.decoding]
        assert all(each.request.takes_steps(kv_accounting.clock) for each in rows)
        assert kv_accounting.decoding[side] == len(rows)
        assert kv_accounting.kv[side] == sum(
            in_pages(k.request.own + k.steps, page_size) for k in own
        )
        assert kv_accounting.reads[side] == sum(
            k.request.read_len + k.steps + 1 for k in rows
        )
    begun = [k for k in running if k.decoding and begins_page(k, page_size)]
    assert kv_accounting.growth == page_size * len(begun)
    assert kv_accounting.num_running == len(running)
    assert kv_accounting.num_complete == sum(not each.decoding for each in running)
    assert kv_accounting.requests == [each.request for each in running]
    assert MARGIN_MIN <= kv_accounting.margin <= MARGIN_MAX


def begins_page(known: Known, page_size: int) -> bool:
    """Whether its next token is the first of a page."""
    return (known.request.own + known.steps) % page_size == 0


def most_kv(
    running: list[Known], own: int, remaining: int, page_size: int, waits: int
) -> int:
    """Most KV, in tokens of whole pages, while a newcomer runs.

    Each request grows until its estimate, and holds its KV for one step more. The
    newcomer grows from the step after the next ``waits`` ones.
    """
    highest = 0
    for ahead in range(1, waits + remaining + 2):
        total = in_pages(own + max(0, min(ahead - waits, remaining)), page_size)
        for known in running:
            request = known.request
            left = max(request.est_decode_steps, request.steps + 1) - known.steps
            if left + 1 >= ahead:
                tokens = request.own + known.steps + min(ahead, left)
                total += in_pages(tokens, page_size)
        highest = max(highest, total)
    return highest


def check_forecast(
    kv_accounting: KvAccounting,
    running: list[Known],
    random: Random,
    page_size: int = 1,
    *,
    mixed: bool = True,
) -> None:
    """Room for a newcomer follows the sums exactly."""
    if not running:
        return
    newcomer = request_of(
        own=random.randint(1, 50), est_decode_steps=random.randint(1, 100)
    )
    newcomer.max_decode_steps = newcomer.est_decode_steps
    peak = most_kv(
        running, newcomer.own, newcomer.est_decode_steps, page_size, int(mixed)
    )
    capacity, margin = kv_accounting.capacity, kv_accounting.margin
    kv_accounting.margin = 0.0
    kv_accounting.capacity = peak - 1
    assert not kv_accounting.fits(newcomer, 0, 0)
    kv_accounting.capacity = peak
    assert kv_accounting.fits(newcomer, 0, 0)
    assert not kv_accounting.fits(newcomer, 1, 0)
    assert not kv_accounting.fits(newcomer, 0, 1)
    kv_accounting.capacity, kv_accounting.margin = capacity, margin


def nothing_is_left(kv_accounting: KvAccounting) -> None:
    assert (
        kv_accounting.kv == kv_accounting.reads == kv_accounting.decoding == [0, 0, 0]
    )
    assert kv_accounting.num_running == 0
    assert kv_accounting._requests == {}
    assert kv_accounting._overruns == kv_accounting._last_steps == {}
    assert kv_accounting.num_complete == 0
    forecast = kv_accounting._forecast
    assert not any(kv_accounting._growing)
    assert not forecast.sums[:-1].any()  # the last row is for searching the peak
    assert not forecast.short.any()


def new_line(random: Random, page_size: int) -> Known:
    max_decode_steps = random.choice([0, 1, 5, 400])
    request = request_of(
        own=random.randint(1, 40),
        est_decode_steps=min(random.randint(0, 80), max_decode_steps),
        max_decode_steps=max_decode_steps,
        side=random.randrange(3),
    )
    request.input_len = request.own + page_size * random.randint(0, 60)
    length = min(max_decode_steps, random.randint(0, 150))
    return Known(request, length)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 60])
@pytest.mark.parametrize("seed", range(12))
def test_like_sums_over_all(seed: int, page_size: int, mixed: bool) -> None:
    random = Random(seed)
    kv_accounting = KvAccounting(1200, page_size, mixed=mixed)
    kv_accounting.extend_forecast(400)
    running: list[Known] = []
    offloaded: list[Known] = []
    for step in range(400):
        if random.random() < 0.3:
            known = offloaded.pop() if offloaded and random.random() < 0.5 else None
            known = known or new_line(random, page_size)
            kv_accounting.admit(known.request)
            kv_accounting.begin_decoding(known.request)
            known.decoding = known.steps < known.request.max_decode_steps
            running.append(known)
        if random.random() < 0.1 and running:
            known = running.pop(random.randrange(len(running)))
            kv_accounting.remove(known.request)
            assert known.request.steps == known.steps
            offloaded.append(known)
        if random.random() < 0.02 and step > 300:
            kv_accounting.extend_forecast(random.choice([50, 600, 2000]))
        if random.random() < 0.02:
            kv_accounting.widen_margin()
        end_those_that_are_complete(kv_accounting, running)
        check_sums(kv_accounting, running, page_size)
        if step < 300:  # later a bucket has several steps
            check_forecast(kv_accounting, running, random, page_size, mixed=mixed)
        tick(kv_accounting, running)
        check_sums(kv_accounting, running, page_size)
    for known in running:
        kv_accounting.remove(known.request)
    nothing_is_left(kv_accounting)


def end_those_that_are_complete(
    kv_accounting: KvAccounting, running: list[Known]
) -> None:
    for known in [each for each in running if each.steps >= each.length]:
        running.remove(known)
        kv_accounting.remove(known.request)
        assert known.request.steps == known.steps
        kv_accounting.learn_output_len(known.request)


def tick(kv_accounting: KvAccounting, running: list[Known]) -> None:
    before = {id(known.request): known.request.est_decode_steps for known in running}
    rose = kv_accounting.count_decode_step()
    for known in running:
        if known.decoding:
            known.steps += 1
            known.decoding = known.steps < known.request.max_decode_steps
    for request in rose:
        assert (
            before[id(request)] < request.est_decode_steps <= request.max_decode_steps
        )
    for known in running:
        assert known.request.steps_done(kv_accounting.clock) == known.steps
        assert known.steps <= max(
            known.request.est_decode_steps, known.request.max_decode_steps
        )
        if known.decoding:  # nothing outlives its estimate unnoticed
            assert known.steps <= known.request.est_decode_steps


def test_an_outlived_estimate_rises_to_the_most_at_last() -> None:
    kv_accounting = KvAccounting(1000)
    request = request_of(est_decode_steps=2, max_decode_steps=60)
    kv_accounting.admit(request)
    kv_accounting.begin_decoding(request)
    seen = []
    for _ in range(60):
        seen += [each.est_decode_steps for each in kv_accounting.count_decode_step()]
    assert seen == sorted(set(seen))
    assert seen[-1] == request.max_decode_steps
    assert not request.takes_steps(kv_accounting.clock)  # it has all its tokens
    assert kv_accounting.num_complete == 1
    kv_accounting.remove(request)
    nothing_is_left(kv_accounting)


def test_who_leaves_early_leaves_no_event() -> None:
    kv_accounting = KvAccounting(1000)
    requests = [request_of(est_decode_steps=100) for _ in range(3)]
    for request in requests:
        kv_accounting.admit(request)
        kv_accounting.begin_decoding(request)
        kv_accounting.count_decode_step()
    for request in requests:
        kv_accounting.remove(request)
    nothing_is_left(kv_accounting)


def test_a_thousand_ends_cost_what_one_does() -> None:
    """Requests of one length end together. The step before must not take longer."""
    seconds = {}
    for together in (False, True):
        kv_accounting = KvAccounting(10**6)
        for number in range(2000):
            steps = 200 if together else 200 + number
            request = request_of(est_decode_steps=steps, max_decode_steps=steps)
            kv_accounting.admit(request)
            kv_accounting.begin_decoding(request)
        for _ in range(199):
            kv_accounting.count_decode_step()
        started = time.thread_time()
        kv_accounting.count_decode_step()
        seconds[together] = time.thread_time() - started
        assert kv_accounting.num_complete == (2000 if together else 1)
    assert seconds[True] < seconds[False] + 50e-6


def test_covering_more_in_the_middle_keeps_what_runs() -> None:
    kv_accounting = KvAccounting(10_000)
    random = Random(1)
    running = [Known(request_of(own=9, est_decode_steps=40 + i), 99) for i in range(20)]
    for known in running:
        known.request.max_decode_steps = 500
        kv_accounting.admit(known.request)
        kv_accounting.begin_decoding(known.request)
        known.decoding = True
        tick(kv_accounting, running[: running.index(known) + 1])
    for longest in (100, 400, 300):
        kv_accounting.extend_forecast(longest)
        check_forecast(kv_accounting, running, random)
        check_sums(kv_accounting, running)


def test_margin_grows_when_room_ran_out_and_comes_back() -> None:
    kv_accounting = KvAccounting(1000)
    for _ in range(20):
        kv_accounting.widen_margin()
    assert kv_accounting.margin == MARGIN_MAX
    for _ in range(5000):
        kv_accounting.count_decode_step()
    assert kv_accounting.margin == MARGIN_MIN


def test_a_line_that_ran_before_needs_what_its_estimate_says() -> None:
    """Joining again does not raise its estimate, so room for more is not asked."""
    kv_accounting = KvAccounting(1000)
    known = job_of(plan_of([(1, 2)], est_decode_steps=100.0)).done
    known.bias.job.learn(observed=4e6, estimated=1e6)
    request = request_of(own=10, est_decode_steps=100, max_decode_steps=500)
    request.work = known
    assert kv_accounting.corrected_est_decode_steps(request) == 400
    kv_accounting.admit(request)
    assert request.est_decode_steps == 400
    kv_accounting.begin_decoding(request)
    kv_accounting.count_decode_step()
    kv_accounting.remove(request)
    assert kv_accounting.corrected_est_decode_steps(request) == 400
    kv_accounting.admit(request)
    assert request.est_decode_steps == 400


def test_nothing_runs_so_anything_fits() -> None:
    kv_accounting = KvAccounting(10)
    assert kv_accounting.fits(request_of(own=1000), 1000, 1000)
