"""The order of a job, against sorted() and against a tree of dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_batch.planner import make_order, optimal_prefix_sharing_ratio

# Few distinct tokens, so that prompts share prefixes and repeat; ids beyond one and
# two bytes, so that an order of bytes that is not the order of ids shows.
TOKEN_IDS = st.sampled_from([0, 1, 2, 255, 256, 65_535, 65_536, 2**31 - 1])
PROMPTS = st.lists(st.lists(TOKEN_IDS, max_size=6), max_size=25)


def as_arrays(
    prompts: Sequence[Sequence[int]],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    return tokens, offsets


def trie_sharing_ratio(prompts: Sequence[Sequence[int]]) -> float:
    root: dict[int, Any] = {}
    num_nodes = 0
    for prompt in prompts:
        node = root
        for token in prompt:
            num_nodes += token not in node
            node = node.setdefault(token, {})
    num_tokens = sum(map(len, prompts))
    return 1 - num_nodes / num_tokens if num_tokens else 0.0


@settings(deadline=None)
@given(PROMPTS)
def test_dfs_is_the_stable_sort_of_the_token_lists(prompts: list[list[int]]) -> None:
    order = make_order(*as_arrays(prompts), "dfs")
    # sorted() is stable: equal prompts stay in input order.
    assert order.tolist() == sorted(range(len(prompts)), key=prompts.__getitem__)
    assert order.dtype == np.int64


@settings(deadline=None)
@given(PROMPTS)
def test_dfs_keeps_the_requests_below_a_prefix_together(
    prompts: list[list[int]],
) -> None:
    ordered = [prompts[i] for i in make_order(*as_arrays(prompts), "dfs")]
    for length in range(1, 7):
        seen: list[list[int]] = []
        for prompt in ordered:
            prefix = prompt[:length]
            if len(prefix) == length and (not seen or seen[-1] != prefix):
                assert prefix not in seen
                seen.append(prefix)


@settings(deadline=None)
@given(PROMPTS)
def test_fcfs_is_the_order_of_the_input(prompts: list[list[int]]) -> None:
    order = make_order(*as_arrays(prompts), "fcfs")
    assert order.tolist() == list(range(len(prompts)))
    assert order.dtype == np.int64


@settings(deadline=None)
@given(PROMPTS)
def test_sharing_ratio_is_what_a_trie_saves(prompts: list[list[int]]) -> None:
    ratio = optimal_prefix_sharing_ratio(*as_arrays(prompts))
    assert ratio == pytest.approx(trie_sharing_ratio(prompts))


@settings(deadline=None)
@given(PROMPTS, st.randoms(use_true_random=False))
def test_sharing_ratio_does_not_depend_on_the_input_order(
    prompts: list[list[int]], random: Any
) -> None:
    shuffled = random.sample(prompts, len(prompts))
    assert optimal_prefix_sharing_ratio(
        *as_arrays(shuffled)
    ) == optimal_prefix_sharing_ratio(*as_arrays(prompts))


@pytest.mark.parametrize("policy", ["dfs", "fcfs"])
def test_a_job_without_requests_has_an_empty_order(policy: str) -> None:
    order = make_order(*as_arrays([]), policy)
    assert order.shape == (0,)
    assert order.dtype == np.int64


@pytest.mark.parametrize("prompts", [[], [[]], [[], [], []]])
def test_a_job_without_tokens_shares_nothing(prompts: list[list[int]]) -> None:
    assert optimal_prefix_sharing_ratio(*as_arrays(prompts)) == 0.0


def test_empty_prompts_come_first_in_input_order() -> None:
    prompts = [[5], [], [1, 2], []]
    assert make_order(*as_arrays(prompts), "dfs").tolist() == [1, 3, 2, 0]


def test_equal_prompts_cost_their_tokens_once() -> None:
    assert optimal_prefix_sharing_ratio(*as_arrays([[7, 8]] * 4)) == 0.75


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'random'"):
        make_order(*as_arrays([[1]]), "random")
