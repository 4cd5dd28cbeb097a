"""Questions on long documents: long prompts that share most of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_batch.errors import ConfigError
from sglang_batch.planner.requests import (
    UNKNOWN,
    Floats,
    Int64s,
    PlanRequests,
    sums_before,
)
from sglang_batch.prediction.workloads.mix import Workload, seeds_of
from sglang_batch.prediction.workloads.sources import (
    lognormal_lengths,
    random_tokens,
)

SHORTEST, LONGEST = 10_000, 100_000
"""Fewest and most tokens of a prompt."""

MAX_OUTPUT_LEN = 4096
_SPREAD = 1.0  # squared coefficient of variation of lengths and of group sizes


def documents(
    num_requests: int,
    seed: int,
    *,
    density: float,
    sharing: float,
    groups: Sequence[int],
    input_mean: float,
    token_time_s: float,
    kv_read_time_s: float,
    output_spread: float = 1.0,
) -> Workload:
    """Prompts of 10,000 to 100,000 tokens that share prefixes of several levels.

    Every group of a level, such as a document, belongs to a random group of the level
    above, such as a collection, and has a prefix of its own after that of the group
    above. Lengths and group sizes are lognormal, and no part of a prompt takes more than
    its share of the longest. Half the spread of the output lengths is that of the last
    level's groups: some documents have long answers.

    Args:
        density: compute time over memory time of the job, every prefix computed once.
        sharing: share of the prompt tokens that a perfect cache saves.
        groups: numbers of groups by level, the largest last.
        input_mean: mean prompt tokens.
        output_spread: variance over squared mean of the output lengths.

    Raises:
        ConfigError: there are no requests or no groups, or the prompts cannot share so
            much in so many groups.
    """
    if num_requests < 1 or not groups or min(groups) < 1:
        raise ConfigError(
            f"{num_requests} requests in {list(groups)} groups; each must be 1 or more."
        )
    name = f"documents:{num_requests}:{density:g}:{sharing:g}:{list(groups)}"
    seeds = seeds_of(seed, name)
    rng = np.random.default_rng(seeds)
    lengths, keys, group = _prompts(num_requests, sharing, groups, input_mean, rng)
    sigma = np.sqrt(np.log1p(output_spread) / 2.0)
    factor = np.exp(sigma * rng.standard_normal(groups[-1]))[group]
    output = factor * np.exp(sigma * rng.standard_normal(num_requests))
    input_len = lengths.sum(axis=1)
    unique = lengths[:, -1].sum() + _once(lengths, keys)
    tokens_per_read = density * kv_read_time_s / token_time_s
    output_len = _meet_density(input_len, output, float(unique), tokens_per_read)
    return Workload(
        PlanRequests(
            random_tokens(lengths.ravel(), keys.ravel(), seeds),
            sums_before(input_len),
            np.full(num_requests, MAX_OUTPUT_LEN, np.int32),
            np.full(num_requests, UNKNOWN, np.int32),
        ),
        output_len.astype(np.int32),
        name,
    )


def _prompts(
    num_requests: int,
    sharing: float,
    groups: Sequence[int],
    input_mean: float,
    rng: np.random.Generator,
) -> tuple[Int64s, Int64s, Int64s]:
    """Lengths and keys of the parts of every prompt, and its group of the last level.

    The parts are int64 ``[n, levels + 1]``, the last one a request's own.
    """
    levels = len(groups)
    member = np.empty((num_requests, levels), np.int64)
    member[:, -1] = _members(num_requests, groups[-1], rng)
    for level in range(levels - 2, -1, -1):
        above = _members(groups[level + 1], groups[level], rng)
        member[:, level] = above[member[:, level + 1]]
    shape = np.ones((num_requests, levels + 1))
    for level, number in enumerate(groups):
        sizes = _lognormal(number, rng)
        shape[:, level] = sizes[member[:, level]]
    shape[:, -1] = _lognormal(num_requests, rng)
    first_key = np.cumsum([0, *groups])
    keys = np.column_stack([member, np.arange(num_requests)]) + first_key
    # Prefixes and own parts are scaled to the mean and the sharing, both linear.
    prefix, own = float(shape[:, :-1].sum()), float(shape[:, -1].sum())
    saved, total = prefix - _once(shape, keys), num_requests * input_mean
    scale = sharing * total / max(saved, 1e-9)
    rest = (total - scale * prefix) / own
    if rest <= 0:
        raise ConfigError(
            f"sharing={sharing:g} is not possible with {list(groups)} groups of "
            f"{num_requests} requests; use fewer groups."
        )
    shape[:, :-1] *= scale
    shape[:, -1] *= rest
    lengths = np.clip(np.rint(shape), 1, LONGEST // (levels + 1)).astype(np.int64)
    missing = SHORTEST - lengths.sum(axis=1)
    lengths[:, -1] += np.maximum(missing, 0)
    return lengths, keys, member[:, -1]


def _members(num_members: int, num_groups: int, rng: np.random.Generator) -> Int64s:
    """A group for each member, uneven in size."""
    weights = _lognormal(num_groups, rng)
    return rng.choice(num_groups, num_members, p=weights / weights.sum())


def _lognormal(count: int, rng: np.random.Generator) -> Floats:
    """Random positive factors, stratified, with mean 1."""
    values = lognormal_lengths(count, 1e4, 1e8 * (1 + _SPREAD), 1, 1 << 30)
    return rng.permutation(values / values.mean())


def _once(lengths: Floats | Int64s, keys: Int64s) -> float:
    """The sum of all prefixes, each counted once."""
    total = 0.0
    for level in range(lengths.shape[1] - 1):
        _, first = np.unique(keys[:, level], return_index=True)
        total += float(lengths[first, level].sum())
    return total


def _meet_density(
    input_len: Int64s, output: Floats, unique: float, tokens_per_read: float
) -> Int64s:
    """Output lengths in proportion to ``output`` that meet a ratio of tokens to reads."""
    low, high = 0.0, float(MAX_OUTPUT_LEN)
    for _ in range(50):
        middle = (low + high) / 2
        lengths = np.clip(np.rint(output * middle), 1, MAX_OUTPUT_LEN)
        reads = float(input_len @ lengths + lengths @ lengths / 2)
        if unique + float(lengths.sum()) > tokens_per_read * reads:
            low = middle
        else:
            high = middle
    return np.clip(np.rint(output * low), 1, MAX_OUTPUT_LEN).astype(np.int64)
