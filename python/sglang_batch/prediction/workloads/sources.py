"""The request sources that workloads are mixed from, and samples of their requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ...planner.compiled import jit
from ...planner.requests import Floats, Int32s, Int64s, sums_before

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
    """``count`` requests with the source's lengths, input and output independent. Prefixes have the
    length that gives a large sample the source's sharing ratio."""
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
    """Expected tokens that prompts share because their first own tokens are equal. There are fewer
    ids than requests after one system prompt; longer matches are too rare to count."""
    distinct: Floats = VOCAB_SIZE * -np.expm1(sizes * np.log1p(-1 / VOCAB_SIZE))
    return sizes - distinct


def random_tokens(
    lengths: Int32s | Int64s, keys: Int64s, seeds: np.random.SeedSequence
) -> Int32s:
    """Consecutive runs of random token ids, int32 ``[sum(lengths)]``: run ``k`` has
    ``lengths[k]`` ids that depend only on ``keys[k]``, their position in the run and the
    seed."""
    offsets = sums_before(lengths)
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


# The request sources that workloads are mixed from, by their published statistics.
#
# Averages, sharing ratios and densities of the traces are those of BlendServe (ASPLOS'26,
# Fig. 2 and appendix A.1, Table 3). E[d^2] follows from those densities on an A100 with
# independent input and output lengths. ``AZURE_CONV``, ``ARXIV`` and the output lengths of
# ``SHAREGPT`` have the moments of the open files (Azure LLM 2023, Vidur, NanoFlow).
# Only those three publish the spread of their input lengths. For the others ``own_cv`` is
# an assumption, which does not affect the density.

VOCAB_SIZE = 128_256
"""Token ids are below this, as with Llama 3."""

MAX_INPUT_LEN = 32_768
"""Most tokens of a generated prompt, without its shared prefix."""


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of requests, with lognormal lengths in tokens.

    input_mean: mean input length, shared prefix included.
    own_cv: coefficient of variation of the part of a prompt after its shared prefix.
    output_mean, output_square: E[d] and E[d^2] of the output length.
    sharing: share of all its tokens, input and output, that a perfect prefix cache saves.
    max_output_len: longest output, and ``max_new_tokens`` of the requests.
    max_groups, group_size: most distinct shared prefixes, and requests for each.
    prefix_cv: coefficient of variation of the lengths of the shared prefixes.
    fixed_output: whether output lengths are known beforehand.
    """

    name: str
    input_mean: float
    own_cv: float
    output_mean: float
    output_square: float
    sharing: float
    max_output_len: int = 4096
    max_groups: int = 1
    group_size: int = 1
    prefix_cv: float = 0.0
    fixed_output: bool = False

    @property
    def tokens_mean(self) -> float:
        """Mean tokens of a request, input and output: p + d."""
        return self.input_mean + self.output_mean

    @property
    def kv_reads_mean(self) -> float:
        """Mean tokens of KV that decoding a request reads: E[p d] + E[d^2] / 2."""
        return self.input_mean * self.output_mean + self.output_square / 2


BURSTGPT = Source("BurstGPT", 244, 1.2, 27, 10_656, sharing=0.02)
AZURE_CONV = Source("Azure-conv", 1154.7, 0.96, 211.1, 71_132, sharing=0.0)
ARXIV = Source("arXiv", 2588, 0.37, 291.4, 366_875, sharing=0.0)
SHAREGPT = Source("ShareGPT", 298.8, 4.24, 323.7, 190_631, sharing=0.02)
OPENVID = Source(
    "OpenVid",
    121,
    0.5,
    16_384,
    5.23e8,
    sharing=0.0,
    max_output_len=131_072,
    fixed_output=True,
)
# 57 subjects with 14,042 questions, each subject with its own few-shot examples.
MMLU = Source(
    "MMLU",
    804,
    0.6,
    2,
    4,
    sharing=0.8646,
    max_output_len=16,
    max_groups=57,
    group_size=246,
    prefix_cv=0.3,
)


def lognormal_lengths(
    count: int, mean: float, square: float, low: int, high: int
) -> Int32s:
    """``count`` ascending lengths, int32, with E[x] = ``mean`` and E[x^2] = ``square``.

    The lengths are the mid-quantiles of a lognormal, one per stratum of equal probability, rounded
    and clipped to ``[low, high]``. Its two parameters are refitted until the lengths themselves
    have the requested moments, so that a few hundred lengths of a heavy tail have the load of the
    distribution. A sample too small for its spread (``square / mean**2`` near ``count``) only
    keeps the mean. Without spread all lengths are the mean, whatever the range.
    """
    target_ratio = square / mean**2
    if count == 0 or target_ratio <= 1.0:
        return np.full(count, round(mean), dtype=np.int32)
    half = (count + 1) // 2
    shares = ((np.arange(half) + 0.5) / count).tolist()
    lower = np.fromiter(map(NormalDist().inv_cdf, shares), np.float64, half)
    quantiles = np.concatenate([lower, -lower[: count - half][::-1]])
    variance = math.log(target_ratio)
    # Limits the search if no spread reaches the second moment.
    max_variance = 2.5 * variance
    shift = math.log(mean) - variance / 2
    for _ in range(60):
        lengths = np.exp(shift + math.sqrt(variance) * quantiles)
        lengths = np.clip(np.rint(lengths), low, high)
        sample_mean = float(lengths.mean())
        ratio = float(lengths @ lengths) / count / sample_mean**2
        if abs(sample_mean / mean - 1) < 1e-4 and abs(ratio / target_ratio - 1) < 1e-4:
            break
        # For the distribution itself log(ratio) is the variance and the mean is
        # proportional to exp(shift), so each step corrects the remaining error.
        change = min(math.log(target_ratio / ratio), max_variance - variance)
        change = max(change, -variance / 2)
        variance += change
        shift += math.log(mean / sample_mean) - change / 2
    return lengths.astype(np.int32)
