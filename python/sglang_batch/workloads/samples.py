"""Samples of sources: lengths and groups of requests, and their random token ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..planner.compiled import jit
from ..planner.requests import Floats, Int32s, Int64s
from .sources import MAX_INPUT_LEN, VOCAB_SIZE, Source, lognormal_lengths

UInt64s = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Sample:
    """``n`` requests of one source in ``g`` groups, each with one shared prefix.

    group: int64 ``[n]``, 0..g-1.
    prefix_len: int64 ``[g]``, tokens that a group has in common.
    own_len: int64 ``[n]``, prompt tokens after the prefix.
    output_len: int32 ``[n]``.
    instruction_len: number of first tokens of every prefix that all groups share.
    """

    source: Source
    group: Int64s
    prefix_len: Int64s
    own_len: Int64s
    output_len: Int32s
    instruction_len: int = 0

    def __len__(self) -> int:
        return len(self.group)

    @property
    def input_len(self) -> Int64s:
        """Prompt tokens of each request, int64 ``[n]``."""
        return self.prefix_len[self.group] + self.own_len

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, input and output: sum of p + d."""
        return int(self.input_len.sum()) + int(self.output_len.sum(dtype=np.int64))

    @property
    def kv_reads(self) -> float:
        """Tokens of KV that decoding reads: sum of p d + d^2 / 2 (BlendServe 2.3)."""
        output_len = self.output_len.astype(np.float64)
        return float(self.input_len @ output_len + output_len @ output_len / 2)

    @property
    def repeats(self) -> Int64s:
        """Requests of each group after its first, int64 ``[g]``, which save the prefix."""
        sizes = np.bincount(self.group, minlength=len(self.prefix_len))
        return np.maximum(sizes - 1, 0)

    @property
    def saved_tokens(self) -> float:
        """Prompt tokens that a perfect cache saves, without ``instruction_len``."""
        sizes = self.repeats.astype(np.float64) + 1
        by_chance = _shared_by_chance(sizes).sum()
        return float(self.repeats @ self.prefix_len + by_chance)


def draw_sample(source: Source, count: int, rng: np.random.Generator) -> Sample:
    """``count`` requests with the source's lengths, input and output independent.

    Prefixes have the length that gives a large sample the source's sharing ratio. The
    first request of each group computes its prefix, so ``count`` requests in ``g``
    groups share less by a factor of ``1 - g / count``.
    """
    num_groups = min(source.max_groups, -(-count // source.group_size))
    group_size = count / max(num_groups, 1)
    by_chance = float(_shared_by_chance(np.array([group_size]))[0])
    shared = source.sharing * source.tokens_mean - by_chance / max(group_size, 1.0)
    prefix_mean = max(round(shared), 0)
    prefix_len = np.zeros(num_groups, dtype=np.int32)
    if prefix_mean:
        prefix_square = prefix_mean**2 * (1 + source.prefix_cv**2)
        prefix_len = lognormal_lengths(
            num_groups, prefix_mean, prefix_square, 1, MAX_INPUT_LEN
        )
    own_mean = source.input_mean - prefix_mean
    own_square = own_mean**2 * (1 + source.own_cv**2)
    own_len = lognormal_lengths(count, own_mean, own_square, 1, MAX_INPUT_LEN)
    output_len = lognormal_lengths(
        count, source.output_mean, source.output_square, 1, source.max_output_len
    )
    return Sample(
        source,
        np.arange(count) % max(num_groups, 1),
        rng.permutation(prefix_len).astype(np.int64),
        rng.permutation(own_len).astype(np.int64),
        rng.permutation(output_len),
    )


def _shared_by_chance(sizes: Floats) -> Floats:
    """Expected tokens that prompts share because their first own tokens are equal.

    With ids drawn from ``VOCAB_SIZE``, there are fewer possible first tokens than
    300,000 requests after one system prompt. Longer matches are too rare to count.
    """
    distinct: Floats = VOCAB_SIZE * -np.expm1(sizes * np.log1p(-1 / VOCAB_SIZE))
    return sizes - distinct


def offsets_of(lengths: Int32s | Int64s) -> Int64s:
    """The begin of each of ``n`` runs and the end of the last, int64 ``[n + 1]``."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def random_tokens(
    lengths: Int32s | Int64s, keys: Int64s, seeds: np.random.SeedSequence
) -> Int32s:
    """Consecutive runs of random token ids, int32 ``[sum(lengths)]``.

    Run ``k`` has ``lengths[k]`` ids that depend only on ``keys[k]``, their position in
    the run and the seed: of two runs with one key, the shorter is a prefix of the other.
    """
    offsets = offsets_of(lengths)
    tokens = np.empty(int(offsets[-1]), dtype=np.int32)
    seed = seeds.generate_state(1, np.uint64)[0]
    _fill(tokens, offsets, keys.astype(np.uint64), seed)
    return tokens


@jit
def _fill(tokens: Int32s, offsets: Int64s, keys: UInt64s, seed: np.uint64) -> None:
    # A counter through a hash (splitmix64): no state to carry from run to run. The
    # high half of the hash times the vocabulary is an id without a division.
    vocab, half = np.uint64(VOCAB_SIZE), np.uint64(32)
    step = np.uint64(0x9E3779B97F4A7C15)
    for k in range(len(keys)):
        counter = _hash(seed ^ _hash(keys[k] + step))
        for j in range(offsets[k], offsets[k + 1]):
            counter += step
            tokens[j] = ((_hash(counter) >> half) * vocab) >> half


@jit
def _hash(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
