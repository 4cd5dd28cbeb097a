"""How many tokens each request will generate, learnt from the answers of a sample.

Requests under one prefix tend to get answers of one kind, so an estimate is the mean of
the observed answers of a subtree (BlendServe, section 3.2). Three steps:

1. A node's mean is shrunk towards its parent's, from the root down. A subtree without
   observed answers so takes the mean of the nearest subtree around it that has some.
2. The tree is cut into strata, subtrees with enough observed fit. Inside a stratum
   the estimate is corrected by the prompt length, in bins of its logarithm.
3. The observed answers of a stratum, scaled to the estimate of a request, are its
   distribution: for random lengths and for what is left of a running request.

Only observed answers count. A length known beforehand says nothing of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .jit import jit
from .prefix_tree import PrefixTree
from .requests import UNKNOWN, Bools, Floats, Int32s, Int64s, PlanRequests

# What a mean over fewer requests is shrunk towards counts as much as this many answers.
SHRINKAGE = 2.0
# Observed answers that make a subtree a stratum of its own.
STRATUM_ANSWERS = 16
# One bin for each power of two of the prompt length, an int32.
NUM_BINS = 32
# A running request longer than all answers has this much left, relative to what it has.
OVERRUN = 0.5

Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True, slots=True)
class OutputEstimates:
    """First and second moment of the output length of each request, by index.

    est_output_len: float64 ``[n]``, E[d] in tokens.
    est_output_len_sq: float64 ``[n]``, E[d^2]. The memory time of a request grows with
        ``p d + d^2 / 2`` (BlendServe, section 2.3), and E[d^2] can be many times
        E[d]^2.
    """

    est_output_len: Floats
    est_output_len_sq: Floats


def choose_sample(
    tree: PrefixTree,
    requests: PlanRequests,
    *,
    share: float = 0.01,
    min_per_subtree: int = 5,
    seed: int,
) -> Int64s:
    """Requests of unknown output length to run first, int64 indices in DFS order.

    Evenly spaced along the leaves from a random start, so that every subtree gets its
    part. A large subtree gets ``min_per_subtree`` at least. It is large when, not
    counting large subtrees below it, it has 1/256 of all requests of unknown length,
    and enough that ``min_per_subtree`` is at most twice the share of them. So the
    sample is at most three times the share; a job too small for that gets
    ``min_per_subtree`` in all.

    Raises:
        InputError: ``share`` is not in (0, 1] or ``min_per_subtree`` is below 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share={share!r} of a sample must be above 0 and at most 1.")
    if min_per_subtree < 1:
        raise InputError(f"min_per_subtree={min_per_subtree!r} must be 1 or more.")
    unknown = requests.known_output_len[tree.order] == UNKNOWN
    positions = np.flatnonzero(unknown)
    large = max(len(positions) / 256, min_per_subtree / (2 * share))
    stratum = _strata(tree.parent, tree.leaf_parent, unknown, large)[positions]
    positions = positions[np.argsort(stratum, kind="stable")]
    size = np.bincount(stratum)
    start_size, start_place = np.random.default_rng(seed).random(2)
    # Rounding the running total keeps the sum at the share of the whole.
    wanted = np.diff(np.floor(share * np.cumsum(size) + start_size), prepend=0.0)
    needed = np.where(size >= min(large, len(positions)), min_per_subtree, 0)
    taken = np.minimum(np.maximum(wanted, needed), size).astype(np.int64)
    nth = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    step = np.repeat(size, taken) / np.repeat(taken, taken)
    begin = np.repeat(np.cumsum(size) - size, taken)
    chosen = begin + ((nth + start_place) * step).astype(np.int64)
    sample: Int64s = tree.order[np.sort(positions[chosen])]
    return sample


