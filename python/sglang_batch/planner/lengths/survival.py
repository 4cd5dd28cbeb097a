"""Lengths of answers that are not complete yet, estimated from those that are.

At any moment of a run, the answers that have ended are the short ones. A running request
is a *censored* observation: its length is only known to exceed what it has so far. The
Kaplan-Meier estimator uses both. It is the same as giving each running request the mean
of all lengths beyond its own, in which the running ones count in the same way.

Beyond the last answer that ended, lengths are taken to be exponentially distributed: the
tokens still to come are as many however long a request has run.
"""

from __future__ import annotations

import numpy as np

from ..compiled import jit
from ..requests import Bools, Floats, Int64s


def completed(
    length: Int64s, censored: Bools, default_excess: float
) -> tuple[Floats, Floats]:
    """Expectation of each length and of its square.

    The mean of these is that of the Kaplan-Meier estimate.

    Args:
        length: int64 ``[k]``, tokens of each answer, those so far if it is censored.
        censored: bool ``[k]``, whether it continues.
        default_excess: tokens still to come if no answer has ended.

    Returns:
        float64 ``[k]`` each. Of an answer that ended, its length and the square of that.
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
    """Tokens still to come of a long answer, by the lengths above the median.

    Of exponential lengths it is the maximum-likelihood estimate: all tokens above the
    median, over the number of answers that ended there.

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
