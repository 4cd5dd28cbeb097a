"""Which steps are timed, and how many are kept."""

from __future__ import annotations

import pytest

from sglang_batch.planner.costs.step_costs import StepSample
from sglang_batch.scheduling.step_record import PER_KIND, KeptSamples, StepSamples


def step(tokens: int, rows: int = 0) -> StepSample:
    return StepSample(0.0, tokens, int(tokens > 0), rows, 0, 0, 0, 10 * rows)


def seconds(found: list[StepSample]) -> dict[float, float]:
    return {sample.prompt_tokens: sample.seconds for sample in found}


def test_a_step_takes_until_the_next_one() -> None:
    samples = StepSamples(late=False)
    for now, tokens in ((10.0, 1), (11.0, 2), (13.0, 4), (17.0, 8)):
        samples.begin(now, step(tokens))
    assert seconds(samples.take()) == {1: 1.0, 2: 2.0, 4: 4.0}


def test_where_steps_are_scheduled_ahead_the_time_is_of_the_step_before() -> None:
    samples = StepSamples(late=True)
    for now, tokens in ((10.0, 1), (11.0, 2), (13.0, 4), (17.0, 8)):
        samples.begin(now, step(tokens))
    # From 11 to 13 the first step ran while the second one was scheduled.
    assert seconds(samples.take()) == {1: 2.0, 2: 4.0}


@pytest.mark.parametrize("late", [False, True])
def test_times_around_other_steps_and_idle_times_are_nobodys(late: bool) -> None:
    samples = StepSamples(late=late)
    samples.begin(0.0, step(1))
    samples.begin(1.0, None)
    samples.begin(9.0, step(2))
    samples.begin(10.0, None)
    samples.begin(19.0, step(4))
    samples.idle()
    samples.begin(1000.0, step(8))
    samples.begin(1001.0, step(16))
    samples.begin(1002.0, step(32))
    samples.begin(1003.0, step(64))
    found = seconds(samples.take())
    assert set(found.values()) == {1.0}
    assert 4 not in found
    assert 8 in found


@pytest.mark.parametrize("late", [False, True])
def test_arrivals_and_ends_count_in_the_time_that_they_take(late: bool) -> None:
    samples = StepSamples(late=late)
    for now, tokens, changes in ((0.0, 1, 9.0), (1.0, 2, 0.0), (3.0, 4, 1.5)):
        samples.begin(now, step(tokens), changes)
    found = {sample.seconds: sample.requests for sample in samples.take()}
    assert found == ({2.0: 1.5} if late else {1.0: 0.0, 2.0: 1.5})


def test_the_last_steps_of_a_kind_are_kept() -> None:
    kept = KeptSamples(
        StepSample(float(i), 100, 1, 0, 0, 0, 0, 0) for i in range(3 * PER_KIND)
    )
    kept.add(StepSample(1.0, 0, 0, 5, 0, 0, 0, 50))
    found = kept.samples
    assert len(found) == PER_KIND + 1
    times = [sample.seconds for sample in found if sample.prompts]
    assert times == [float(i) for i in range(2 * PER_KIND, 3 * PER_KIND)]


def test_what_was_taken_is_not_taken_again() -> None:
    samples = StepSamples(late=False)
    samples.begin(0.0, step(1))
    samples.begin(1.0, step(2))
    assert len(samples.take()) == 1
    samples.begin(3.0, step(4))
    assert seconds(samples.take()) == {2: 2.0}
