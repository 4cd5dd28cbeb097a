"""The request sources that workloads are mixed from, by their published statistics.

Averages, sharing ratios and densities of the traces are those of BlendServe (ASPLOS'26,
Fig. 2 and appendix A.1, Table 3). E[d^2] follows from those densities on an A100 with
independent input and output lengths. ``AZURE_CONV``, ``ARXIV`` and the output lengths of
``SHAREGPT`` have the moments of the open files (Azure LLM 2023, Vidur, NanoFlow).
Only those three publish the spread of their input lengths. For the others ``own_cv`` is
an assumption, which does not affect the density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ..planner.requests import Floats, Int32s

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
    sharing: share of all its tokens, input and output, that a perfect prefix cache
        saves. The length of the shared prefix follows from it.
    max_output_len: longest output, and ``max_new_tokens`` of the requests.
    max_groups: distinct shared prefixes of a large sample, 1 for one system prompt.
    group_size: requests per shared prefix. Small samples have fewer prefixes.
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
AZURE = Source("Azure", 2508, 0.96, 23, 5_050, sharing=0.01)
AZURE_CONV = Source("Azure-conv", 1154.7, 0.96, 211.1, 71_132, sharing=0.0)
ARXIV = Source("arXiv", 2588, 0.37, 291.4, 366_875, sharing=0.0)
SHAREGPT = Source("ShareGPT", 298.8, 4.24, 323.7, 190_631, sharing=0.02)
WILDCHAT = Source("WildChat", 496, 1.5, 256, 202_322, sharing=0.19)
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
    """``count`` ascending lengths with E[x] = ``mean`` and E[x^2] = ``square``.

    The lengths are the mid-quantiles of a lognormal, one per stratum of equal
    probability, rounded and clipped to ``[low, high]``. Mid-quantiles and clipping cut
    the tail, so the distribution's two parameters are refitted until the lengths
    themselves have the requested moments. A few hundred lengths of a heavy tail thus
    have the load of the distribution, unlike independent draws. A sample too small for
    its spread (``square / mean**2`` near ``count``) only keeps the mean. Without spread
    (``square <= mean**2``) all lengths are the mean, whatever the range.

    Returns:
        int32 ``[count]``.
    """
    target_ratio = square / mean**2
    if count == 0 or target_ratio <= 1.0:
        return np.full(count, round(mean), dtype=np.int32)
    quantiles = _normal_quantiles(count)
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


def _normal_quantiles(count: int) -> Floats:
    half = (count + 1) // 2
    inverse = NormalDist().inv_cdf
    lower = np.fromiter(
        map(inverse, ((np.arange(half) + 0.5) / count).tolist()), np.float64, half
    )
    return np.concatenate([lower, -lower[: count - half][::-1]])
