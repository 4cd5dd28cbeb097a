"""The exact order of one bucket, cut into units: the least that moves between engines.

A bucket is planned by itself, on any machine. The head of a fleet sees its units, not its
requests: a million units for a billion requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit_without_gil
from ..costs.cost_model import CostModel
from ..costs.tree_work import leaf_work
from ..lengths.output_length import OutputLengthEstimator
from ..prefixes.prefix_tree import PrefixTree, build_prefix_tree
from ..requests import Floats, Int32s, Int64s, PlanRequests
from .order_cuts import MAX_REPEATED, check_max_repeated, cut_order


class Units(NamedTuple):
    """``u`` stretches of a depth-first order, one after the other.

    bucket: int32 ``[u]``.
    first: int64 ``[u]``, position of the first request in the order of the bucket.
    num_requests: int64 ``[u]``, 1 or more.
    prompt_tokens: int64 ``[u]``, of all prompts.
    unique_tokens: int64 ``[u]``, of all prompts, each prefix that they share once.
    shared_tokens: int32 ``[u]``, that the first prompt shares with the prompt before it.
    common_tokens: int32 ``[u]``, that all prompts of the unit share.
    compute_s: float64 ``[u]``, estimated compute time where nothing was computed before,
        in seconds.
    memory_s: float64 ``[u]``, estimated memory time, in seconds.
    """

    bucket: Int32s
    first: Int64s
    num_requests: Int64s
    prompt_tokens: Int64s
    unique_tokens: Int64s
    shared_tokens: Int32s
    common_tokens: Int32s
    compute_s: Floats
    memory_s: Floats

    @property
    def num_unique_tokens(self) -> int:
        """Tokens of all prompts with every shared prefix counted once."""
        shared = self.shared_tokens.sum(dtype=np.int64)
        return int(self.unique_tokens.sum() - shared)


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """What the head needs to know of a bucket.

    units: of its order.
    first_prompt, last_prompt: int32, the tokens of the first and the last prompt in the
        order. Empty if there is none.
    """

    units: Units
    first_prompt: Int32s
    last_prompt: Int32s


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket.

    order: int64 ``[n]``, the numbers of its requests in depth-first order.
    """

    order: Int64s
    summary: BucketSummary


def plan_bucket(
    requests: PlanRequests,
    numbers: Int64s,
    bucket: int,
    cost: CostModel,
    unit_requests: int,
    *,
    max_repeated: float = MAX_REPEATED,
) -> BucketPlan:
    """The order of a bucket's requests, and its units.

    Output lengths are estimated by the requests' limits, as before any answer. A unit has
    half to three halves of ``unit_requests``, more where that would divide a family for
    which it does not pay, and fewer where the bucket has fewer.

    Args:
        requests: of the bucket, in the order of the job.
        numbers: int64 ``[n]``, the number of each in the job.
        max_repeated: as of :func:`~.order_cuts.cut_order`, in compute time.

    Raises:
        ConfigError: a setting is out of range.
    """
    if unit_requests < 1:
        raise ConfigError(f"unit_requests={unit_requests!r} must be 1 or more.")
    check_max_repeated(max_repeated)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    compute_s, prefix_s, memory_s = _leaf_seconds(tree, requests, cost)
    begin = cut_order(
        tree.lcp,
        prefix_s,
        _running_sum(compute_s),
        (unit_requests + 1) // 2,
        unit_requests + unit_requests // 2,
        max_repeated,
    )
    units = _summaries(tree, compute_s, prefix_s, memory_s, begin, bucket)
    summary = BucketSummary(
        units=units,
        first_prompt=_prompt(requests, tree.order[:1]),
        last_prompt=_prompt(requests, tree.order[-1:]),
    )
    return BucketPlan(numbers[tree.order], summary)


def _prompt(requests: PlanRequests, request: Int64s) -> Int32s:
    """A copy of the prompt of the one request given, or of none."""
    return requests.take(request).tokens


def _leaf_seconds(
    tree: PrefixTree, requests: PlanRequests, cost: CostModel
) -> tuple[Floats, Floats, Floats]:
    """Seconds by leaf, each float64 ``[n]``.

    Compute time after the leaf before, compute time of the prefix that both share, and
    memory time.
    """
    estimates = OutputLengthEstimator(tree, requests).estimates()
    work = leaf_work(tree, cost, estimates.est_output_len, estimates.est_output_len_sq)
    whole, prefix = (cost.prefill_time_s(x, 0) for x in (tree.input_len, tree.lcp))
    if tree.media is not None:
        whole = whole + tree.media.input_len * cost.encoder_token_time_s
        prefix = prefix + tree.media.lcp * cost.encoder_token_time_s
    return whole - prefix + work.decode_s, prefix, work.memory_s


def _running_sum(values: Floats) -> Floats:
    """The sum before each position, and of all, float64 ``[n + 1]``."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums


def _summaries(
    tree: PrefixTree,
    compute_s: Floats,
    prefix_s: Floats,
    memory_s: Floats,
    begin: Int64s,
    bucket: int,
) -> Units:
    first = begin[:-1]
    shared = tree.lcp[first]
    new = _sums(tree.input_len - tree.lcp, first)
    return Units(
        bucket=np.full(len(first), bucket, np.int32),
        first=first,
        num_requests=np.diff(begin),
        prompt_tokens=_sums(tree.input_len, first),
        unique_tokens=new + shared,
        shared_tokens=shared,
        common_tokens=_common_tokens(tree.input_len, tree.lcp, begin),
        compute_s=np.add.reduceat(compute_s, first) + prefix_s[first],
        memory_s=np.add.reduceat(memory_s, first),
    )


def _sums(values: Int32s, first: Int64s) -> Int64s:
    """The sum of each unit."""
    sums: Int64s = np.add.reduceat(values, first, dtype=np.int64)
    return sums


@jit_without_gil
def _common_tokens(input_len: Int32s, lcp: Int32s, begin: Int64s) -> Int32s:
    common = np.empty(len(begin) - 1, np.int32)
    for unit in range(len(common)):
        common[unit] = input_len[begin[unit]]
        for leaf in range(begin[unit] + 1, begin[unit + 1]):
            common[unit] = min(common[unit], lcp[leaf])
    return common


def join_units(buckets: Sequence[BucketSummary]) -> Units:
    """The units of all buckets, in the order of the buckets.

    The first unit of each bucket gets the tokens that it shares with the bucket before
    it. So all numbers are those of one order of the whole job.
    """
    joined = Units(
        *map(np.concatenate, zip(*(each.units for each in buckets), strict=True))
    )
    begin, last = 0, np.zeros(0, np.int32)
    for each in buckets:
        if len(each.units.first) == 0:
            continue
        joined.shared_tokens[begin] = _common_prefix(last, each.first_prompt)
        begin += len(each.units.first)
        last = each.last_prompt
    return joined


def _common_prefix(left: Int32s, right: Int32s) -> int:
    both = min(len(left), len(right))
    differ = np.flatnonzero(left[:both] != right[:both])
    return int(differ[0]) if len(differ) else both
