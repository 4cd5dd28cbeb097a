"""Running requests as censored observations: by hand, and against simulated lengths."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest

from sglang_batch.planner.output_lengths.estimates import (
    OutputLengthEstimator,
    completed,
    mean_excess,
)
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, PlanRequests


def expected(
    lengths: list[int], running: list[bool], default: float = 100.0
) -> list[float]:
    mean, _ = completed(np.array(lengths), np.array(running), default)
    return [round(each, 6) for each in mean.tolist()]


def test_complete_answers_are_what_they_are() -> None:
    mean, square = completed(np.array([3, 1, 2]), np.zeros(3, bool), 9.0)
    assert mean.tolist() == [3, 1, 2]
    assert square.tolist() == [9, 1, 4]


def test_a_running_one_has_the_mean_of_all_longer_ones() -> None:
    assert expected([10, 20, 30, 15], [False, False, False, True]) == [10, 20, 30, 25]
    # Of equal lengths, it is longer.
    assert expected([20, 20, 40], [True, False, False]) == [40, 20, 40]
    # The one with 12 tokens has 20, 30 or what the one with 25 will have: 30.
    running = [False, True, False, True, False]
    assert expected([10, 12, 20, 25, 30], running) == [10, 26.666667, 20, 30, 30]


def test_beyond_the_last_answer_it_is_expected_to_run_on() -> None:
    # Above the median of 20 one answer ended, and 10 + 30 tokens were spent.
    assert expected([10, 20, 30, 50], [False] * 3 + [True])[-1] == 50 + 40
    # All answers are equal: their length is the mean.
    assert expected([8, 8, 9], [False, False, True])[-1] == 9 + (8 + 8 + 9) / 2
    assert expected([5, 7], [True, True], 100.0) == [105, 107]
    _, square = completed(np.array([5]), np.array([True]), 100.0)
    assert square[0] == 5**2 + 2 * 5 * 100 + 2 * 100**2


def kaplan_meier(lengths: list[int], running: list[bool]) -> float:
    """The mean of the product-limit estimate, with the last observation an answer."""
    alive, mean = Fraction(1), Fraction(0)
    for at in sorted({n for n, runs in zip(lengths, running, strict=True) if not runs}):
        at_risk = sum(each >= at for each in lengths)
        ends = sum(
            n == at and not runs for n, runs in zip(lengths, running, strict=True)
        )
        mean += alive * Fraction(ends, at_risk) * at
        alive *= 1 - Fraction(ends, at_risk)
    assert alive == 0
    return float(mean)


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_is_that_of_kaplan_and_meier(seed: int) -> None:
    random = Random(seed)
    lengths = [random.randint(1, 30) for _ in range(random.randint(2, 40))]
    running = [random.random() < 0.5 for _ in lengths]
    lengths.append(31)
    running.append(False)
    mean, _ = completed(np.array(lengths), np.array(running), 1.0)
    assert mean.mean() == pytest.approx(kaplan_meier(lengths, running))


@pytest.mark.parametrize("shape", ["exponential", "lognormal", "uniform"])
@pytest.mark.parametrize("ended", [0.4, 0.7])
def test_lengths_are_found_while_the_long_ones_run(shape: str, ended: float) -> None:
    """2,000 requests that began at different times, of which some have ended."""
    rng = np.random.default_rng(7)
    n = 2000
    true = {
        "exponential": rng.exponential(200.0, n),
        "lognormal": rng.lognormal(5.0, 0.5, n),
        "uniform": rng.uniform(50.0, 350.0, n),
    }[shape]
    length = np.maximum(np.rint(true), 1).astype(np.int64)
    age = rng.uniform(0.0, 2.0, n) * np.quantile(length, ended)
    so_far = np.minimum(length, age.astype(np.int64))
    running = so_far < length
    of_ended = length[~running].mean()
    mean, square = completed(so_far, running, 1.0)
    # The mean of the answers that have ended is far off.
    assert of_ended < 0.9 * length.mean()
    assert abs(mean.mean() / length.mean() - 1) < 0.08
    assert abs(square.mean() / (length**2.0).mean() - 1) < 0.3


def test_the_excess_of_exponential_lengths_is_their_mean() -> None:
    rng = np.random.default_rng(3)
    length, limit = rng.exponential(50.0, 4000), rng.exponential(80.0, 4000)
    ended = length <= limit
    found = mean_excess(length[ended], limit[~ended], 1.0)
    assert found == pytest.approx(50.0, rel=0.1)
    assert mean_excess(np.zeros(0), limit, 7.0) == 7.0


def requests_of(prompts: list[list[int]], most: int) -> PlanRequests:
    return PlanRequests(
        tokens=np.concatenate(prompts).astype(np.int32),
        offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        max_new_tokens=np.full(len(prompts), most, np.int32),
        known_output_len=np.full(len(prompts), UNKNOWN, np.int32),
    )


def test_estimates_of_a_job_learn_from_what_runs() -> None:
    """Half of a subtree's requests still run, with more tokens than all that ended."""
    prompts = [[family, i] for family in (1, 2) for i in range(100)]
    requests = requests_of(prompts, 1000)
    estimator = OutputLengthEstimator(
        build_prefix_tree(requests.tokens, requests.offsets), requests
    )
    ended = np.r_[0:40, 100:180]
    running = np.arange(40, 80)
    estimator.observe(ended, np.full(len(ended), 20, np.int32))
    without = estimator.estimates().est_output_len
    estimator.observe_running(running, np.full(len(running), 60, np.int32))
    estimates = estimator.estimates()
    assert abs(without[90] - 20) < 1
    # Of 80 requests 40 had 20 tokens and 40 have more than 60.
    assert estimates.est_output_len[90] > 45
    assert abs(estimates.est_output_len[190] - 20) < 3
    assert (estimates.est_output_len[running] > 60).all()
    assert (estimates.est_output_len[ended] == 20).all()
    assert (estimates.est_output_len_sq >= estimates.est_output_len**2).all()
    # They have ended meanwhile.
    estimator.observe(running, np.full(len(running), 70, np.int32))
    assert (estimator.estimates().est_output_len[running] == 70).all()
