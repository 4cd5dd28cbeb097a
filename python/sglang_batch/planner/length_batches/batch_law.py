"""What a decode step costs, and how many rows of a length it has."""

from __future__ import annotations

from typing import NamedTuple

from ..compiled import jit_in_place
from ..costs.cost_model import tokens_read

# Share of the KV that a batch of equal lengths fills: its rows grow.
GROUP_SHARE = 0.7


# With paged KV, rows are parked from this ``row_share`` on, and where their moves are hidden
# by steps. ``docs/experimental.md`` has the figures.
PARKS_FROM = 8.0


class BatchLaw(NamedTuple):
    """What a decode step costs, and how large a batch may be.

    weight_s: seconds of a step without rows.
    read_s: seconds to read a token's KV.
    row_share, padded: see ``costs.cost_model.tokens_read``.
    capacity: tokens of KV. Of a padded batch, rows times its longest row.
    max_rows: most rows.
    parks: whether rows can leave for a while without being computed again, and that pays.
    """

    weight_s: float
    read_s: float
    row_share: float
    padded: bool
    capacity: float
    max_rows: int
    parks: bool


def parking_pays(row_share: float, *, padded: bool) -> bool:
    """Whether rows of an engine with paged KV are parked in a switch."""
    return padded or row_share >= PARKS_FROM


@jit_in_place
def step_s(law: BatchLaw, rows: float, total: float, longest: float) -> float:
    """Seconds of a decode step."""
    read = tokens_read(total, longest, rows, law.row_share, law.padded)
    return max(law.weight_s + law.read_s * read, 1e-30)


@jit_in_place
def usual_rows(law: BatchLaw, length: float) -> float:
    """Rows of a batch whose rows have all this length."""
    fits = GROUP_SHARE * law.capacity / max(length, 1.0)
    return max(1.0, min(float(law.max_rows), fits))
