"""A field table from texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..compiled import jit
from ..requests import Int32s, Int64s
from .field_table import FieldTable

Bytes = NDArray[np.uint8]


def text_table(values: Int32s, texts: Sequence[Sequence[bytes]]) -> FieldTable:
    """The table of fields whose values are texts. Lengths are bytes, one for a line's end.

    Args:
        values: int32 ``[rows, fields]``, each a position in the texts of its field.
        texts: for each field, its texts with their label, none twice.
    """
    ranked = np.empty_like(values)
    lens, common = [], []
    for field, found in enumerate(texts):
        order = sorted(range(len(found)), key=found.__getitem__)
        rank = np.empty(len(found), np.int32)
        rank[order] = np.arange(len(found), dtype=np.int32)
        ranked[:, field] = rank[values[:, field]]
        ends = np.cumsum([0, *(len(found[i]) for i in order)])
        data = np.frombuffer(b"".join(found[i] for i in order), np.uint8)
        lens.append((np.diff(ends) + 1).astype(np.int32))
        common.append(_common_lens(data, ends))
    return FieldTable(ranked, lens, common)


@jit
def _common_lens(data: Bytes, ends: Int64s) -> Int32s:
    """Bytes that each text has in common with the one before it."""
    common = np.zeros(len(ends) - 1, np.int32)
    for k in range(1, len(common)):
        before, at = ends[k - 1], ends[k]
        most = min(at - before, ends[k + 1] - at)
        same = 0
        while same < most and data[before + same] == data[at + same]:
            same += 1
        common[k] = same
    return common
