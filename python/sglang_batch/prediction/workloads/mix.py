"""Synthetic jobs with the true output lengths, to plan, simulate and measure on.

Every result is a function of its arguments: the same seed gives the same workload. The
lengths of a source are stratified (:func:`.sources.lognormal_lengths`), so the seed
changes which request has which length and token ids, but hardly the sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ...errors import ConfigError
from ...planner.compiled import jit
from ...planner.requests import (
    UNKNOWN,
    Int32s,
    Int64s,
    PlanRequests,
    sums_before,
)
from .sources import (
    BURSTGPT,
    MAX_INPUT_LEN,
    MMLU,
    OPENVID,
    Sample,
    Source,
    draw_sample,
    lognormal_lengths,
    random_tokens,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A job of ``n`` requests with their true output lengths.

    output_len: int32 ``[n]``, which only the engine finds out: no policy may use them.
    """

    requests: PlanRequests
    output_len: Int32s
    name: str

    def __len__(self) -> int:
        return len(self.output_len)


def shared_prefix_groups(
    num_requests: int,
    prefix_len: int,
    distinct_len: int,
    sharing_degree: int,
    output_len: int,
    seed: int,
) -> Workload:
    """BatchLLM's microbenchmark (section 6.1): fixed lengths, equal groups.

    ``sharing_degree`` requests share a prefix of ``prefix_len`` tokens and have
    ``distinct_len`` tokens of their own. If it does not divide ``num_requests``, groups
    are as equal as possible and none is larger.

    Raises:
        ConfigError: a length or count is not positive.
    """
    sizes = (num_requests, prefix_len, distinct_len, sharing_degree, output_len)
    if min(sizes) < 1:
        raise ConfigError(f"Counts and lengths are {sizes}; each must be 1 or more.")
    input_len = prefix_len + distinct_len
    name = f"{prefix_len}/{distinct_len}/{output_len},degree={sharing_degree}"
    source = Source(
        name,
        input_len,
        0.0,
        output_len,
        output_len**2,
        sharing=prefix_len / (input_len + output_len),
        max_output_len=output_len,
        fixed_output=True,
    )
    num_groups = -(-num_requests // sharing_degree)
    sample = Sample(
        source,
        np.arange(num_requests) % num_groups,
        np.full(num_groups, prefix_len, dtype=np.int64),
        np.full(num_requests, distinct_len, dtype=np.int64),
        np.full(num_requests, output_len, dtype=np.int32),
    )
    return assemble([sample], name, seeds_of(seed, name))


def industry(num_requests: int = 8000, seed: int = 0) -> Workload:
    """Like BatchLLM's industry workload (section 6.2.2): snippets of documents.

    All requests share a short instruction. The queries on a document share about 1,570
    tokens of instruction and document, and a query has about 30 tokens. A document has
    1 + Poisson(1.45) queries, so that a cache saves 58 % of the prompt tokens, as published. The
    spread of the lengths, the instruction's 20 tokens and the 100 output tokens are assumed.

    Raises:
        ConfigError: ``num_requests`` is not positive.
    """
    if num_requests < 1:
        raise ConfigError(f"num_requests={num_requests} must be 1 or more.")
    seeds = seeds_of(seed, "industry")
    rng = np.random.default_rng(seeds)
    sizes = 1 + rng.poisson(1.45, num_requests)
    group = np.repeat(np.arange(num_requests), sizes)[:num_requests]
    prefix_len = lognormal_lengths(
        int(group[-1]) + 1, 1570, 1570**2 * 1.25, 64, MAX_INPUT_LEN
    )
    sample = Sample(
        Source("industry", 1600, 0.5, 100, 12_500, sharing=0.58, max_output_len=512),
        group,
        rng.permutation(prefix_len).astype(np.int64),
        rng.permutation(
            lognormal_lengths(num_requests, 30, 30**2 * 1.25, 1, 512)
        ).astype(np.int64),
        rng.permutation(lognormal_lengths(num_requests, 100, 12_500, 1, 512)),
        instruction_len=20,
    )
    name = f"industry:{num_requests}"
    return assemble([sample], name, seeds, known=False)


def combine(workloads: Sequence[Workload], seed: int) -> Workload:
    """All requests of several workloads, shuffled into one. Prompts are not changed.

    Raises:
        ConfigError: there are no workloads.
    """
    if not workloads:
        raise ConfigError("There are no workloads to combine; give one or more.")
    lengths = np.concatenate([np.diff(each.requests.offsets) for each in workloads])
    order = np.random.default_rng(seed).permutation(len(lengths))
    offsets = sums_before(lengths[order])
    begin = np.empty(len(lengths), dtype=np.int64)
    begin[order] = offsets[:-1]
    tokens = np.empty(int(offsets[-1]), dtype=np.int32)
    first = 0
    for each in workloads:
        place = begin[first : first + len(each)]
        _scatter(each.requests.tokens, each.requests.offsets, tokens, place)
        first += len(each)

    def joined(parts: Iterable[Int32s]) -> Int32s:
        return np.concatenate(list(parts))[order]

    requests = PlanRequests(
        tokens,
        offsets,
        joined(each.requests.max_new_tokens for each in workloads),
        joined(each.requests.known_output_len for each in workloads),
    )
    return Workload(
        requests,
        joined(each.output_len for each in workloads),
        "+".join(each.name for each in workloads),
    )


def seeds_of(seed: int, name: str) -> np.random.SeedSequence:
    """The random seed of a workload. The name keeps equal seeds from sharing prompts."""
    return np.random.SeedSequence([seed, zlib.crc32(name.encode())])


def assemble(
    samples: Sequence[Sample],
    name: str,
    seeds: np.random.SeedSequence,
    *,
    known: bool = True,
) -> Workload:
    """The workload of several samples, shuffled, with prompts of random token ids.

    A prompt is instruction, prefix and own part, each generated from a key. All
    requests of a sample have the key of its instruction, and all requests of a group
    that of its prefix.

    Args:
        known: whether ``known_output_len`` has the lengths of sources with
            ``fixed_output``.
    """
    num_requests = sum(len(sample) for sample in samples)
    lengths = np.empty((num_requests, 3), dtype=np.int64)
    keys = np.empty((num_requests, 3), dtype=np.int64)
    first, first_key = 0, 0
    for sample in samples:
        rows = slice(first, first + len(sample))
        prefix_len = sample.prefix_len[sample.group] - sample.instruction_len
        lengths[rows, 0] = sample.instruction_len
        lengths[rows, 1] = prefix_len
        lengths[rows, 2] = sample.own_len
        keys[rows, 0] = first_key
        keys[rows, 1] = first_key + 1 + sample.group
        first_own = first_key + 1 + len(sample.prefix_len)
        first_key = first_own + len(sample)
        keys[rows, 2] = np.arange(first_own, first_key)
        first += len(sample)
    output_len = np.concatenate([sample.output_len for sample in samples])
    sizes = [len(sample) for sample in samples]
    caps = np.repeat([each.source.max_output_len for each in samples], sizes)
    fixed = np.repeat([known and each.source.fixed_output for each in samples], sizes)
    order = np.random.default_rng(seeds.spawn(1)[0]).permutation(num_requests)
    lengths, keys = lengths[order], keys[order]
    output_len, fixed = output_len[order], fixed[order]
    requests = PlanRequests(
        random_tokens(lengths.ravel(), keys.ravel(), seeds),
        sums_before(lengths.sum(axis=1)),
        np.where(fixed, output_len, caps[order].astype(np.int32)),
        np.where(fixed, output_len, np.int32(UNKNOWN)),
    )
    return Workload(requests, output_len, name)


@jit
def _scatter(tokens: Int32s, offsets: Int64s, out: Int32s, begin: Int64s) -> None:
    for i in range(len(begin)):
        length = offsets[i + 1] - offsets[i]
        out[begin[i] : begin[i] + length] = tokens[offsets[i] : offsets[i + 1]]


# BlendServe's recipe for jobs with a given compute density and prefix sharing ratio.


def blend_counts(
    density: float,
    sharing: float,
    num_requests: int,
    token_time_s: float,
    kv_read_time_s: float,
) -> dict[Source, int]:
    """The number of requests of each source for a density and a sharing ratio.

    BlendServe A.1: a compute-intensive and a memory-intensive trace set the density,
    and MMLU adds sharing. Both targets are linear in the counts ``n``, where t is the
    tokens p + d and m the KV reads p d + d^2 / 2 of a request of each source:

    - sum n t sharing_of_source = sharing sum n t
    - (1 - sharing) token_time_s sum n t = density kv_read_time_s sum n m

    Raises:
        ConfigError: the sources cannot be mixed to these targets, or ``num_requests``
            is too small for one request of the memory-intensive source.
    """
    sources = (BURSTGPT, OPENVID, MMLU)
    most = max(source.sharing for source in sources)
    if not (density > 0 and 0 <= sharing <= most):
        raise ConfigError(
            f"density={density:g} with sharing={sharing:g} cannot be mixed: density"
            f" must be above 0 and sharing 0 to {most:g}."
        )
    tokens = np.array([source.tokens_mean for source in sources])
    excess_shared = tokens * (np.array([each.sharing for each in sources]) - sharing)
    compute_s = (1 - sharing) * token_time_s * tokens
    memory_s = kv_read_time_s * np.array([each.kv_reads_mean for each in sources])
    equations = np.stack([np.ones(3), excess_shared, compute_s - density * memory_s])
    shares = np.linalg.solve(equations, [1.0, 0.0, 0.0])
    if shares.min() < 0 or shares[1] == 0:
        names = ", ".join(source.name for source in sources)
        # Density is monotone along the line of mixes with this sharing, at whose ends one
        # source has no requests.
        densities = []
        for i, j in combinations(range(3), 2):
            # Weights that cancel, of equal sign if the two sources can be mixed at all.
            a, b = excess_shared[j], -excess_shared[i]
            if a * b >= 0 and (a or b):
                compute = a * compute_s[i] + b * compute_s[j]
                densities.append(compute / (a * memory_s[i] + b * memory_s[j]))
        raise ConfigError(
            f"density={density:g} with sharing={sharing:g} cannot be mixed from"
            f" {names}: at this sharing the density can be {min(densities):.3g} to"
            f" {max(densities):.3g}."
        )
    memory_count = round(shares[1] * num_requests)
    if memory_count < 1:
        raise ConfigError(
            f"num_requests={num_requests} holds no {OPENVID.name} request at"
            f" density={density:g}; use {round(0.5 / shares[1]) + 1} or more."
        )
    mmlu_count = round(shares[2] * num_requests)
    compute_count = num_requests - memory_count - mmlu_count
    return {BURSTGPT: compute_count, OPENVID: memory_count, MMLU: mmlu_count}


def blend(
    density: float,
    sharing: float,
    num_requests: int,
    seed: int,
    token_time_s: float,
    kv_read_time_s: float,
) -> Workload:
    """A job with a root compute density and a prefix sharing ratio (BlendServe A.1).

    Counts are those of :func:`blend_counts`. Then the lengths of MMLU's prefixes and of
    the memory-intensive source's outputs are scaled to correct for the rounding of counts and
    lengths. The job meets both targets within 1 %.

    Args:
        density: compute time over memory time of the whole job, where compute time
            counts a shared prefix once.
        sharing: share of all tokens, input and output, that a perfect cache saves.
        token_time_s, kv_read_time_s: compute time of one token, and of reading one token of KV.

    Raises:
        ConfigError: as for :func:`blend_counts`, or ``num_requests`` is too small.
    """
    counts = blend_counts(density, sharing, num_requests, token_time_s, kv_read_time_s)
    name = f"density={density:g},sharing={sharing:g},requests={num_requests}"
    seeds = seeds_of(seed, name)
    rng = np.random.default_rng(seeds)
    samples = [draw_sample(source, count, rng) for source, count in counts.items()]
    tokens_per_read = density * kv_read_time_s / token_time_s / (1 - sharing)
    for _ in range(4):  # the two targets move each other a little
        samples[2] = _meet_sharing(samples, sharing)
        samples[1] = _meet_density(samples, tokens_per_read)
    num_tokens, reads, saved = _totals(samples)
    if abs(num_tokens / reads / tokens_per_read - 1) > 0.01 or abs(
        saved / num_tokens - sharing
    ) > max(0.01 * sharing, 5e-4):
        raise ConfigError(
            f"num_requests={num_requests} is too small for density={density:g} with"
            f" sharing={sharing:g}; use more."
        )
    return assemble(samples, name, seeds)


def _totals(samples: Sequence[Sample]) -> tuple[int, float, float]:
    """Tokens, KV reads, and tokens saved by a perfect cache, of all samples."""
    return (
        sum(sample.num_tokens for sample in samples),
        sum(sample.kv_reads for sample in samples),
        sum(sample.saved_tokens for sample in samples),
    )


def _meet_sharing(samples: Sequence[Sample], sharing: float) -> Sample:
    """The last sample, its prefixes scaled so that the samples have the sharing ratio."""
    sample = samples[-1]
    num_tokens, _, saved = _totals(samples)
    # Scaling the prefixes by 1 + x adds x * total to the tokens and x * repeated to the
    # saved tokens.
    repeated = float(sample.repeats @ sample.prefix_len)
    total = float(sample.prefix_len[sample.group].sum())
    gain = repeated - sharing * total
    if gain <= 0:
        return sample
    scale = 1 + (sharing * num_tokens - saved) / gain
    prefix_len = np.rint(sample.prefix_len * np.clip(scale, 0.5, 2.0))
    return replace(sample, prefix_len=prefix_len.astype(np.int64))


def _meet_density(samples: Sequence[Sample], tokens_per_read: float) -> Sample:
    """The second sample, its outputs scaled for a ratio of tokens to KV reads."""
    sample = samples[1]
    rest_tokens, rest_reads, _ = _totals([samples[0], *samples[2:]])

    def scaled(scale: float) -> Sample:
        output_len = np.rint(sample.output_len * scale)
        output_len = np.clip(output_len, 1, sample.source.max_output_len)
        return replace(sample, output_len=output_len.astype(np.int32))

    # Reads grow faster than tokens, so the ratio falls with the scale.
    low, high = 0.25, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        candidate = scaled(middle)
        tokens = rest_tokens + candidate.num_tokens
        if tokens > tokens_per_read * (rest_reads + candidate.kv_reads):
            low = middle
        else:
            high = middle
    return scaled(low)
