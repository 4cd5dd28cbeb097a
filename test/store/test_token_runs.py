"""Runs of prompts on disk, and the buckets that their parts make up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.errors import InputError, StoreError, StoreWriteError
from sglang_batch.store.token_runs import BucketRuns, RunArrays, RunWriter, TokenRun

PROMPTS = [[5, 6, 7], [], [2**31 - 1], [1, 2], [3]]


def arrays_of(prompts: list[list[int]], first: int = 0) -> RunArrays:
    return RunArrays(
        np.array([t for prompt in prompts for t in prompt], np.int32),
        np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        np.arange(first, first + len(prompts), dtype=np.int32),
        np.arange(first, first + len(prompts), dtype=np.int32) - 9,
    )


def assert_equal(found: RunArrays, expected: RunArrays) -> None:
    for name, mine, theirs in zip(RunArrays._fields, found, expected, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert mine.tolist() == theirs.tolist(), name


@pytest.fixture
def run(tmp_path: Path) -> TokenRun:
    with RunWriter(tmp_path / "job") as writer:
        writer.append(arrays_of(PROMPTS[:2]))
        writer.append(arrays_of([], 2))
        writer.append(arrays_of(PROMPTS[2:], 2))
    return TokenRun(tmp_path / "job")


def test_any_range_of_a_run_is_read(run: TokenRun) -> None:
    assert len(run) == 5
    for begin in range(6):
        for end in range(begin, 6):
            assert_equal(run.read(begin, end), arrays_of(PROMPTS[begin:end], begin))


def test_single_prompts_are_read(run: TokenRun) -> None:
    tokens, offsets = run.prompts(np.array([4, 1, 0]))
    assert tokens.tolist() == [3, 5, 6, 7] and tokens.dtype == np.int32
    assert offsets.tolist() == [0, 1, 1, 4]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (100, [(0, 5)]),
        (3, [(0, 2), (2, 4), (4, 5)]),
        (2, [(0, 1), (1, 3), (3, 4), (4, 5)]),
        (1, [(0, 1), (1, 3), (3, 4), (4, 5)]),
    ],
)
def test_ranges_have_at_most_so_many_tokens(
    run: TokenRun, most: int, expected: list[tuple[int, int]]
) -> None:
    assert list(run.ranges(0, 5, most)) == expected
    assert list(run.ranges(2, 2, most)) == []


def test_a_run_is_not_written_over(run: TokenRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists"):
        RunWriter(tmp_path / "job")
    with pytest.raises(StoreError, match="has no run"):
        TokenRun(tmp_path)


def save(runs: BucketRuns, first: int, buckets: list[list[int]]) -> None:
    """A range whose requests have these numbers, by bucket, and themselves as prompts."""
    numbers = [number for bucket in buckets for number in bucket]
    begin = np.cumsum([0, *map(len, buckets)])
    runs.save(first, arrays_of([[n] for n in numbers]), np.array(numbers, int), begin)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 12)))
def test_a_bucket_is_its_parts_in_the_order_of_the_job(
    tmp_path_factory: pytest.TempPathFactory, bucket: list[int], cuts: list[int]
) -> None:
    runs = BucketRuns(tmp_path_factory.mktemp("runs"))
    edges = sorted({0, len(bucket), *(min(cut, len(bucket)) for cut in cuts)})
    # The ranges are dealt in any order.
    for begin, end in reversed(list(pairwise(edges))):
        save(
            runs,
            begin,
            [[i for i in range(begin, end) if bucket[i] == b] for b in range(3)],
        )
    runs.check(len(bucket))
    for b in range(3):
        arrays, numbers = runs.read(b)
        assert numbers.tolist() == [i for i, each in enumerate(bucket) if each == b]
        assert arrays.tokens.tolist() == numbers.tolist()
        assert arrays.offsets.tolist() == list(range(len(numbers) + 1))
        assert (
            len(arrays.max_new_tokens) == len(arrays.known_output_len) == len(numbers)
        )


def test_ranges_that_are_missing_or_twice_are_found(tmp_path: Path) -> None:
    runs = BucketRuns(tmp_path)
    save(runs, 0, [[0, 1]])
    save(runs, 4, [[4]])
    with pytest.raises(StoreError, match="request 4, the range before it ends with 1"):
        runs.check(5)
    save(runs, 2, [[2, 3, 4]])
    with pytest.raises(StoreError, match="begins with request 4"):
        runs.check(5)
    # The same range again replaces it.
    save(runs, 2, [[2, 3]])
    runs.check(5)
    with pytest.raises(StoreError, match="has 5 of the job's 6 requests"):
        runs.check(6)


def test_a_range_that_cannot_be_written_is_no_part(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreWriteError, match="cannot be written"):
        save(BucketRuns(tmp_path / "file"), 0, [[0]])


def test_orders_are_kept(tmp_path: Path) -> None:
    runs = BucketRuns(tmp_path)
    save(runs, 0, [[0, 1, 2], []])
    runs.save_order(0, np.array([2, 0, 1]))
    runs.save_order(1, np.zeros(0, np.int64))
    assert runs.order(0).tolist() == [2, 0, 1]
    assert runs.order(1).tolist() == []
    runs.check(3)
