"""Processor time against other ways, 4 layers of 256 channels."""

from __future__ import annotations

from report import Figure

from dense_parts.times import times_of


def measure(quick: bool, repeats: int) -> list[Figure]:
    if quick:
        return times_of(2, 128, quick, 1)
    return times_of(4, 256, quick, repeats)
