"""How fast the engines of a job's shards are, each against the job's cost model.

A shard keeps its number for the whole job: that of an engine that left has a speed of 0, and
an engine that joins gets the next number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError
from ..costs.cost_model import CostModel
from ..requests import Bools, Floats, Int64s


@dataclass(frozen=True, slots=True, eq=False)
class ShardSpeeds:
    """The speeds of ``k`` engines.

    compute, memory: float64 ``[k]``, how many times as fast as the machine of the job's
        cost model an engine computes, and reads memory. 0 in both: it is not there.

    Raises:
        ConfigError: the arrays are not as long as each other, or a speed is negative or
            not finite, or 0 in one of them only.
    """

    compute: Floats
    memory: Floats

    def __post_init__(self) -> None:
        if self.compute.ndim != 1 or self.compute.shape != self.memory.shape:
            raise ConfigError(
                f"Speeds of shapes {self.compute.shape} and {self.memory.shape}; give "
                "one of computing and one of reading for each engine."
            )
        valid = np.isfinite(self.compute) & np.isfinite(self.memory)
        valid &= (self.compute > 0) & (self.memory > 0) | ~self.there
        if not valid.all():
            engine = int(np.argmin(valid))
            raise ConfigError(
                f"Engine {engine} has speeds of {self.compute[engine]} and "
                f"{self.memory[engine]}; both must be above 0, or both 0 if it is not "
                "there."
            )

    @classmethod
    def equal(cls, num_shards: int) -> ShardSpeeds:
        """Of engines like the machine of the job's cost model."""
        return cls(np.ones(num_shards), np.ones(num_shards))

    @classmethod
    def of_costs(
        cls, job: CostModel, engines: Sequence[CostModel | None]
    ) -> ShardSpeeds:
        """By the times per token of the engines' cost models, None for no engine. Raises
        ConfigError if a model has no time where that of the job has one."""
        compute = [_times_as_fast(job, each, "token_time_s") for each in engines]
        memory = [_times_as_fast(job, each, "kv_read_time_s") for each in engines]
        return cls(np.array(compute, np.float64), np.array(memory, np.float64))

    def __len__(self) -> int:
        return len(self.compute)

    @property
    def there(self) -> Bools:
        """Whether there is an engine for each shard, bool ``[k]``."""
        found: Bools = (self.compute != 0) | (self.memory != 0)
        return found

    def corrected(self, measured: Floats) -> ShardSpeeds:
        """The speeds after a measurement. Only their ratios matter to the plan.

        Args:
            measured: float64 ``[k]``, the work that each engine did, over the work that
                these speeds predict for the same time. 1 for those that did too little to tell.

        Raises:
            ConfigError: there is not one for each engine, or one is not above 0 or not finite.
        """
        if measured.shape != self.compute.shape:
            raise ConfigError(
                f"measured has shape {measured.shape}; give one number for each of the "
                f"{len(self)} engines."
            )
        usable = np.isfinite(measured) & (measured > 0) | ~self.there
        if not usable.all():
            engine = int(np.argmin(usable))
            raise ConfigError(
                f"measured[{engine}]={measured[engine]} must be above 0 and finite; give "
                "1 for an engine that did too little to tell."
            )
        factor = np.where(self.there, measured, 1.0)
        return ShardSpeeds(self.compute * factor, self.memory * factor)

    def take(self, shards: Int64s) -> ShardSpeeds:
        """Those of some engines, in the order of ``shards``."""
        return ShardSpeeds(self.compute[shards], self.memory[shards])

    def slowness(self) -> Floats:
        """Seconds that an engine takes for a second of the cost model, up to a factor: float64
        ``[2, k]``, of computing and of reading. The least is exactly 1, so that engines of equal
        speed are planned as if nobody had measured them. Infinite for those that are not there."""
        speeds = np.stack([self.compute, self.memory])
        found = np.full(speeds.shape, np.inf)
        np.divide(speeds.max(initial=0.0), speeds, out=found, where=speeds > 0)
        return found


def speeds_for(speeds: ShardSpeeds | None, num_shards: int) -> ShardSpeeds:
    """These speeds, or equal ones without any. Raises ConfigError if they are of other shards."""
    if speeds is None:
        return ShardSpeeds.equal(num_shards)
    if len(speeds) != num_shards:
        raise ConfigError(
            f"There are speeds of {len(speeds)} engines for {num_shards} shards; give "
            "one for each, 0 for those that are not there."
        )
    return speeds


def _times_as_fast(job: CostModel, engine: CostModel | None, time: str) -> float:
    if engine is None:
        return 0.0
    wanted, found = float(getattr(job, time)), float(getattr(engine, time))
    if wanted == found:
        return 1.0
    if wanted == 0 or found == 0:
        raise ConfigError(
            f"{time} is {found} for an engine and {wanted} for the job; give both a time "
            "above 0."
        )
    return wanted / found
