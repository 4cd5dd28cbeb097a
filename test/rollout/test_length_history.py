"""Lengths of answers, learnt over the steps of a training run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.planner.output_lengths.estimates import OutputLengthEstimator
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.rollout import GroupResult, LengthHistory, RolloutGroup, SampleResult


def result(*lengths: int) -> GroupResult:
    """A group with answers of these lengths, negative for those that were aborted."""
    samples = [
        SampleResult(
            index=i,
            status="finished" if length > 0 else "aborted",
            output_ids=[1] * abs(length),
        )
        for i, length in enumerate(lengths)
    ]
    return GroupResult(index=0, id=None, status="", input_ids=None, samples=samples)


def test_a_prompt_is_expected_to_be_answered_as_before() -> None:
    history = LengthHistory(keep=4)
    known, other = RolloutGroup(input_ids=[1, 2]), RolloutGroup(text="x")
    assert history.expected(known) is None
    history.observe(known, result(10, 20))
    assert history.expected(known) == 15
    history.observe(known, result(100, 100, 100, 100))
    assert history.expected(known) == 100
    assert history.expected(other) is None
    own = RolloutGroup(input_ids=[1, 2], expected_tokens=3)
    asked = [each.expected_tokens for each in history.expecting([known, other, own])]
    assert asked == [100, None, 3]


def test_answers_that_were_aborted_count_as_longer() -> None:
    history, group = LengthHistory(), RolloutGroup(id="a", text="x")
    history.observe(group, result(10, 40, -10, -10))
    assert history.expected(group) == pytest.approx((10 + 3 * 40) / 4)
    only_aborted = RolloutGroup(id="b", text="x")
    history.observe(only_aborted, result(-30))
    assert (history.expected(only_aborted) or 0) > 30


def test_what_was_learnt_survives_a_checkpoint_and_is_bounded() -> None:
    history = LengthHistory(most_prompts=2)
    groups = [RolloutGroup(id=i, text="x") for i in range(3)]
    for group in groups:
        history.observe(group, result(7))
    again = LengthHistory(most_prompts=2)
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert [again.expected(group) for group in groups] == [None, 7, 7]
    with pytest.raises(ConfigError, match="keep=0 must be 1 or more"):
        LengthHistory(keep=0)


def test_estimates_are_what_was_expected_times_how_much_answers_differ() -> None:
    prompts = np.arange(40, dtype=np.int32)
    offsets = np.arange(0, 41, 2)
    expected = np.repeat([100, UNKNOWN], 10).astype(np.int32)
    expected[0] = 400
    requests = PlanRequests(
        prompts,
        offsets,
        max_new_tokens=np.full(20, 1000, np.int32),
        known_output_len=np.full(20, UNKNOWN, np.int32),
        expected_output_len=expected,
    )
    assert requests.without_estimate.tolist() == [False] * 10 + [True] * 10
    estimator = OutputLengthEstimator(build_prefix_tree(prompts, offsets), requests)
    first = estimator.estimates().est_output_len
    assert first[:10].tolist() == [400] + [100] * 9
    assert first[10:].tolist() == [256] * 10
    # Answers are twice as long as expected.
    estimator.observe(np.arange(1, 10), np.full(9, 200, np.int32))
    later = estimator.estimates()
    assert 600 < later.est_output_len[0] < 800
    assert (later.est_output_len_sq >= later.est_output_len**2).all()
