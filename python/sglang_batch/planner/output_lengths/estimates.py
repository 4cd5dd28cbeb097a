"""Estimates of the output lengths, learnt from the answers to a sample.

Requests with a common prefix tend to get similar answers, so an estimate is the mean
length of the observed answers of a subtree (BlendServe, section 3.2), in three steps:

1. The mean of a node is shrunk to its parent's, from the root down. A subtree without
   observed answers thus takes the mean of the smallest subtree around it that has some.
2. The tree is cut into strata, subtrees with enough observed answers for a fit. Inside
   a stratum the estimate is corrected by the prompt length, in bins of its logarithm.
3. The observed answers of a stratum, scaled to the estimate of a request, are the
   distribution of its length. Random lengths are drawn from it.

Where earlier answers to a prompt are known (``PlanRequests.expected_output_len``), as in
training with the same prompts, the estimate is their length, times the ratio by which the
answers of this job differ from the expectation. It takes the place of step 2.

Only observed answers count, and those of running requests. At any moment of a run, the
answers that have ended are the short ones. A running request is a *censored* observation: its
length is only known to exceed its tokens so far. The Kaplan-Meier estimator uses both. It is
the same as giving each running request the mean of all lengths beyond its own, in which the
running ones count in the same way. Beyond the last answer that ended, lengths are taken to be
exponentially distributed: the tokens still to come are as many however long a request has
run. A length known beforehand informs no other estimate, but for the one that holds until
there is an answer (:func:`prior_output_len`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import InputError
from ..compiled import jit
from ..prefixes.prefix_tree import PrefixTree
from ..requests import UNKNOWN, Bools, Floats, Int32s, Int64s, PlanRequests, sums_before


def completed(
    length: Int64s, censored: Bools, default_excess: float
) -> tuple[Floats, Floats]:
    """Expectation of each length and of its square, float64 ``[k]`` each, by Kaplan and Meier.

    Args:
        length: int64 ``[k]``, tokens of each answer, those so far if it is censored.
        censored: bool ``[k]``, whether it continues.
        default_excess: tokens still to come if no answer has ended.
    """
    # Of equal lengths, those that continue are longer.
    order = np.lexsort((censored, length))
    value = length[order].astype(np.float64)
    running = np.asarray(censored, np.bool_)[order]
    excess = mean_excess(value[~running], value[running], default_excess)
    mean, square = np.empty(len(order)), np.empty(len(order))
    mean[order], square[order] = _completed(value, running, excess)
    return mean, square


def mean_excess(ended: Floats, running: Floats, default: float) -> float:
    """Tokens still to come of a long answer: all tokens above the median, over the number
    of answers that ended there (the maximum likelihood of exponential lengths).

    Args:
        ended, running: float64, lengths of answers, the latter so far.
        default: if no answer has ended.
    """
    if not len(ended):
        return default
    above = float(np.median(ended))
    count = int((ended > above).sum())
    if not count:  # all equal
        above, count = 0.0, len(ended)
    tokens = sum(
        float(np.maximum(each - above, 0.0).sum()) for each in (ended, running)
    )
    return max(tokens / count, 1.0)


@jit
def _completed(value: Floats, running: Bools, excess: float) -> tuple[Floats, Floats]:
    """The moments of lengths in rising order."""
    mean, square = value.copy(), value * value
    mean_behind = square_behind = 0.0
    any_ended = False
    for i in range(len(value) - 1, -1, -1):
        if running[i] and any_ended:
            mean[i], square[i] = mean_behind, square_behind
        elif running[i]:
            # E[(c + X)^2] of an exponential X.
            mean[i] = value[i] + excess
            square[i] = value[i] ** 2 + 2 * value[i] * excess + 2 * excess**2
        else:
            any_ended = True
        mean_behind += (mean[i] - mean_behind) / (len(value) - i)
        square_behind += (square[i] - square_behind) / (len(value) - i)
    return mean, square


# A parent's mean counts as much as this many answers when a child's is shrunk to it.
SHRINKAGE = 2.0


@jit
def strata(parent: Int32s, leaf_parent: Int32s, counted: Bools, least: float) -> Int32s:
    """Cut the tree into subtrees with at least ``least`` counted leaves each, from the leaves up.

    Returns:
        The stratum of each leaf, int32 ``[n]``, from 1. 0 is the remainder at the root.
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
def node_means(
    parent: Int32s,
    leaf_begin: Int64s,
    leaf_end: Int64s,
    count_before: Int64s,
    sum_before: Int64s,
    default: float,
) -> Floats:
    """Mean of the observed values below each node, shrunk to its parent's, float64 ``[m]``.

    Args:
        count_before, sum_before: int64 ``[n + 1]``, the number and the sum of the
            observed values before each leaf position.
        default: the mean at the root without any observed value.
    """
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


