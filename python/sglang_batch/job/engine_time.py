"""Engine seconds, divided among the batches that use an engine by the work done for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..planner.costs.cost_model import CostModel
from ..request import RequestOutput, Work

# How long the seconds of a batch that has ended still change with the work of others.
KEPT_S = 3600.0


class EngineTime:
    """The seconds in which an engine has lines, and the part of each batch.

    A batch has the share of them that its work has in the work of all. So equal work costs the
    same, whichever line came first, and one that only waits costs nothing. The parts add up to the
    seconds, and change as the work of others becomes known until :meth:`Account.closed`.

    Args:
        replicas: how many replicas the engine has now: each has seconds of its own.
        cost: the costs by which work counts, asked for once: all pay the same.
    """

    def __init__(
        self,
        replicas: Callable[[], int],
        cost: Callable[[], CostModel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._cost = cost
        self._prices: CostModel | None = None
        self._clock = clock
        self._lines = 0
        self._seconds = 0.0
        self._work_s = 0.0
        self._last = clock()

    def enter(self) -> None:
        """A line comes."""
        self._advance()
        self._lines += 1

    def leave(self) -> None:
        """It goes."""
        self._advance()
        self._lines -= 1

    def _advance(self) -> None:
        now = self._clock()
        if self._lines:
            self._seconds += (now - self._last) * self._replicas()
        self._last = now

    def _work_time_s(self, work: Work) -> float:
        if self._prices is None:
            self._prices = self._cost()
        cost = self._prices
        return float(
            # A line without any, such as one with an error, costs as much as a token.
            max(work.tokens, 1) * cost.token_time_s
            + work.attended * cost.attention_time_s
            + work.reads * cost.kv_read_time_s
        )


class Account:
    """The work that an engine has done for one batch, and when it ended by the engine's clock."""

    def __init__(self, engine: EngineTime) -> None:
        self._engine = engine
        self._work_s = 0.0
        self._final_s: float | None = None
        self.ended_at: float | None = None

    def enter(self) -> None:
        """A line of the batch comes."""
        self._engine.enter()

    def leave(self, work: Work | None) -> None:
        """It goes, with the work of the engine for it. None: it never began."""
        self._engine.leave()
        if work is not None:
            seconds = self._engine._work_time_s(work)
            self._work_s += seconds
            self._engine._work_s += seconds

    @property
    def seconds(self) -> float:
        """Its seconds of the engine, by all work that is known now."""
        if self._final_s is not None:
            return self._final_s
        engine = self._engine
        engine._advance()
        return engine._seconds * self._work_s / engine._work_s if self._work_s else 0.0

    def ended(self) -> None:
        """The batch does no more work."""
        self.ended_at = self._engine._clock()

    @property
    def closed(self) -> bool:
        """Whether its seconds change no more, long enough after its end."""
        engine = self._engine
        if self._final_s is None and self.ended_at is not None:
            if engine._clock() - self.ended_at < KEPT_S:
                return False
            self._final_s = self.seconds
            engine._seconds -= self._final_s
            engine._work_s -= self._work_s
        return self._final_s is not None


def work_of(output: RequestOutput) -> Work:
    """What was done for a line, by its usage if the engine does not tell."""
    if output.work is not None:
        return output.work
    usage = output.usage
    computed = usage.input_tokens - usage.cached_tokens
    return Work.of_sequence(computed, usage.cached_tokens, usage.output_tokens)
