"""The machine that an engine's jobs are planned for, as its own steps show it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ....planner.costs.step_law import StepLaw
from ....planner.machine_model import Machine
from ....store.measured.timed_steps_file import TimedStepsKey
from ...compat.server_types import SchedulerState, TokenizerManager
from ..machine import datasheet_cost, engine_key, machine_of
from .timed_costs import keep_timed_steps, kept_law


class LearntMachine:
    """Costs and limits of an engine, and how they change with the steps that it times.

    Args:
        state: the internal state of the engine's first scheduler.

    Attributes:
        machine: for the next plan.
    """

    def __init__(self, manager: TokenizerManager, state: SchedulerState) -> None:
        self._manager = manager
        self._state = state
        self._learns = manager.server_args.offline_config.learn_costs
        self.machine: Machine = machine_of(manager, state)

    @contextmanager
    def by_datasheet(self) -> Iterator[None]:
        """Plan with the datasheet's costs, by which prompts and decodes are always mixed, and
        learn nothing meanwhile."""
        learns, self._learns = self._learns, False
        cost = datasheet_cost(self._manager, self._state)
        self.machine = replace(self.machine, cost=cost)
        try:
            yield
        finally:
            self._learns = learns

    async def keep_steps(self) -> bool:
        """Keep the steps that were timed since the last call. Whether plans may learn from
        them."""
        if not self._learns:
            return False
        return await keep_timed_steps(self._manager, self._key) > 0

    async def learn(self) -> None:
        """Plan the next jobs with the costs of all steps that are kept.

        While no job is open: the work of open jobs is counted in seconds by their plans' costs.
        """
        self.machine = await asyncio.to_thread(machine_of, self._manager, self._state)

    def law(self) -> StepLaw | None:
        """The law of all steps that are kept. None if they are too few."""
        return kept_law(datasheet_cost(self._manager, self._state), self._key)

    @property
    def _key(self) -> TimedStepsKey:
        return engine_key(self._manager, self._state)