# Observed answers that make a subtree a stratum of its own.
STRATUM_ANSWERS = 16
# One bin for each power of two of the prompt length, an int32.
NUM_BINS = 32
# Tokens of an answer until one was observed, at most.
MOST_ASSUMED = 256


@dataclass(frozen=True, slots=True)
class OutputEstimates:
    """First and second moment of the output length of each request, float64 ``[n]`` by index.

    The memory time of a request grows with ``p d + d^2 / 2`` (BlendServe, section 2.3), and
    E[d^2] can be many times E[d]^2.
    """

    est_output_len: Floats
    est_output_len_sq: Floats

    def take(self, indices: Int64s) -> OutputEstimates:
        """The estimates of some requests, in the order of ``indices``."""
        return OutputEstimates(
            self.est_output_len[indices], self.est_output_len_sq[indices]
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """Answers to a sample: int64 request indices and their output lengths in tokens."""

    requests: Int64s
    output_len: Int32s


def prior_output_len(requests: PlanRequests) -> int:
    """The tokens that an answer is taken to have before any was observed, 1 or more.

    An estimate that is too long leaves KV unused. So it is a third of the mean of
    ``max_new_tokens``, the mean of the known lengths, or ``MOST_ASSUMED``, whichever is least.
    """
    if not len(requests):
        return MOST_ASSUMED
    known = requests.known_output_len[requests.known_output_len != UNKNOWN]
    # The largest limit stands for "as many as fit".
    limits = requests.max_new_tokens.astype(np.int64)
    guesses = [MOST_ASSUMED, int(limits.mean()) // 3]
    if len(known):
        guesses.append(int(known.mean()))
    return max(1, min(guesses))


class OutputLengthEstimator:
    """Estimates of output lengths that follow the observed answers of a job.

    The answers at some moment of a run are its short ones: observe the running requests with them.
    """

    def __init__(
        self,
        tree: PrefixTree,
        requests: PlanRequests,
        *,
        default_output_len: int | None = None,
    ) -> None:
        """
        Args:
            default_output_len: E[d] in tokens until an answer was observed. None:
                :func:`prior_output_len`.

        Raises:
            InputError: ``default_output_len`` is below 1.
        """
        if default_output_len is None:
            default_output_len = prior_output_len(requests)
        if default_output_len < 1:
            raise InputError(
                f"default_output_len={default_output_len!r} must be 1 or more."
            )
        self._tree = tree
        self._default = float(default_output_len)
        # Private arrays are by leaf position, public results by request.
        self._cap = requests.max_new_tokens[tree.order].astype(np.float64)
        self._exact = requests.known_output_len[tree.order].astype(np.int64)
        self._learns = self._exact == UNKNOWN
        self._expected = np.zeros(len(self._exact))  # 0: nothing is expected
        if requests.expected_output_len is not None:
            expected = requests.expected_output_len[tree.order]
            self._expected = np.maximum(expected, 0).astype(np.float64)
        self._so_far = np.zeros_like(self._exact)  # tokens of running requests
        self._bin = np.log2(tree.input_len + 1.0).astype(np.int64)
        self._position = tree.position
        self._fit: _Fit | None = None

    def observe(self, request_indices: Int64s, output_lens: Int32s) -> None:
        """Add answers: the output length in tokens for each request index.

        Raises:
            InputError: a length is negative.
        """
        if np.any(np.less(output_lens, 0)):
            raise InputError(
                f"An output length of {np.min(output_lens)} tokens is negative; "
                "observe requests that were answered."
            )
        self._exact[self._position[request_indices]] = output_lens
        self._so_far[:] = 0
        self._fit = None

    def observe_running(self, request_indices: Int64s, so_far: Int32s) -> None:
        """Set which requests run, and the tokens that each has so far, until
        :meth:`observe` is called."""
        at = self._position[request_indices]
        self._so_far[:] = 0
        self._so_far[at] = np.where(self._exact[at] == UNKNOWN, so_far, 0)
        self._fit = None

    def estimates(self) -> OutputEstimates:
        """The moments of every request's length: exact if known or observed, at most
        ``max_new_tokens``."""
        fit = self._fitted()
        return OutputEstimates(
            self._by_request(fit.est_output_len),
            self._by_request(fit.est_output_len_sq),
        )

    def draw(self, seed: int, scale: float = 1.0) -> Int32s:
        """A random plausible output length for each request, int32 ``[n]``, in tokens.

        It is an observed answer of the request's stratum, scaled to the request's estimate. Without
        any answers, lengths are exponentially distributed, as the default second moment assumes.

        Args:
            scale: by which lengths that are not known differ from their estimates.
        """
        fit = self._fitted()
        rng = np.random.default_rng(seed)
        n = len(fit.est_output_len)
        if len(fit.length) == 0:
            drawn = rng.exponential(1.0, n) * fit.est_output_len
        else:
            begin = fit.begin[fit.stratum]
            count = fit.begin[fit.stratum + 1] - begin
            picked = begin + (rng.random(n) * count).astype(np.int64)
            drawn = fit.length[picked] * fit.scale
        drawn = np.minimum(np.maximum(np.rint(scale * drawn), 1.0), self._cap)
        drawn = np.where(self._exact == UNKNOWN, drawn, self._exact)
        return self._by_request(drawn).astype(np.int32)

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
        ended = exact & self._learns
        observed = ended | (self._so_far > 0)
        stratum = strata(tree.parent, tree.leaf_parent, ended, STRATUM_ANSWERS)
        lengths, lengths_sq = self._completed(ended, stratum)
        mean = self._moment(lengths, self._default, observed, stratum)
        mean = np.maximum(mean, 1.0)
        # An exponential distribution has E[d^2] = 2 E[d]^2.
        mean_sq = self._moment(lengths_sq, 2 * self._default**2, observed, stratum)
        mean, mean_sq = self._as_expected(mean, mean_sq, lengths, observed)
        num_strata, seen = int(stratum.max(initial=0)) + 1, stratum[observed]
        answers = np.bincount(seen, minlength=num_strata)
        # Sorted by stratum, then by length: one number holds both.
        by_stratum = np.sort(seen * np.int64(2**32) + lengths) % 2**32
        own = stratum.astype(np.int64)
        if answers[0] < STRATUM_ANSWERS:
            own[own == 0] = num_strata
        begin = sums_before(np.append(answers, len(lengths)))
        length = np.concatenate((by_stratum, np.sort(lengths))).astype(np.float64)
        count = np.maximum(np.diff(begin), 1)
        sample_mean = np.maximum(np.diff(sums_before(length)[begin]) / count, 1.0)
        scale = mean / sample_mean[own]
        running = observed & ~ended
        mean[running] = np.maximum(mean[running], self._so_far[running] + 1.0)
        mean = np.where(exact, self._exact, np.minimum(mean, self._cap))
        mean_sq = np.minimum(np.maximum(mean_sq, mean**2), self._cap**2)
        mean_sq = np.where(exact, mean**2, mean_sq)
        return _Fit(mean, mean_sq, own, scale, begin, length)

    def _completed(self, ended: Bools, stratum: Int32s) -> tuple[Int64s, Int64s]:
        """Length of each observed answer and its square, int64. Those of running requests
        are expected ones, by the answers of their stratum, or of the whole job outside of
        the strata."""
        running = self._so_far > 0
        length = np.where(running, self._so_far, np.maximum(self._exact, 1))
        observed = ended | running
        mean, square = length.astype(np.float64), length.astype(np.float64) ** 2
        all_ended = np.flatnonzero(ended)
        for each in np.unique(stratum[running]):
            own = stratum == each
            longer = np.flatnonzero(running & own)
            of = np.flatnonzero(ended & own) if each else all_ended
            leaves = np.concatenate((of, longer))
            expected, expected_sq = completed(
                length[leaves], running[leaves], self._default
            )
            cap = self._cap[longer]
            mean[longer] = np.minimum(expected[len(of) :], cap)
            square[longer] = np.minimum(expected_sq[len(of) :], cap**2)
        return (
            np.rint(mean[observed]).astype(np.int64),
            np.rint(square[observed]).astype(np.int64),
        )

    def _as_expected(
        self, mean: Floats, mean_sq: Floats, values: Int64s, observed: Bools
    ) -> tuple[Floats, Floats]:
        """Both moments, with those of the leaves of which something is expected.

        Answers, whose lengths are ``values``, count as much as ``SHRINKAGE`` answers of the
        expected length. The spread around the mean is that of the other estimates.
        """
        has = self._expected > 0
        if not has.any():
            return mean, mean_sq
        both = has & observed
        prior = SHRINKAGE * float(self._expected[has].mean())
        actual = float(values[has[observed]].sum()) + prior
        ratio = actual / (float(self._expected[both].sum()) + prior)
        own = np.where(has, np.maximum(self._expected * ratio, 1.0), mean)
        return own, mean_sq * (own / mean) ** 2

    def _moment(
        self, values: Int64s, default: float, observed: Bools, stratum: Int32s
    ) -> Floats:
        """The mean as estimated for each leaf, float64 ``[n]``, from int64 values of
        observed leaves."""
        tree = self._tree
        by_leaf = np.zeros(len(observed), np.int64)
        by_leaf[observed] = values
        node_mean = node_means(
            tree.parent,
            tree.leaf_begin,
            tree.leaf_end,
            sums_before(observed.astype(np.int64)),
            sums_before(by_leaf),
            default,
        )
        mean = node_mean[tree.leaf_parent]
        cell = stratum * np.int64(NUM_BINS) + self._bin
        num_cells = NUM_BINS * (int(stratum.max(initial=0)) + 1)
        seen = cell[observed]
        actual = np.bincount(seen, values, num_cells)
        by_tree = np.bincount(seen, mean[observed], num_cells)
        prior = SHRINKAGE * mean
        corrected: Floats = mean * (actual[cell] + prior) / (by_tree[cell] + prior)
        return corrected


@dataclass(frozen=True, slots=True)
class _Fit:
    """Estimates by leaf from the answers so far, and the samples behind them.

    est_output_len, est_output_len_sq: float64 ``[n]``, the moments by leaf position.
    stratum: int64 ``[n]``, the sample that represents each leaf.
    scale: float64 ``[n]``, a leaf's estimate, before its cap, over its sample's mean.
    begin: int64 ``[k + 1]``. Sample ``s`` is ``length[begin[s]:begin[s + 1]]``, in
        rising order. The last one is the whole job.
    length: float64, observed lengths.
    """

    est_output_len: Floats
    est_output_len_sq: Floats
    stratum: Int64s
    scale: Floats
    begin: Int64s
    length: Floats
