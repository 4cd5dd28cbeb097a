"""When a job may end before its last answer, because enough requests have one."""

from __future__ import annotations

import math

# The code of a line that was given up, and its message.
GIVEN_UP = "enough_answers"


def num_enough(share: float, total: int, failed: int) -> int:
    """The answers after which a job may end: this share of the requests that did not fail.
    The same for the groups of a rollout.

    Args:
        share: above 0 and at most 1.
        total: requests of the job.
        failed: those of them that have an error.
    """
    # A share such as 0.07 of 100 is not to be rounded up to 8.
    return math.ceil(round(share * (total - failed), 6))


def given_up_message(share: float) -> str:
    """Why a line has no answer."""
    return (
        "This request was given up because enough of the others had an answer "
        f"({share:.6g} of all)."
    )
