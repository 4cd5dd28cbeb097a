"""Synthetic jobs with the true output lengths, to plan, simulate and measure on.

Every result is a function of its arguments: the same seed gives the same workload. The
lengths of a source are stratified (:func:`.sources.lognormal_lengths`), so the seed
changes which request has which length and token ids, but hardly the sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..planner.compiled import jit
from ..planner.requests import UNKNOWN, Int32s, Int64s, PlanRequests
from .samples import Sample, draw_sample, offsets_of, random_tokens
from .sources import MAX_INPUT_LEN, Source, lognormal_lengths

Int16s = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Workload:
    """A job of ``n`` requests with their true output lengths.

    output_len: int32 ``[n]``, which only the engine finds out: no policy may use them.
    source: int16 ``[n]``, the index of each request's source in ``source_names``.
    """

    requests: PlanRequests
    output_len: Int32s
    source: Int16s
    source_names: tuple[str, ...]
    name: str

    def __len__(self) -> int:
        return len(self.output_len)


def mix(
    counts: Mapping[Source, int], seed: int, *, shuffle: bool = True, known: bool = True
) -> Workload:
    """``counts[source]`` requests of every source, shuffled unless ``shuffle=False``.

    With ``known``, the output lengths of sources with ``fixed_output`` are in
    ``requests.known_output_len``.

    Raises:
        ConfigError: a count is negative, or there are no requests at all.
    """
    for source, count in counts.items():
        if count < 0:
            raise ConfigError(f"{source.name}: {count} requests; use 0 or more.")
    if not sum(counts.values()):
        raise ConfigError("The workload has no requests; give a source a count.")
    name = "+".join(f"{source.name}:{count}" for source, count in counts.items())
    seeds = seeds_of(seed, name)
    rng = np.random.default_rng(seeds)
    samples = [draw_sample(source, count, rng) for source, count in counts.items()]
    return assemble(samples, name, seeds, shuffle=shuffle, known=known)


def shared_prefix_groups(
    num_requests: int,
    prefix_len: int,
    distinct_len: int,
    sharing_degree: int,
    output_len: int,
    seed: int,
    *,
    shuffle: bool = True,
    known: bool = True,
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
    return assemble([sample], name, seeds_of(seed, name), shuffle=shuffle, known=known)


def industry(
    num_requests: int = 8000, seed: int = 0, *, shuffle: bool = True
) -> Workload:
    """Like BatchLLM's industry workload (section 6.2.2): snippets of documents.

    All requests share a short instruction. The queries on a document share about 1,570
    tokens of instruction and document, and a query has about 30 tokens. A document has
    1 + Poisson(1.45) queries. The group of a request thus has about 3 requests, itself
    included, and a cache saves 58 % of the prompt tokens, both as published. The spread
    of the lengths, the instruction's 20 tokens and the 100 output tokens are assumed.

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
    return assemble([sample], name, seeds, shuffle=shuffle, known=False)


def combine(workloads: Sequence[Workload], seed: int) -> Workload:
    """All requests of several workloads, shuffled into one.

    Sources of the same name become one. Prompts are not changed: two workloads share
    prefixes if they did before.

    Raises:
        ConfigError: there are no workloads.
    """
    if not workloads:
        raise ConfigError("There are no workloads to combine; give one or more.")
    lengths = np.concatenate([np.diff(each.requests.offsets) for each in workloads])
    order = np.random.default_rng(seed).permutation(len(lengths))
    offsets = offsets_of(lengths[order])
    begin = np.empty(len(lengths), dtype=np.int64)
    begin[order] = offsets[:-1]
    tokens = np.empty(int(offsets[-1]), dtype=np.int32)
    names = tuple(dict.fromkeys(n for each in workloads for n in each.source_names))
    sources, first = [], 0
    for each in workloads:
        place = begin[first : first + len(each)]
        _scatter(each.requests.tokens, each.requests.offsets, tokens, place)
        index = np.array([names.index(n) for n in each.source_names], dtype=np.int16)
        sources.append(index[each.source])
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
        np.concatenate(sources)[order],
        names,
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
    shuffle: bool,
    known: bool,
) -> Workload:
    """The workload of several samples, with prompts of random token ids.

    A prompt is instruction, prefix and own part, each generated from a key. All
    requests of a sample have the key of its instruction, and all requests of a group
    that of its prefix.
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
    source = np.repeat(
        np.arange(len(samples), dtype=np.int16), [len(sample) for sample in samples]
    )
    if shuffle:
        order = np.random.default_rng(seeds.spawn(1)[0]).permutation(num_requests)
        lengths, keys = lengths[order], keys[order]
        output_len, source = output_len[order], source[order]
    caps = np.array([each.source.max_output_len for each in samples], dtype=np.int32)
    fixed = np.array([known and each.source.fixed_output for each in samples])
    known_output_len = np.where(fixed[source], output_len, np.int32(UNKNOWN))
    requests = PlanRequests(
        random_tokens(lengths.ravel(), keys.ravel(), seeds),
        offsets_of(lengths.sum(axis=1)),
        np.where(fixed[source], output_len, caps[source]),
        known_output_len,
    )
    names = tuple(sample.source.name for sample in samples)
    return Workload(requests, output_len, source, names, name)


@jit
def _scatter(tokens: Int32s, offsets: Int64s, out: Int32s, begin: Int64s) -> None:
    for i in range(len(begin)):
        length = offsets[i + 1] - offsets[i]
        out[begin[i] : begin[i] + length] = tokens[offsets[i] : offsets[i + 1]]