class OutputLengthEstimator:
    """Estimates that follow the observed answers of a job.

    Observe whole samples. The answers that are there at some moment of a run are its
    short ones, and their mean is too small.
    """

    def __init__(
        self, tree: PrefixTree, requests: PlanRequests, *, default_output_len: int = 256
    ) -> None:
        """``default_output_len``: E[d] in tokens while no answer was observed.

        Raises:
            InputError: ``default_output_len`` is below 1.
        """
        if default_output_len < 1:
            raise InputError(
                f"default_output_len={default_output_len!r} must be 1 or more."
            )
        self._tree = tree
        self._default = float(default_output_len)
        # From here to the public results, arrays go by leaf position.
        self._cap = requests.max_new_tokens[tree.order].astype(np.float64)
        self._exact = requests.known_output_len[tree.order].astype(np.int64)
        self._learns = self._exact == UNKNOWN
        self._bin = np.log2(tree.input_len + 1.0).astype(np.int64)
        self._position = np.empty_like(tree.order)
        self._position[tree.order] = np.arange(len(tree.order))
        self._fit: _Fit | None = None

    def observe(self, request_indices: Int64s, output_lens: Int32s) -> None:
        """Take in answers: output lengths in tokens, one for each request index.

        Raises:
            InputError: a length is negative.
        """
        if np.any(np.less(output_lens, 0)):
            raise InputError(
                f"An output length of {np.min(output_lens)} tokens is negative; "
                "observe requests that were answered."
            )
        self._exact[self._position[request_indices]] = output_lens
        self._fit = None

    def estimates(self) -> OutputEstimates:
        """The moments of every request's output length.

        Known and observed lengths are exact. No estimate is above ``max_new_tokens``.
        """
        fit = self._fitted()
        return OutputEstimates(
            self._by_request(fit.mean), self._by_request(fit.mean_sq)
        )

    def draw(self, seed: int) -> Int32s:
        """A random plausible output length for each request, int32 ``[n]``, in tokens.

        An observed answer of the request's stratum, scaled to the request's estimate.
        Without any answers, lengths are exponentially distributed, the spread that the
        default second moment stands for.
        """
        fit = self._fitted()
        rng = np.random.default_rng(seed)
        n = len(fit.mean)
        if len(fit.length) == 0:
            drawn = rng.exponential(1.0, n) * fit.mean
        else:
            begin = fit.begin[fit.stratum]
            count = fit.begin[fit.stratum + 1] - begin
            picked = begin + (rng.random(n) * count).astype(np.int64)
            drawn = fit.length[picked] * fit.scale
        drawn = np.minimum(np.maximum(np.rint(drawn), 1.0), self._cap)
        drawn = np.where(self._exact == UNKNOWN, drawn, self._exact)
        return self._by_request(drawn).astype(np.int32)

    def remaining_len(self, request_indices: Int64s, produced: Int32s) -> Floats:
        """Expected tokens still to come of requests that have ``produced`` some.

        Mean of the longer ones of the stratum's observed answers, scaled to the
        request's estimate, shrunk towards the same of the whole job, and this towards
        ``OVERRUN`` times what is there. ``produced`` plus the result never falls as
        ``produced`` grows, and never passes ``max_new_tokens``.

        Args:
            request_indices: int64 ``[k]``.
            produced: ``[k]``, output tokens so far.

        Returns:
            float64 ``[k]``.
        """
        fit = self._fitted()
        position = self._position[request_indices]
        total = _expected_total(
            np.asarray(produced, dtype=np.float64),
            np.maximum(fit.mean[position], 1.0),
            fit.stratum[position],
            fit.begin,
            fit.length,
            fit.sum_before,
            fit.sample_mean,
        )
        total = np.minimum(total, self._cap[position])
        exact = self._exact[position]
        total = np.where(exact == UNKNOWN, total, exact)
        remaining: Floats = np.maximum(total - produced, 0.0)
        return remaining

    def _by_request(self, by_position: Floats) -> Floats:
        result = np.empty_like(by_position)
        result[self._tree.order] = by_position
        return result

    def _fitted(self) -> _Fit:
        if self._fit is None:
            self._fit = self._make_fit()
        return self._fit

    def _make_fit(self) -> _Fit:
        tree = self._tree
        exact = self._exact != UNKNOWN
        observed = exact & self._learns
        stratum = _strata(tree.parent, tree.leaf_parent, observed, STRATUM_ANSWERS)
        # An empty answer took a step as well.
        lengths = np.maximum(self._exact[observed], 1)
        mean = self._moment(lengths, self._default, observed, stratum)
        mean = np.maximum(mean, 1.0)
        # An exponential distribution has E[d^2] = 2 E[d]^2.
        mean_sq = self._moment(lengths**2, 2 * self._default**2, observed, stratum)
        own, begin, length = _samples(stratum, lengths, stratum[observed])
        sum_before = _sums_before(length)
        count = np.maximum(np.diff(begin), 1)
        sample_mean = np.maximum(np.diff(sum_before[begin]) / count, 1.0)
        scale = mean / sample_mean[own]
        mean = np.where(exact, self._exact, np.minimum(mean, self._cap))
        mean_sq = np.minimum(np.maximum(mean_sq, mean**2), self._cap**2)
        mean_sq = np.where(exact, mean**2, mean_sq)
        return _Fit(mean, mean_sq, own, scale, begin, length, sum_before, sample_mean)

    def _moment(
        self, values: Int64s, default: float, observed: Bools, stratum: Int32s
    ) -> Floats:
        """Mean of ``values``, one for each observed leaf, as estimated for each leaf."""
        tree = self._tree
        by_leaf = np.zeros(len(observed), np.int64)
        by_leaf[observed] = values
        node_mean = _node_means(
            tree.parent,
            tree.leaf_begin,
            tree.leaf_end,
            _sums_before(observed.astype(np.int64)),
            _sums_before(by_leaf),
            default,
        )
        mean = node_mean[tree.leaf_parent]
        cell = stratum * np.int64(NUM_BINS) + self._bin
        num_cells = NUM_BINS * (int(stratum.max(initial=0)) + 1)
        seen = cell[observed]
        actual = np.bincount(seen, values, num_cells)
        expected = np.bincount(seen, mean[observed], num_cells)
        prior = SHRINKAGE * mean
        corrected: Floats = mean * (actual[cell] + prior) / (expected[cell] + prior)
        return corrected


