"""The machine that an engine's jobs are planned for, as its own steps show it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ....planner.machine_model import Machine
from ....planner.steps.step_law import StepLaw
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
        """Plan with the datasheet's costs meanwhile, by which prompts and decodes are always
        mixed, whatever the steps show."""
        learns, self._learns = self._learns, False
        cost = datasheet_cost(self._manager, self._state)
        self.machine = replace(self.machine, cost=cost)
        try:
            yield
        finally:
            self._learns = learns

    async def after_jobs(self) -> None:
        """No job is open: plan the next ones with the costs of all steps so far.

        Not before, since the work of open jobs is counted in seconds by their plans' costs.
        """
        if self._learns and await keep_timed_steps(self._manager, self._key):
            self.machine = await asyncio.to_thread(
                machine_of, self._manager, self._state
            )

    async def law(self) -> StepLaw | None:
        """Keep the steps that were timed so far. The law that all kept ones show, None if they
        are too few."""
        await keep_timed_steps(self._manager, self._key)
        return kept_law(datasheet_cost(self._manager, self._state), self._key)

    @property
    def _key(self) -> TimedStepsKey:
        return engine_key(self._manager, self._state)
