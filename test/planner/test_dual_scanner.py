"""The dual scanner against the paper's examples, and at the edges of its inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.planner.admission_rules.dual_scanner import (
    ScanBudgets,
    ScanState,
    budgets,
    full_step,
    split_kv,
    steady_prefill_tokens,
)

STATE = ScanState(
    kv_capacity=60_000,
    kv_used=60_000,
    left_density=3.73,
    right_density=0.096,
    left_open=True,
    right_open=True,
    target_density=1.27,
    decode_tokens=100,
    kv_read_time_s=0.02,
    full_read_time_s=0.03,
    weight_read_time_s=0.0,
    interference_exponent=1.47,
    left_reads=0,
    right_reads=0,
    token_time_s=5e-5,
    prompt_token_time_s=5e-5,
    pace=1.0,
)
densities = st.one_of(
    st.sampled_from([0.0, 0.096, 1.0, 1.27, 3.73, math.inf]), st.floats(0, 1e9)
)


def scan(**changes: Any) -> ScanBudgets:
    return budgets(STATE._replace(**changes))


def test_split_of_the_papers_example() -> None:
    # 60 GB between requests of density 3.73 and 0.096: 19.3 and 40.7 GB.
    left, right = split_kv(60.0, 3.73, 0.096, 1.27)
    assert left == pytest.approx(19.3, abs=0.1)
    assert right == pytest.approx(40.7, abs=0.1)
    assert (left * 3.73 + right * 0.096) / 60 == pytest.approx(1.27)


@pytest.mark.parametrize(
    ("left", "right", "target", "expected"),
    [
        (2.0, 2.0, 2.0, (60.0, 0.0)),
        (2.0, 2.0, 9.0, (60.0, 0.0)),
        (0.0, 0.0, 0.0, (60.0, 0.0)),
        (math.inf, math.inf, 1.0, (60.0, 0.0)),
        (5.0, 1.0, 7.0, (60.0, 0.0)),
        (5.0, 1.0, 5.0, (60.0, 0.0)),
        (5.0, 1.0, 0.5, (0.0, 60.0)),
        (5.0, 1.0, 1.0, (0.0, 60.0)),
        (5.0, 1.0, math.inf, (60.0, 0.0)),
        # Any of the left is too much.
        (math.inf, 1.0, 2.0, (0.0, 60.0)),
        (3.0, 0.0, 1.0, (20.0, 40.0)),
        # The plan went by other densities than those found.
        (1.0, 3.0, 2.0, (60.0, 0.0)),
    ],
)
def test_split_at_the_edges(
    left: float, right: float, target: float, expected: tuple[float, float]
) -> None:
    assert split_kv(60.0, left, right, target) == pytest.approx(expected)


@settings(deadline=None)
@given(densities, densities, densities)
def test_a_split_is_the_whole(left: float, right: float, target: float) -> None:
    shares = split_kv(60.0, left, right, target)
    assert all(0 <= share <= 60 for share in shares)
    assert sum(shares) == pytest.approx(60)
    if right < target < left < math.inf:
        blended = (shares[0] * left + shares[1] * right) / 60
        assert blended == pytest.approx(target, rel=1e-6)


def test_steady_prefill_tokens() -> None:
    # 1000 tokens hold 10 requests of 80 + 40/2 on average. One of four steps ends one,
    # for which 80 prompt tokens are computed.
    assert steady_prefill_tokens(1000.0, 80.0, 40.0) == pytest.approx(20.0)
    assert steady_prefill_tokens(1000.0, 80.0, 20.0) == pytest.approx(1000 / 90 * 4)
    assert steady_prefill_tokens(1000.0, 0.0, 20.0) == 0
    # Nothing is generated: every step can fill all of the KV with prompts.
    assert steady_prefill_tokens(1000.0, 80.0, 0.0) == 1000


def test_a_step_is_brought_to_the_target_density() -> None:
    # 0.02 s of reads ask for 0.0254 s of compute: 508 tokens, 100 of them decodes.
    assert scan().prefill_tokens == pytest.approx(408, abs=1)
    assert scan(decode_tokens=508).prefill_tokens in (0, 1)
    assert scan(decode_tokens=5000).prefill_tokens == 0
    left, right = scan()[:2]
    assert (left, right) == pytest.approx((19_384, 40_616), abs=2)


def test_attention_counts_with_the_prompt_tokens_and_not_with_the_decodes() -> None:
    # Next to the decodes there is time for 408 tokens.
    dear = scan(prompt_token_time_s=2 * STATE.token_time_s)
    assert dear.prefill_tokens == pytest.approx(204, abs=1)


@pytest.mark.parametrize(
    ("changes", "fills"),
    [
        ({}, False),
        # By itself the left side stays below the target, and the right is not let in.
        ({"target_density": 3.73}, True),
        ({"right_density": 3.0}, True),
        ({"left_open": False}, True),
        ({"right_open": False}, True),
        # Somebody still decodes there, to go slow for.
        ({"right_open": False, "right_reads": 1}, False),
    ],
)
def test_half_empty_kv_is_filled_where_there_is_nothing_to_blend(
    changes: dict[str, Any], fills: bool
) -> None:
    # Nothing is read, so that no prompts would be computed for the blend.
    empty = {"kv_read_time_s": 0.0, "decode_tokens": 0, **changes}
    found = scan(kv_used=20_000, **empty)
    assert (found.prefill_tokens > 0) == fills == (found.right_reads == 10**18)
    assert scan(kv_used=40_000, **empty).prefill_tokens == 0


@pytest.mark.parametrize(
    ("target", "weights_s", "k", "expected"),
    [
        # Nothing is lost by more steps: only the density counts.
        (1.0, 0.0, 1.47, 1.6),
        (5.0, 0.0, 1.47, 0.4),
        (5.0, 0.0, 1.0, 0.4),
        (0.5, 0.0, 1.47, 5.35),
        (math.inf, 0.0, 1.47, 0.35),
        # One after the other: uneven steps take no longer, and every step reads weights.
        (5.0, 0.01, 1.0, 1e9),
        # Reads of weights are hidden behind compute.
        (5.0, 0.01, math.inf, 0.4),
        # Compute is hidden behind reads.
        (0.5, 0.03, math.inf, math.sqrt(1 / (0.025 * 0.5))),
    ],
)
def test_the_size_to_which_steps_grow(
    target: float, weights_s: float, k: float, expected: float
) -> None:
    assert full_step(target, 0.03, weights_s, k) == pytest.approx(expected)


def test_steps_grow_more_the_longer_weights_take() -> None:
    shares = [full_step(3.0, 0.03, w, 1.47) for w in (0.0, 1e-4, 1e-3, 0.01, 0.1)]
    assert shares[0] == shares[1] < shares[2] < shares[3] < shares[4]
    # Weights over the share, and unevenness times the share, are equal at the best one.
    felt = (1 + 3**1.47) ** -(0.47 / 1.47)
    uneven = 0.025 * (1 - 1 / 1.47) * 3
    assert shares[3] == pytest.approx(math.sqrt(felt * 0.01 / 0.03 / uneven))


def test_prompt_tokens_do_not_grow_with_reads_beyond_a_full_step() -> None:
    # 0.4 of 0.03 s of reads ask for 0.06 s of compute: 1,200 tokens, 100 of them decodes.
    share_s = 0.4 * 0.03
    for read_time_s in (share_s, 0.02, 1.0):
        found = scan(kv_read_time_s=read_time_s, target_density=5.0)
        assert found.prefill_tokens == pytest.approx(1100, abs=1)
        # Half of that step is always allowed, however little is read.
        assert found.least_tokens == pytest.approx(600, abs=1)
    fewer = scan(kv_read_time_s=0.9 * share_s, target_density=5.0)
    assert fewer.prefill_tokens == pytest.approx(0.9 * 1200 - 100, abs=1)
    # With weights to read, as much as a full KV cache asks for.
    heavy = scan(weight_read_time_s=0.01)
    assert heavy.least_tokens == pytest.approx(1.27 * 0.03 / 5e-5, abs=1)


def test_a_side_that_has_nothing_waiting_leaves_all_to_the_other() -> None:
    assert scan(right_open=False)[:2] == (60_000, 0)
    assert scan(left_open=False)[:2] == (0, 60_000)
    assert sum(scan(left_open=False, right_open=False)[:2]) == 60_000


@settings(deadline=None)
@given(
    st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0.01, 100), st.integers(0, 10_000)
)
def test_more_memory_time_never_gives_fewer_prompt_tokens(
    first: float, second: float, target: float, decodes: int
) -> None:
    low, high = sorted([first, second])
    fewer = scan(kv_read_time_s=low, target_density=target, decode_tokens=decodes)
    more = scan(kv_read_time_s=high, target_density=target, decode_tokens=decodes)
    assert fewer.prefill_tokens <= more.prefill_tokens
    assert fewer[:2] == more[:2]


@settings(deadline=None, max_examples=examples(200))
@given(
    densities,
    densities,
    densities,
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 1e-9, 0.02, 1e12]),
    st.sampled_from([0, 1, 60_000, 10**12]),
)
def test_budgets_are_whole_numbers_within_bounds(
    left: float,
    right: float,
    target: float,
    left_open: bool,
    right_open: bool,
    kv_read_time_s: float,
    left_reads: int,
) -> None:
    found = scan(
        left_density=left,
        right_density=right,
        target_density=target,
        left_open=left_open,
        right_open=right_open,
        kv_read_time_s=kv_read_time_s,
        left_reads=left_reads,
    )
    assert all(isinstance(value, int) for value in found)
    assert 59_999 <= found.left_kv + found.right_kv <= 60_000
    assert min(found) >= 0
    assert found.prefill_tokens <= 10**9


def test_arithmetic_that_takes_no_time() -> None:
    assert scan(token_time_s=0.0).prefill_tokens == 10**9
