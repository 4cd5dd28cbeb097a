"""Finds the leaves of a plan by the numbers of their requests.

The numbers of an open-ended job grow without end, while its plan has only the latest, so
the table begins at the lowest number of the plan.
"""

from __future__ import annotations

import numpy as np

from ..planner.requests import Int32s


class LeafNumbers:
    """The leaf of each request of one plan.

    Args:
        number: int32 ``[n]`` by leaf, the numbers of the requests in the job.

    Attributes:
        lowest: the lowest number, 0 if there is none.
    """

    def __init__(self, number: Int32s) -> None:
        self.lowest = int(number.min()) if len(number) else 0
        most = int(number.max()) if len(number) else -1
        self._leaf = np.full(most - self.lowest + 1, -1, np.int32)
        self._leaf[number - self.lowest] = np.arange(len(number), dtype=np.int32)

    def of(self, number: int) -> int:
        """The leaf of a request, -1 if it is not planned."""
        place = number - self.lowest
        return int(self._leaf[place]) if 0 <= place < len(self._leaf) else -1

    def of_all(self, number: Int32s) -> Int32s:
        """The leaf of each request, int32, -1 for those that are not planned."""
        place = number - self.lowest
        inside = (place >= 0) & (place < len(self._leaf))
        leaf = np.full(len(number), -1, np.int32)
        leaf[inside] = self._leaf[place[inside]]
        return leaf
