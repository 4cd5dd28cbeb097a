"""The decode clock where a step yields several tokens of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from sglang_batch.planner.admission_rules import kv_forecast
from sglang_batch.scheduling.kv_accounting import (
    MOST_OFF,
    KvAccounting,
    TokenClock,
    taken,
)
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

DRAFT_SLOTS = 12


@dataclass
class Answer:
    """What the clock reads of SGLang's request."""

    rid: str = ""
    output_ids: list[int] = field(default_factory=lambda: [0])


def request_of(length: int, own: int = 10, side: int = 0) -> ScheduledRequest:
    return ScheduledRequest(
        Answer(), leaf=-1, node=0, position=0, input_len=own, own=own,
        max_decode_steps=length, est_decode_steps=length, side=side,
    )  # fmt: skip


def decode(requests: list[ScheduledRequest], random: Random, most: int) -> None:
    """One step, whose drafts are accepted by chance."""
    for request in requests:
        left = request.max_decode_steps - taken(request)
        number = min(left, random.randint(1, most))
        request.req.output_ids += [0] * number


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_follows_what_requests_decode(seed: int, page_size: int) -> None:
    random = Random(seed)
    accounting = KvAccounting(10**6, page_size, mixed=False, draft_slots=DRAFT_SLOTS)
    accounting.extend_forecast(400)
    clock, running = TokenClock(accounting), list[ScheduledRequest]()
    for _ in range(300):
        if random.random() < 0.3:
            own, side = random.randint(1, 40), random.randrange(3)
            request = request_of(random.randint(1, 300), own, side)
            accounting.admit(request)
            accounting.begin_decoding(request)
            running.append(request)
        # Each has a rate of its own, so that some fall far behind the mean.
        for index, request in enumerate(running):
            decode([request], random, 1 + index % 6)
        clock.follow(accounting.count_decode_step)
        for request in [x for x in running if taken(x) >= x.max_decode_steps]:
            running.remove(request)
            clock.ends(request)
            accounting.remove(request)
            assert request.steps == request.max_decode_steps
        check(accounting, running, page_size)
    for request in running:
        clock.ends(request)
        accounting.remove(request)
        assert request.steps == taken(request)
    assert accounting.kv == accounting.reads == accounting.decoding == [0, 0, 0]
    assert accounting.num_running == accounting.num_complete == 0


def check(
    accounting: KvAccounting, running: list[ScheduledRequest], page_size: int
) -> None:
    counted = [request.steps_done(accounting.clock) for request in running]
    for request, steps in zip(running, counted, strict=True):
        assert request.takes_steps(accounting.clock)
        assert abs(steps - taken(request)) <= MOST_OFF
    pages = [
        -(-(request.own + steps + DRAFT_SLOTS) // page_size)
        for request, steps in zip(running, counted, strict=True)
    ]
    assert sum(accounting.kv) == sum(pages) * page_size
    reads = [x.read_len + steps + 1 for x, steps in zip(running, counted, strict=True)]
    assert sum(accounting.reads) == sum(reads)


def test_sum_is_right_though_each_is_off() -> None:
    accounting = KvAccounting(10**6, mixed=False, draft_slots=DRAFT_SLOTS)
    requests = [request_of(100) for _ in range(4)]
    for request in requests:
        accounting.admit(request)
        accounting.begin_decoding(request)
    for number, request in enumerate(requests):  # 1, 2, 3 and 4 tokens: 2.5 on average
        request.req.output_ids += [0] * (number + 1)
    TokenClock(accounting).follow(accounting.count_decode_step)
    assert accounting.clock == 3
    for number, request in enumerate(requests):
        request.req.output_ids += [0] * (number + 1)
    TokenClock(accounting).follow(accounting.count_decode_step)
    assert accounting.clock == 5  # of 20 tokens, 4 requests


def test_admission_leaves_room_for_drafts() -> None:
    def fits(draft_slots: int, capacity: int) -> bool:
        accounting = KvAccounting(capacity, mixed=False, draft_slots=draft_slots)
        accounting.extend_forecast(50)
        first = request_of(20)
        accounting.admit(first)
        accounting.begin_decoding(first)
        return accounting.fits(request_of(20), 0, 0)

    # Each has 10 + 20 tokens at its end. A margin of 1 % stays free.
    assert fits(0, 61) and not fits(0, 60)
    assert fits(DRAFT_SLOTS, 85) and not fits(DRAFT_SLOTS, 84)


def test_forecast_is_one_of_tokens() -> None:
    """What requests hold later does not depend on how many tokens a step yields."""
    peaks = []
    for most in (1, 6):
        accounting = KvAccounting(10**6, mixed=False, draft_slots=DRAFT_SLOTS)
        accounting.extend_forecast(200)
        clock, random = TokenClock(accounting), Random(0)
        requests = [request_of(100 + 20 * number) for number in range(4)]
        for request in requests:
            accounting.admit(request)
            accounting.begin_decoding(request)
        while min(map(taken, requests)) < 60:
            for request in requests:
                number = min(random.randint(1, most), 60 - taken(request))
                request.req.output_ids += [0] * number
            clock.follow(accounting.count_decode_step)
        for request in requests:
            accounting.set_steps(request, taken(request))
        peaks.append(kv_forecast.peak(accounting._forecast, accounting.clock, 50, 70))
    assert peaks[0] == peaks[1]
