"""How far estimates were off lately: sums that forget, by job and by subtree."""

from __future__ import annotations

import pytest
from plan_leaves import leaves_of
from scheduling_jobs import Prompt, arrive_all, job_of, plan_of, request_of

from sglang_batch.scheduling.job_work import (
    BIAS_MAX,
    HALF_LIFE,
    LengthBias,
    LengthSums,
    subtrees,
)
from sglang_batch.scheduling.kv_accounting import KvAccounting


def run(
    kv_accounting: KvAccounting,
    bias: LengthBias,
    steps: int,
    *,
    est: int = 20,
    most: int = 1000,
    subtree: int = 0,
) -> None:
    """A request runs alone and takes ``steps`` decode steps."""
    request = request_of(est_decode_steps=est, max_decode_steps=most)
    request.bias, request.subtree = bias, subtree
    kv_accounting._online_bias = bias
    kv_accounting.admit(request)
    kv_accounting.begin_decoding(request)
    for _ in range(steps):
        kv_accounting.count_decode_step()
    kv_accounting.remove(request)
    kv_accounting.learn_output_len(request)


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_estimates_that_were_too_low_raise_the_next(ratio: int) -> None:
    kv_accounting, bias = KvAccounting(10**6), LengthBias()
    for _ in range(3 * HALF_LIFE):
        run(kv_accounting, bias, 20 * ratio)
    factor = bias.factor(request_of(est_decode_steps=20))
    assert 0.9 * ratio <= factor <= 1.01 * ratio


def test_known_lengths_say_nothing_of_estimates() -> None:
    kv_accounting, bias = KvAccounting(10**6), LengthBias()
    for _ in range(50):
        run(kv_accounting, bias, 20, est=20, most=20)
    assert bias.job == LengthSums()


def test_longer_answers_are_noticed_within_tens_of_lines() -> None:
    """After any number of answers of half the estimate, they are five times longer."""
    kv_accounting, bias = KvAccounting(10**6), LengthBias()
    for _ in range(2000):
        run(kv_accounting, bias, 10)
    request = request_of(est_decode_steps=20)
    assert bias.factor(request) == 1.0
    lines = 0
    while bias.factor(request) < 0.8 * 101 / 21:
        run(kv_accounting, bias, 100)
        lines += 1
    # 20 lines at half, the others at five times the estimate.
    assert lines <= 80


def test_a_request_that_outlives_its_estimate_counts_before_it_ends() -> None:
    kv_accounting, bias = KvAccounting(10**6), LengthBias()
    requests = [request_of(est_decode_steps=20) for _ in range(16)]
    kv_accounting._online_bias = bias
    for request in requests:
        kv_accounting.admit(request)
        kv_accounting.begin_decoding(request)
    for _ in range(100):
        kv_accounting.count_decode_step()
    assert bias.factor(request_of(est_decode_steps=20)) > 3.5
    assert bias.job.learnt == 16
    for request in requests:
        kv_accounting.remove(request)
        kv_accounting.learn_output_len(request)
    assert bias.job.learnt == 16
    # Corrected to the lengths at the end: 101 tokens for 21 each.
    assert bias.job.observed / bias.job.estimated == pytest.approx(101 / 21)


def test_a_correction_counts_as_much_as_what_it_corrects() -> None:
    sums, right = LengthSums(), LengthSums()
    sums.learn(40, 20)
    right.learn(70, 20)
    for _ in range(10):
        sums.learn(20, 20)
        right.learn(20, 20)
    sums.correct(30, 1)
    assert sums.observed == pytest.approx(right.observed)


def test_a_subtree_has_sums_of_its_own() -> None:
    kv_accounting, bias = KvAccounting(10**6), LengthBias()
    for _ in range(200):
        run(kv_accounting, bias, 20, subtree=1)
        run(kv_accounting, bias, 80, subtree=2)
    long, short = request_of(est_decode_steps=20), request_of(est_decode_steps=20)
    short.subtree, long.subtree = 1, 2
    assert bias.factor(short) < 1.4 < 2.2 < bias.factor(request_of(own=1)) < 2.8
    assert 3.3 < bias.factor(long) < BIAS_MAX
    unseen = request_of(est_decode_steps=20)
    unseen.subtree = 3
    assert bias.factor(unseen) == bias.factor(request_of(est_decode_steps=20))


def test_subtrees_are_the_smallest_that_are_large() -> None:
    prompts: list[Prompt] = [(1, 5, i) for i in range(70)]
    prompts += [(1, 6, i) for i in range(3)] + [(2, i) for i in range(9)]
    plan = plan_of(prompts)
    root = subtrees(plan.parent, plan.leaf_begin, plan.leaf_end)
    of = [int(root[plan.node[leaves_of(plan)[i]]]) for i in (0, 70, 73)]
    sizes = plan.leaf_end - plan.leaf_begin
    assert sizes[of[0]] == 70
    assert sizes[of[1]] == 73
    assert of[2] == 0


def test_a_new_plan_starts_anew_and_what_runs_does_not_count() -> None:
    prompts = [(1, 2, i) for i in range(4)]
    job = job_of(plan_of(prompts))
    kv_accounting = KvAccounting(10**6)

    first, *_ = arrive_all(job)
    job.backlog.remove(first)
    job.done.start(first, 0, None)
    kv_accounting.admit(first)
    kv_accounting.begin_decoding(first)
    job.replan(plan_of(prompts, est_decode_steps=40.0))
    for _ in range(60):
        kv_accounting.count_decode_step()
    kv_accounting.remove(first)
    kv_accounting.learn_output_len(first)
    assert job.done.bias.job == LengthSums()
