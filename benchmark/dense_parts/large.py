"""The same as ``small``, 6 layers of 512 channels.

A run takes four to five minutes, so there is one for three of the small model.
"""

from __future__ import annotations

from report import Figure

from dense_parts.times import times_of


def measure(quick: bool, repeats: int) -> list[Figure]:
    if quick:
        return times_of(2, 256, quick, 1)
    return times_of(6, 512, quick, max(1, repeats // 3))
