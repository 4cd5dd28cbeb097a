"""BlendServe's recipe for jobs with a given compute density and prefix sharing ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from ..errors import ConfigError
from ..planner.requests import Floats
from .mix import Workload, assemble, seeds_of
from .samples import Sample, draw_sample
from .sources import BURSTGPT, MMLU, OPENVID, Source

TRACES = {1: (1.4, 0.35), 2: (0.9, 0.35), 3: (1.4, 0.05), 4: (0.9, 0.05)}
"""(density, sharing) of BlendServe's four traces, Table 2."""

GRID_DENSITIES = tuple(round(0.80 + 0.05 * i, 2) for i in range(13))
"""Densities of BlendServe's 65 simulated workloads, section 5.4."""

GRID_SHARINGS = (0.05, 0.15, 0.25, 0.35, 0.45)
"""Sharing ratios of BlendServe's 65 simulated workloads, section 5.4."""


def blend_counts(
    density: float,
    sharing: float,
    num_requests: int,
    token_time_s: float,
    kv_read_time_s: float,
    *,
    compute_source: Source = BURSTGPT,
    memory_source: Source = OPENVID,
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
    sources = (compute_source, memory_source, MMLU)
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
        lowest, highest = _feasible_densities(excess_shared, compute_s, memory_s)
        raise ConfigError(
            f"density={density:g} with sharing={sharing:g} cannot be mixed from"
            f" {names}: at this sharing the density can be {lowest:.3g} to"
            f" {highest:.3g}."
        )
    memory_count = round(shares[1] * num_requests)
    if memory_count < 1:
        raise ConfigError(
            f"num_requests={num_requests} holds no {memory_source.name} request at"
            f" density={density:g}; use {round(0.5 / shares[1]) + 1} or more."
        )
    mmlu_count = round(shares[2] * num_requests)
    compute_count = num_requests - memory_count - mmlu_count
    return {
        compute_source: compute_count,
        memory_source: memory_count,
        MMLU: mmlu_count,
    }


def blend(
    density: float,
    sharing: float,
    num_requests: int,
    seed: int,
    token_time_s: float,
    kv_read_time_s: float,
    *,
    compute_source: Source = BURSTGPT,
    memory_source: Source = OPENVID,
    shuffle: bool = True,
    known: bool = True,
) -> Workload:
    """A job with a root compute density and a prefix sharing ratio (BlendServe A.1).

    Counts are those of :func:`blend_counts`. Then the lengths of MMLU's prefixes and of
    the memory-intensive source's outputs are scaled, by a few percent from 40,000
    requests on, to correct for the rounding of counts and lengths. The job meets both
    targets within 1 %.

    Args:
        density: compute time over memory time of the whole job, where compute time
            counts a shared prefix once. Above 1 the job is compute-intensive.
        sharing: share of all tokens, input and output, that a perfect cache saves.
        token_time_s: compute time of one token, 2 * params / compute.
        kv_read_time_s: memory time of reading one token of KV.
        known: whether the true lengths of sources with ``fixed_output`` are known
            beforehand.

    Raises:
        ConfigError: as for :func:`blend_counts`, or ``num_requests`` is too small.
    """
    counts = blend_counts(
        density,
        sharing,
        num_requests,
        token_time_s,
        kv_read_time_s,
        compute_source=compute_source,
        memory_source=memory_source,
    )
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
    return assemble(samples, name, seeds, shuffle=shuffle, known=known)


def _feasible_densities(
    excess_shared: Floats, compute_s: Floats, memory_s: Floats
) -> tuple[float, float]:
    """The lowest and highest density of mixes whose ``excess_shared`` adds up to 0.

    Density is monotone along the line of such mixes, so its extremes are at the ends,
    where one of the three sources has no requests.
    """
    densities = []
    for i, j in combinations(range(3), 2):
        # Weights that cancel, of equal sign if the two sources can be mixed at all.
        a, b = excess_shared[j], -excess_shared[i]
        if a * b >= 0 and (a or b):
            compute = a * compute_s[i] + b * compute_s[j]
            densities.append(float(compute / (a * memory_s[i] + b * memory_s[j])))
    return min(densities), max(densities)


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
