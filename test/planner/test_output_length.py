"""Output-length estimates: samples, shrunk means, random lengths, over-runners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_batch.errors import InputError
from sglang_batch.planner.output_lengths.estimates import (
    SHRINKAGE,
    OutputLengthEstimator,
    prior_output_len,
)
from sglang_batch.planner.output_lengths.sample import MOST_REPEATED, choose_sample
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, PlanRequests

Job = tuple[PrefixTree, PlanRequests]
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=30)


def job_of(
    prompts: Sequence[Sequence[int]],
    *,
    cap: int | Sequence[int] = 100_000,
    known: Sequence[int] | None = None,
) -> Job:
    n = len(prompts)
    tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    requests = PlanRequests(
        tokens=tokens,
        offsets=offsets,
        max_new_tokens=np.broadcast_to(np.array(cap, np.int32), n),
        known_output_len=np.array([UNKNOWN] * n if known is None else known, np.int32),
    )
    return build_prefix_tree(tokens, offsets), requests


def job_of_tasks(*sizes: int, cap: int = 100_000) -> Job:
    """A task for each size: a prefix of its own, then one token for each request.

    The requests of task 0 come first. All prompts have the same length.
    """
    return job_of([[t, t, i] for t, n in enumerate(sizes) for i in range(n)], cap=cap)


def observed(
    job: Job, lengths: dict[int, int], **options: int
) -> OutputLengthEstimator:
    estimator = OutputLengthEstimator(*job, **options)
    estimator.observe(
        np.array(list(lengths), np.int64), np.array(list(lengths.values()), np.int32)
    )
    return estimator


def means(estimator: OutputLengthEstimator) -> list[float]:
    return estimator.estimates().est_output_len.tolist()


# --- choosing a sample


def test_every_task_gets_its_part() -> None:
    job = job_of_tasks(10_000, 3000, 2000)
    sample = choose_sample(*job, seed=0)
    task = np.searchsorted([10_000, 13_000], sample, side="right")
    assert np.abs(np.bincount(task) - [100, 30, 20]).max() <= 1
    assert len(sample) == 150


def test_a_large_subtree_gets_its_minimum_and_a_small_one_does_not() -> None:
    sample = choose_sample(*job_of_tasks(9000, 300, 40), seed=1)
    task = np.searchsorted([9000, 9300], sample, side="right")
    counts = np.bincount(task, minlength=3)
    assert counts[1] == 5
    assert counts[2] <= 1


def test_the_sample_is_evenly_spaced_inside_a_task() -> None:
    sample = choose_sample(*job_of_tasks(2000), share=0.05, seed=3)
    assert np.ptp(np.diff(sample)) <= 1
    assert len(sample) == 100


def documents(
    count: int, questions: int, prefix: int, own: int, first: Sequence[int] = ()
) -> Job:
    """Documents with as many questions each, which share ``prefix`` tokens."""
    return job_of(
        [
            [*first, *[1000 + d] * prefix, *[10_000 + q] * own, q]
            for d in range(count)
            for q in range(questions)
        ]
    )


def rows_of(sample: NDArray[np.int64]) -> list[int]:
    """Lengths of the rows of neighbours."""
    ends = np.flatnonzero(np.diff(sample) > 1) + 1
    return [len(row) for row in np.split(sample, ends)]


def repeated_share(job: Job, sample: NDArray[np.int64]) -> float:
    """Tokens that are computed twice if the sample runs first and leaves nothing behind,
    but for what all prompts begin with, as a share of the unique ones."""
    tree, requests = job
    first = set(sample.tolist())
    prompts = [
        tuple(requests.tokens[a:b].tolist()) for a, b in pairwise(requests.offsets)
    ]

    def prefixes(numbers: Iterable[int]) -> set[tuple[int, ...]]:
        return {prompts[i][: n + 1] for i in numbers for n in range(len(prompts[i]))}

    rest = prefixes(set(range(len(prompts))) - first)
    of_all = [n for n in range(1, 1 + min(map(len, prompts), default=0))
              if len({prompt[:n] for prompt in prompts}) == 1]  # fmt: skip
    twice = len(prefixes(first) & rest) - (len(of_all) if first and rest else 0)
    return twice / max(tree.num_unique_tokens, 1)


def test_neighbours_are_chosen_where_prefixes_are_dear_to_compute_again() -> None:
    job = documents(100, 20, prefix=50, own=600)
    few = choose_sample(*job, share=0.02, seed=0)
    assert len(few) == len(set(few // 20)) == 40
    assert np.ptp(np.diff(few)) <= 1
    # Eight in a row, and the rows evenly spaced.
    job = documents(100, 20, prefix=50, own=60)
    rows = choose_sample(*job, share=0.02, seed=0)
    assert rows_of(rows) == [8] * 5
    begins = rows[np.flatnonzero(np.diff(rows, prepend=-9) > 1)]
    assert np.ptp(np.diff(begins)) <= 1


def test_whole_families_are_chosen_where_their_prefixes_are_long() -> None:
    job = documents(400, 5, prefix=90, own=2)
    sample = choose_sample(*job, share=0.02, seed=0)
    assert len(sample) >= 40
    assert set(rows_of(sample)) == {5}
    assert repeated_share(job, sample) == 0
    assert np.ptp(np.diff(sample[::5])) <= 5


def test_few_long_families_are_sampled_from_the_first() -> None:
    job = documents(15, 20, prefix=300, own=2)
    sample = choose_sample(*job, seed=0)
    assert sample.tolist() == list(range(20))
    assert repeated_share(job, sample) == 0


@pytest.mark.parametrize("questions", [50, 200])
def test_no_sample_takes_over_a_quarter_of_the_job(questions: int) -> None:
    assert len(choose_sample(*documents(3, questions, 900, 10), seed=0)) == 0


def test_what_all_prompts_begin_with_stays_in_the_cache() -> None:
    plain = documents(300, 1, prefix=9, own=9)
    job = documents(300, 1, prefix=9, own=9, first=[7] * 5000)
    assert len(choose_sample(*job, seed=0)) == 5
    assert (
        choose_sample(*job, seed=0).tolist() == choose_sample(*plain, seed=0).tolist()
    )


FAMILIES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@settings(deadline=None, max_examples=examples(100))
@given(
    FAMILIES,
    st.integers(0, 60),
    st.integers(0, 12),
    st.integers(1, 12),
    st.floats(0.01, 1.0),
    st.integers(0, 99),
    st.booleans(),
)
def test_a_sample_computes_next_to_nothing_twice(
    sizes: list[int],
    prefix: int,
    section: int,
    own: int,
    share: float,
    seed: int,
    shuffled: bool,
) -> None:
    prompts = [
        [500 + d // 3] * section + [d] * prefix + [99 + q] * own
        for d, n in enumerate(sizes)
        for q in range(n)
    ]
    if shuffled:
        order = np.random.default_rng(seed).permutation(len(prompts))
        prompts = [prompts[i] for i in order]
    job = job_of(prompts)
    sample = choose_sample(*job, share=share, seed=seed)
    assert len(set(sample.tolist())) == len(sample)
    assert repeated_share(job, sample) <= MOST_REPEATED
    assert len(sample) <= max(4.5 * share * len(prompts) + 2, 5, len(prompts) / 4)


def test_requests_of_known_length_are_not_sampled() -> None:
    known = [UNKNOWN if i % 10 == 0 else 64 for i in range(1000)]
    job = job_of([[i] for i in range(1000)], known=known)
    sample = choose_sample(*job, share=0.1, seed=0)
    assert len(sample) == 10
    assert (sample % 10 == 0).all()
    none = job_of([[i] for i in range(10)], known=[7] * 10)
    assert choose_sample(*none, seed=0).shape == (0,)


def test_the_seed_decides() -> None:
    job = documents(1000, 1, prefix=0, own=5)
    first, again, other = (choose_sample(*job, seed=seed) for seed in (5, 5, 6))
    assert first.tolist() == again.tolist() != other.tolist()


@settings(deadline=None, max_examples=examples(200))
@given(PROMPTS, st.floats(0.01, 1.0), st.integers(0, 99))
def test_a_sample_is_bounded_and_without_repeats(
    prompts: list[list[int]], share: float, seed: int
) -> None:
    job = job_of(prompts)
    sample = choose_sample(*job, share=share, seed=seed)
    n = len(prompts)
    assert sample.dtype == np.int64
    assert len(set(sample.tolist())) == len(sample)
    assert len(sample) <= max(4.5 * share * n + 2, 1.5 * 5, n / 4)
    assert repeated_share(job, sample) <= MOST_REPEATED
    if share == 1:
        assert len(sample) == n


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "share=0.0"),
        ({"share": 1.5}, "share=1.5"),
    ],
)
def test_unusable_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_sample(*job_of_tasks(3), seed=0, **options)  # type: ignore[arg-type]


# --- estimates


def test_without_answers_the_default_holds() -> None:
    job = job_of([[1], [2], [3]], cap=[1000, 100, 300])
    estimator = OutputLengthEstimator(*job, default_output_len=256)
    assert means(estimator) == [256, 100, 256]
    # Twice the square, as an exponential distribution has it, and capped.
    squares = estimator.estimates().est_output_len_sq.tolist()
    assert squares == [300**2 + 41_072, 100**2, 300**2]


def test_one_subtree_takes_its_mean_shrunk_towards_the_parents() -> None:
    estimator = observed(job_of_tasks(10, 10), {0: 10, 1: 20, 10: 300})
    root = 330 / 3
    first = (10 + 20 + SHRINKAGE * root) / (2 + SHRINKAGE)
    second = (300 + SHRINKAGE * root) / (1 + SHRINKAGE)
    # All prompts have one length, so the bin corrects both tasks by one factor.
    observed_sum = 10 + 20 + 300
    estimated_sum = 2 * first + second
    for task, request in ((first, 5), (second, 15)):
        factor = (observed_sum + SHRINKAGE * task) / (estimated_sum + SHRINKAGE * task)
        assert means(estimator)[request] == pytest.approx(task * factor)
    assert means(estimator)[:2] == [10, 20]


def test_an_unseen_subtree_takes_its_siblings_mean() -> None:
    # Three subjects in one task, and another task with long answers.
    prompts = [[1, s, i] for s in range(3) for i in range(40)]
    prompts += [[2, 7, i] for i in range(120)]
    short = dict.fromkeys(range(80), 2)
    estimator = observed(
        job_of(prompts), {**short, **dict.fromkeys(range(120, 200), 900)}
    )
    assert means(estimator)[85] == pytest.approx(2, abs=25)
    assert means(estimator)[230] == pytest.approx(900, rel=0.03)


def test_both_moments_follow_a_heavy_tail() -> None:
    rng = np.random.default_rng(0)
    lengths = (1 + rng.lognormal(3, 1.5, 4000)).astype(np.int32)
    job = job_of_tasks(4000)
    sample = choose_sample(*job, share=0.5, seed=0)
    estimator = OutputLengthEstimator(*job)
    estimator.observe(sample, lengths[sample])
    rest = np.setdiff1d(np.arange(4000), sample)
    estimates = estimator.estimates()
    mean = np.mean(lengths[sample])
    square = np.mean(lengths[sample].astype(float) ** 2)
    assert estimates.est_output_len[rest] == pytest.approx(mean)
    assert estimates.est_output_len_sq[rest] == pytest.approx(square)
    assert square > 3 * mean**2


def test_the_prompt_length_corrects_inside_a_subtree() -> None:
    # Long prompts, short answers, and nothing shared.
    prompts = [[i, *[7] * (3 if i % 2 else 100)] for i in range(400)]
    lengths = {i: (500 if i % 2 else 50) for i in range(100)}
    estimator = observed(job_of(prompts), lengths)
    assert means(estimator)[399] == pytest.approx(500, rel=0.05)
    assert means(estimator)[398] == pytest.approx(50, rel=0.3)
    unlike_any = observed(job_of([*prompts, [400] * 3000]), lengths)
    assert means(unlike_any)[400] == pytest.approx(275)


@pytest.mark.parametrize(
    ("limits", "known", "prior"),
    [
        ([4000, 2000], [UNKNOWN, UNKNOWN], 256),  # answers rarely fill such limits
        ([30, 60], [UNKNOWN, UNKNOWN], 15),
        ([600, 600], [40, UNKNOWN], 40),
        ([20_000, 20_000], [16_384, UNKNOWN], 256),  # a video, and a chat
        ([1, 1], [UNKNOWN, UNKNOWN], 1),
    ],
)
def test_what_holds_before_the_first_answer(
    limits: list[int], known: list[int], prior: int
) -> None:
    tree, requests = job_of([[1], [2]], cap=limits, known=known)
    assert prior_output_len(requests) == prior
    unknown = known.index(UNKNOWN)
    assert means(OutputLengthEstimator(tree, requests))[unknown] == prior


def test_known_lengths_are_exact_and_teach_nothing() -> None:
    known = [16_384] * 50 + [UNKNOWN] * 50
    estimator = OutputLengthEstimator(*job_of([[i] for i in range(100)], known=known))
    assert means(estimator) == [16_384] * 50 + [256] * 50
    everyone = np.arange(60)
    estimator.observe(everyone, np.array([16_384] * 50 + [20] * 10, np.int32))
    assert means(estimator) == pytest.approx([16_384] * 50 + [20] * 50)
    assert estimator.estimates().est_output_len_sq[0] == 16_384**2


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(InputError, match="-1 tokens"):
        observed(job_of_tasks(3), {0: 5, 1: -1})
    with pytest.raises(InputError, match="default_output_len=0"):
        OutputLengthEstimator(*job_of_tasks(3), default_output_len=0)


@st.composite
def observed_jobs(
    draw: st.DrawFn,
) -> tuple[OutputLengthEstimator, NDArray[np.int64], NDArray[np.int64]]:
    """A job with some answers, its caps, and its known or observed lengths or -1."""
    prompts = draw(PROMPTS)
    n = len(prompts)
    cap = draw(st.lists(st.integers(0, 300), min_size=n, max_size=n))
    exact = [draw(st.one_of(st.just(UNKNOWN), st.integers(0, most))) for most in cap]
    is_known = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    known = [d if k else UNKNOWN for d, k in zip(exact, is_known, strict=True)]
    estimator = observed(
        job_of(prompts, cap=cap, known=known),
        {i: d for i, d in enumerate(exact) if d != UNKNOWN and not is_known[i]},
    )
    return estimator, np.array(cap), np.array(exact)


@settings(deadline=None, max_examples=examples(200))
@given(observed_jobs(), st.integers(0, 9))
def test_estimates_and_draws_keep_to_caps_and_facts(
    case: tuple[OutputLengthEstimator, NDArray[np.int64], NDArray[np.int64]], seed: int
) -> None:
    estimator, cap, exact = case
    estimates = estimator.estimates()
    mean, square = estimates.est_output_len, estimates.est_output_len_sq
    drawn = estimator.draw(seed)
    fact = exact != UNKNOWN
    assert mean[fact].tolist() == drawn[fact].tolist() == exact[fact].tolist()
    for values in (mean, drawn):
        assert (values <= cap).all()
        assert (values >= np.minimum(cap, 1))[~fact].all()
    assert (square >= mean**2).all()
    assert (square <= cap.astype(float) ** 2 + 1e-9).all()
    assert drawn.dtype == np.int32
    assert drawn.tolist() == estimator.draw(seed).tolist()


def test_a_job_without_requests() -> None:
    job = job_of([])
    estimator = OutputLengthEstimator(*job)
    assert choose_sample(*job, seed=0).shape == (0,)
    assert estimator.estimates().est_output_len.shape == (0,)
    assert estimator.draw(0).shape == (0,)


# --- random lengths and over-runners


def test_draws_have_the_spread_of_their_task() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate((np.full(2000, 2), rng.geometric(1 / 400, 2000)))
    job = job_of_tasks(2000, 2000)
    estimator = OutputLengthEstimator(*job)
    sample = choose_sample(*job, share=0.3, seed=0)
    estimator.observe(sample, lengths[sample].astype(np.int32))
    rest = np.setdiff1d(np.arange(4000), sample)
    drawn = estimator.draw(1)
    short, long = drawn[rest[rest < 2000]], drawn[rest[rest >= 2000]]
    assert short.max() <= 4
    estimates = estimator.estimates()
    assert long.mean() == pytest.approx(estimates.est_output_len[3999], rel=0.1)
    square = (long.astype(float) ** 2).mean()
    assert square == pytest.approx(estimates.est_output_len_sq[3999], rel=0.2)


def test_draws_are_scaled_to_the_requests_own_estimate() -> None:
    # Nothing shared. The answers to the long prompts are a tenth of the others.
    prompts = [[i, *[7] * (3 if i % 2 else 100)] for i in range(4000)]
    lengths = {i: (500 if i % 2 else 50) for i in range(200)}
    estimator = observed(job_of(prompts), lengths)
    drawn = estimator.draw(0)[200:]
    estimated = estimator.estimates().est_output_len[200:]
    for parity in (0, 1):
        assert drawn[parity::2].mean() == pytest.approx(estimated[parity], rel=0.05)


def test_draws_outside_of_all_answered_tasks_come_from_the_whole_job() -> None:
    prompts = [[t, t, i] for t in range(2) for i in range(40)]
    prompts += [[2 + i] * 3 for i in range(200)]
    lengths = dict.fromkeys(range(40), 10) | dict.fromkeys(range(40, 80), 500)
    drawn = observed(job_of(prompts), lengths).draw(0)[80:]
    short, long = sorted(set(drawn.tolist()))
    assert long == pytest.approx(50 * short, rel=0.1)
    assert np.mean(drawn == short) == pytest.approx(0.5, abs=0.15)


@pytest.mark.slow
def test_draws_without_answers_have_the_default_moments() -> None:
    drawn = OutputLengthEstimator(*job_of_tasks(20_000)).draw(0).astype(float)
    assert drawn.mean() == pytest.approx(256, rel=0.03)
    assert (drawn**2).mean() == pytest.approx(2 * 256**2, rel=0.08)
