"""How far a job's estimates of answer lengths have been off lately.

Of each job, and of each of its larger subtrees, it keeps the tokens that were observed
and those that were estimated, of the last answers: each further answer makes the older
ones count a little less. A running request that outlives its estimate is counted at once,
with the length it is then estimated at, and corrected when it ends. Thus the long answers
are not missing while the short ones come in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..planner.requests import Int32s
from .scheduled_request import ScheduledRequest

# Answers after which an observation counts half.
HALF_LIFE = 32
_KEEP = 0.5 ** (1.0 / HALF_LIFE)
# Estimates are raised by at most this much.
BIAS_MAX = 16.0
# Tokens of a job that count as estimated correctly before anything was observed.
_PRIOR = 32.0
# Requests with which a subtree has sums of its own.
_SUBTREE = 64
# Answers that the job's sums count as in those of a subtree.
_SHRINKAGE = 8.0


@dataclass(slots=True)
class LengthSums:
    """Observed and estimated tokens of the last answers, the older ones counting less.

    learnt: answers so far, which date each observation.
    weight: sum of the weights of all answers, at most ``1 / (1 - _KEEP)``, about 47.
    """

    observed: float = 0.0
    estimated: float = 0.0
    weight: float = 0.0
    learnt: int = 0

    def learn(self, observed: float, estimated: float) -> None:
        """An answer, which no longer runs or has outlived its estimate."""
        self.observed = _KEEP * self.observed + observed
        self.estimated = _KEEP * self.estimated + estimated
        self.weight = _KEEP * self.weight + 1.0
        self.learnt += 1

    def correct(self, more: float, since: int) -> None:
        """An answer that was the ``since``-th has ``more`` tokens than was learnt then."""
        self.observed += more * _KEEP ** (self.learnt - since)


class LengthBias:
    """The sums of one job, or of all online requests.

    Attributes:
        job: the sums of all its requests.
    """

    def __init__(self) -> None:
        self.job = LengthSums()
        self._subtrees: dict[int, LengthSums] = {}

    def factor(self, request: ScheduledRequest) -> float:
        """The factor by which a request's estimate is too low, at least 1."""
        job = self.job
        factor = (job.observed + _PRIOR) / (job.estimated + _PRIOR)
        of_subtree = self._subtrees.get(request.subtree)
        if of_subtree is not None:
            prior = _SHRINKAGE * (request.est_decode_steps + 1)
            factor = (of_subtree.observed + prior * factor) / (
                of_subtree.estimated + prior
            )
        return min(max(1.0, factor), BIAS_MAX)

    def learn(self, request: ScheduledRequest, steps: int) -> None:
        """A request takes at least ``steps`` decode steps, or took exactly these."""
        observed, estimated = steps + 1, request.initial_est_decode_steps + 1
        sums = [self.job]
        if request.subtree > 0:
            of_subtree = self._subtrees.get(request.subtree)
            if of_subtree is None:
                of_subtree = self._subtrees[request.subtree] = LengthSums()
            sums.append(of_subtree)
        if request.counted:
            for each, since in request.counted_in:
                each.correct(observed - request.counted, since)
        else:
            for each in sums:
                each.learn(observed, estimated)
            request.counted_in = tuple((each, each.learnt) for each in sums)
        request.counted = observed

    def forget_subtrees(self) -> None:
        """The plan has another tree."""
        self._subtrees.clear()


def subtrees(parent: Int32s, leaf_begin: Int32s, leaf_end: Int32s) -> Int32s:
    """For each node the smallest large subtree around it, int32 ``[m]``. 0: the whole job.

    Args:
        parent: int32 ``[m]``, -1 at the root.
        leaf_begin, leaf_end: int32 ``[m]``, the range of the leaves below each node.
    """
    large = leaf_end - leaf_begin >= _SUBTREE
    root: Int32s = np.where(large, np.arange(len(parent)), parent).astype(np.int32)
    root[:1] = 0
    while True:
        above = root[root]
        if np.array_equal(above, root):
            return root
        root = above
