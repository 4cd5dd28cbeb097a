"""How fast the replicas of a fleet are, compared with the machine that jobs are planned for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..planner.costs.cost_model import CostModel
from ..planner.sharding.speeds import ShardSpeeds
from .fleet_worker import FleetWorker

# Measured rates that differ by less are equal: lines differ more than that.
_NOISE = 0.15


def speeds_of(slots: Sequence[FleetWorker], cost: CostModel) -> ShardSpeeds:
    """The speed of each slot: by its worker's costs, and as measured.

    A worker that does less of what its costs predict than the others, in the median, is so
    much slower.

    Args:
        cost: of the machine that jobs are planned for.
    """
    costs = [w.machine.cost if w.is_live and w.machine else None for w in slots]
    speeds = ShardSpeeds.of_costs(cost, costs)
    rates = np.array([w.meter.rate or 0.0 for w in slots])
    known = speeds.there & (rates > 0)
    if not known.any():
        return speeds
    measured = np.ones(len(slots))
    measured[known] = rates[known] / np.median(rates[known])
    measured[np.abs(measured - 1.0) < _NOISE] = 1.0
    return speeds.corrected(measured)


def differ(speeds: ShardSpeeds, told: ShardSpeeds | None) -> bool:
    """Whether speeds are others than those that plans were made with, beyond noise."""
    if told is None or len(told) != len(speeds):
        return True
    ratios = [
        np.divide(new, old, out=np.ones(len(new)), where=old > 0)
        for new, old in ((speeds.compute, told.compute), (speeds.memory, told.memory))
    ]
    changed = bool((np.abs(np.array(ratios) - 1.0) > _NOISE).any())
    return changed or bool((speeds.there != told.there).any())