@dataclass(frozen=True, slots=True)
class _Fit:
    """What the answers so far say of each leaf, and the samples behind it.

    mean, mean_sq: float64 ``[n]``, the moments by leaf position.
    stratum: int64 ``[n]``, the sample that stands for each leaf.
    scale: float64 ``[n]``, a leaf's estimate, before its cap, over its sample's mean.
    begin: int64 ``[k + 1]``; sample ``s`` is ``length[begin[s]:begin[s + 1]]``, in
        rising order. The last one is the whole job.
    length, sum_before: float64, observed lengths and the sum of all before an index.
    sample_mean: float64 ``[k]``, 1 or more.
    """

    mean: Floats
    mean_sq: Floats
    stratum: Int64s
    scale: Floats
    begin: Int64s
    length: Floats
    sum_before: Floats
    sample_mean: Floats


def _samples(
    leaf_stratum: Int32s, lengths: Int64s, stratum: Int32s
) -> tuple[Int64s, Int64s, Floats]:
    """Each leaf's sample, sample bounds, sorted lengths, from observed ones."""
    num_strata = int(leaf_stratum.max(initial=0)) + 1
    count = np.bincount(stratum, minlength=num_strata)
    # Sorted by stratum, then length: one number holds both.
    by_stratum = np.sort(stratum * np.int64(2**32) + lengths) % 2**32
    own = leaf_stratum.astype(np.int64)
    if count[0] < STRATUM_ANSWERS:
        own[own == 0] = num_strata
    begin = _sums_before(np.append(count, len(lengths)))
    return own, begin, np.concatenate((by_stratum, np.sort(lengths))).astype(np.float64)


def _sums_before(values: NDArray[Number]) -> NDArray[Number]:
    result = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=result[1:])
    return result


@jit
def _strata(
    parent: Int32s, leaf_parent: Int32s, counted: Bools, least: float
) -> Int32s:
    """Cut the tree into subtrees with at least ``least`` counted leaves each.

    From the bottom up, a node with that many counted leaves outside of strata below it
    becomes a stratum. Returns the stratum of each leaf, int32 ``[n]``, from 1 on; 0 is
    what remains at the root.
    """
    waiting = np.zeros(len(parent), np.int64)
    for leaf in range(len(leaf_parent)):
        waiting[leaf_parent[leaf]] += counted[leaf]
    stratum = np.zeros(len(parent), np.int32)
    num_strata = 0
    for node in range(len(parent) - 1, 0, -1):
        if waiting[node] >= least:
            num_strata += 1
            stratum[node] = num_strata
        else:
            waiting[parent[node]] += waiting[node]
    for node in range(1, len(parent)):
        if stratum[node] == 0:
            stratum[node] = stratum[parent[node]]
    return stratum[leaf_parent]


@jit
def _node_means(
    parent: Int32s,
    leaf_begin: Int64s,
    leaf_end: Int64s,
    count_before: Int64s,
    sum_before: Int64s,
    default: float,
) -> Floats:
    """Mean of the observed values below each node, shrunk towards its parent's."""
    mean = np.empty(len(parent))
    for node in range(len(parent)):
        begin, end = leaf_begin[node], leaf_end[node]
        count = count_before[end] - count_before[begin]
        total = float(sum_before[end] - sum_before[begin])
        if node > 0:
            mean[node] = (total + SHRINKAGE * mean[parent[node]]) / (count + SHRINKAGE)
        elif count > 0:
            mean[node] = total / count
        else:
            mean[node] = default
    return mean


@jit
def _expected_total(
    produced: Floats,
    mean: Floats,
    stratum: Int64s,
    begin: Int64s,
    length: Floats,
    sum_before: Floats,
    sample_mean: Floats,
) -> Floats:
    """E[d | d > produced] of running requests, float64 ``[k]``, before their caps.

    It cannot fall as ``produced`` grows: leaving the shortest answer out of a mean, or
    raising what the mean is shrunk towards, makes it larger.
    """
    expected = np.empty(len(produced))
    whole_job = len(sample_mean) - 1
    for i in range(len(produced)):
        total = max(mean[i], (1 + OVERRUN) * produced[i])
        for sample in (whole_job, stratum[i]):
            scale = mean[i] / sample_mean[sample]
            end = begin[sample + 1]
            longer = begin[sample] + np.searchsorted(
                length[begin[sample] : end], produced[i] / scale, side="right"
            )
            longer_sum = scale * (sum_before[end] - sum_before[longer])
            total = (longer_sum + SHRINKAGE * total) / (end - longer + SHRINKAGE)
        expected[i] = total
    return expected
