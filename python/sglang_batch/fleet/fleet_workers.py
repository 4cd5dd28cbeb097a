"""The workers of a fleet: one at each place, as long as that works.

They start, are lost, leave, are found again and are released while jobs run. The lines that
a lost worker had are given back to whoever waits for their answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from ..errors import ConfigError, EngineError, InputError, SGLangBatchError
from ..job.engine import ReplicaLost
from ..planner.machine_model import Machine
from ..planner.sharding.speeds import ShardSpeeds
from . import plan_bytes
from .fleet_renderer import FleetRenderer
from .fleet_worker import (
    FleetWorker,
    SentLine,
    Superseded,
    WorkerLink,
    WorkerState,
    WorkerStatus,
    cancel_all,
    differ,
    speeds_of,
)
from .head_state import CrashCounts
from .messages import (
    AbortLine,
    Broken,
    EngineQuery,
    Event,
    Leaving,
    LineAnswer,
    LinesJoined,
    Session,
)
from .places import Place, WorkerLost, WorkerUnusable

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A place is left out if its worker crashed or could not start so often in a row, without an
# answer in between, or if it could not be reached for so many seconds.
MOST_FAILURES = 3
MOST_SILENCE_S = 1800.0
# Seconds before a lost worker is looked for, doubled with each failure in a row.
_BACK_OFF_S = 1.0
_MOST_BACK_OFF_S = 60.0
# How long a worker that was found may take to answer for the first time.
_ATTACH_S = 60.0


class FleetWorkers(ABC):
    """Has a worker at each of ``places``, and tells when they come, go and change speed.

    Args:
        epoch: higher than that of any earlier head of these workers.
        min_workers: jobs start with so many, or with all that can start if these are fewer.
        crashes: of earlier heads of the same jobs.
        gives_up: whether a place is left out where no worker lasts, and not tried again.

    Attributes:
        slots: the worker of each replica, and the replica's number there.
        failure: why nothing will run any more.

    Raises:
        ConfigError: there are no places.
    """

    def __init__(
        self,
        places: Sequence[Place],
        epoch: int,
        min_workers: int = 1,
        *,
        crashes: CrashCounts | None = None,
        gives_up: bool = True,
    ) -> None:
        if not places:
            raise ConfigError("A fleet needs a place for one worker or more.")
        self._all = [FleetWorker(place) for place in places]
        self._epoch, self._num_sessions = epoch, 0
        self._renderer, self._crashes = FleetRenderer(), crashes or CrashCounts()
        self._min_workers, self._gives_up = min_workers, gives_up
        self.slots: list[tuple[FleetWorker, int]] = []
        self.failure: SGLangBatchError | None = None
        self._clock = time.monotonic
        self._freeing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._on_change: list[Callable[[], None]] = []
        self._told_speeds: ShardSpeeds | None = None

    @abstractmethod
    def _joined(self, worker: FleetWorker) -> None:
        """A worker is there, and is sent its first commands."""

    @abstractmethod
    def _answered(self, worker: FleetWorker, event: LineAnswer | LinesJoined) -> None:
        """A worker has answered lines, or runs them now."""

    async def connect(self) -> None:
        """Start the workers, and wait until there are enough, or all that can start.

        Raises:
            ConfigError: a worker cannot run with this model and these options, workers
                differ, or none is a worker of this version.
            EngineError: too few could start.
        """
        self._clock = asyncio.get_running_loop().time
        for worker in self._all:
            worker.keeper = asyncio.create_task(self._keep(worker))
        while self.failure is None:
            states = Counter(worker.status for worker in self._all)
            running, out = states[WorkerStatus.RUNNING], states[WorkerStatus.LEFT_OUT]
            settled = running + out == len(self._all)
            if running >= self._min_workers or (settled and running):
                return
            await self.until_changed()
        failure = self.failure
        await self.close()
        raise failure

    def forget(self) -> list[asyncio.Task[None]]:
        """Look after the workers no longer, and leave them as they are. Returns what is being
        cancelled.
        """
        keepers = [worker.keeper for worker in self._all if worker.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        return keepers

    async def close(self) -> None:
        """End the workers that this fleet has started."""
        await asyncio.gather(*self.forget(), *self._freeing, return_exceptions=True)
        await asyncio.gather(
            *(worker.place.free() for worker in self._all), return_exceptions=True
        )

    def __iter__(self) -> Iterator[FleetWorker]:
        return iter(self._all)

    def states(self) -> list[WorkerState]:
        now = self._clock()
        return [WorkerState.of(worker, now) for worker in self._all]

    @property
    def live(self) -> list[FleetWorker]:
        """Those that take lines."""
        return [worker for worker in self._all if worker.is_live]

    @property
    def reference(self) -> FleetWorker:
        """The live worker with the least KV, or the last description of one. Of equals, one
        that has timed its steps.
        """
        known = self.live or [w for w in self._all if w.machine is not None]
        if not known:
            raise EngineError("The fleet has no worker yet; await connect() first.")
        return min(known, key=_preference)

    @property
    def machine(self) -> Machine:
        """That with the least KV: what fits there fits everywhere."""
        machine = self.reference.machine
        assert machine is not None
        return machine

    def check(self) -> None:
        """Raise :attr:`failure`, if there is one."""
        if self.failure is not None:
            raise self.failure

    async def least_busy(self) -> tuple[FleetWorker, int]:
        """The slot of the live worker with the fewest lines, once there is one."""
        while True:
            self.check()
            live = [slot for slot in self.slots if slot[0].is_live]
            if live:
                return min(live, key=lambda slot: len(slot[0].lines))
            await self.until_changed()

    async def ask(self, query: EngineQuery, kind: type[T]) -> list[T]:
        """The answers of all live workers. One that fails has none, or one of no such type."""
        ports = [worker.link.port for worker in self.live if worker.link is not None]
        asked = (port.call("query", query) for port in ports)
        found = await asyncio.gather(*asked, return_exceptions=True)
        answers = []
        for each in found:
            if each is not None and not isinstance(each, BaseException):
                with suppress(msgspec.ValidationError):
                    answers.append(msgspec.convert(each, kind))
        return answers

    @property
    def speeds(self) -> ShardSpeeds:
        return speeds_of([worker for worker, _ in self.slots], self.reference)

    def watch(self, on_change: Callable[[], None]) -> None:
        self._on_change.append(on_change)

    def unwatch(self, on_change: Callable[[], None]) -> None:
        if on_change in self._on_change:
            self._on_change.remove(on_change)

    def release_idle(self) -> None:
        if not any(worker.lines for worker in self._all):
            return  # somebody has to be there
        idle = [worker for worker in self._all if worker.is_idle]
        for worker in idle:
            logger.info("Worker %s is released: nothing is left for it", worker.name)
            worker.release(self._clock())
            freeing = asyncio.create_task(worker.place.free())
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)
        if idle:
            self._notify()

    async def until_changed(self) -> None:
        """Wait until a worker comes or goes, or nothing can run any more."""
        self._changed.clear()
        await self._changed.wait()

    def measured(self) -> None:
        if differ(self.speeds, self._told_speeds):
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        # What one has timed and another's datasheet says differ by far more than machines do.
        machines = [worker.machine for worker in self.live if worker.machine]
        timed = {machine.datasheet is not None for machine in machines}
        for worker in self._all:
            worker.compare(by_datasheet=len(timed) > 1)
        self._told_speeds = self.speeds if self.slots else None
        for on_change in [*self._on_change]:
            on_change()

    async def _keep(self, worker: FleetWorker) -> None:
        """Have a worker at a place, as long as that works."""
        worker.lost_at = self._clock()
        try:
            while not self._gives_up or (
                worker.failures < MOST_FAILURES
                and self._clock() < worker.lost_at + MOST_SILENCE_S
            ):
                if worker.num_losses:
                    back_off_s = _BACK_OFF_S * 2 ** min(worker.failures, 10)
                    await asyncio.sleep(min(back_off_s, _MOST_BACK_OFF_S))
                await self._serve(worker)
            self._leave_out(worker)
        except Superseded as other:
            self._fail(
                EngineError(
                    f"{worker.name} serves another head of this job ({other}), which "
                    "began later than this one; stop one of them."
                )
            )
        except ConfigError as error:
            if any(each.is_live for each in self._all):
                worker.reason = str(error)
                self._leave_out(worker)
            else:
                self._fail(error)
        except WorkerUnusable:
            worker.is_unusable = True
            self._leave_out(worker)
        except Exception:  # ours, or of the worker's messages: others may not have it
            logger.exception("%s", worker.name)
            self._leave_out(worker)

    async def _serve(self, worker: FleetWorker) -> None:
        """One life of a worker: find it, attach it, until it is lost. Raises where there is
        no use in looking for it again.
        """
        worker.status = WorkerStatus.STARTING
        answers, attached = worker.meter.num_answers, False
        refused: Exception | None = None
        try:
            port = await worker.place.find()
            self._num_sessions += 1
            session = Session(self._epoch, self._num_sessions)
            link = WorkerLink(port, session, partial(self._heard, worker))
            await link.attach(_ATTACH_S)
            await self._join(worker, link)
            attached = True
            loss = await self._until_lost(link)
        except WorkerLost as lost:
            loss = lost
        except Exception as error:
            refused, reason = error, str(error)
            if not isinstance(error, Superseded | ConfigError | WorkerUnusable):
                reason = f"{type(error).__name__}: {reason}"
            loss = WorkerLost(reason, crashed=False)
        if worker.status is WorkerStatus.LEAVING:  # it ended as it was asked to
            loss = WorkerLost(worker.reason, crashed=False)
        logger.warning("Worker %s is lost: %s", worker.name, loss.reason)
        if worker.meter.num_answers > answers:
            worker.failures = 0
        if attached:
            worker.lost_at = self._clock()
        lines = worker.lost(loss, self._clock())
        explained = self._crashes.explain([rid for rid, _ in lines])
        worker.failures += loss.crashed and not explained
        self._give_back(lines, loss, worker.name)
        self._notify()
        if loss.crashed:
            await worker.place.free()
        if refused is not None:
            raise refused

    async def _until_lost(self, link: WorkerLink) -> WorkerLost:
        """Have a worker run and render lines until it is lost. Returns why."""
        running = asyncio.create_task(link.run())
        rendering = asyncio.create_task(self._renderer.serve(link.port))
        tasks = {running, rendering}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if rendering.done():
                await (
                    rendering
                )  # which ends by itself if the worker is lost, or unusable
            return await running
        finally:
            await cancel_all(tasks)

    async def _join(self, worker: FleetWorker, link: WorkerLink) -> None:
        about = link.about
        try:
            machine = await asyncio.to_thread(plan_bytes.machine_of, about.machine)
        except InputError as error:
            raise WorkerUnusable(str(error)) from None
        worker.machine = machine
        for other in self._all:
            theirs = (
                about.model_names if other.about is None else other.about.model_names
            )
            if theirs != about.model_names:
                raise ConfigError(
                    f"{other.name} serves {theirs[0]} and {worker.name} serves "
                    f"{about.model_names[0]}; all engines of a fleet need the same model."
                )
        worker.attached(link, about, self._clock())
        while len(worker.slots) < about.num_replicas:
            worker.slots.append(len(self.slots))
            self.slots.append((worker, len(worker.slots) - 1))
        logger.info("Worker %s is ready", worker.name)
        self._joined(worker)
        self._notify()

    def _heard(self, worker: FleetWorker, event: Event) -> None:
        match event:
            case Leaving():
                logger.warning("Worker %s leaves: %s", worker.name, event.reason)
                worker.status, worker.reason = WorkerStatus.LEAVING, event.reason
                waiting = [
                    (r, sent) for r, sent in worker.lines.items() if not sent.joined
                ]
                for rid, _ in waiting:
                    worker.send(AbortLine(rid))
                    del worker.lines[rid]
                loss = WorkerLost(event.reason, crashed=False)
                self._give_back(waiting, loss, worker.name)
                self._notify()
            case Broken():
                raise WorkerLost(event.reason, crashed=True)
            case _:
                self._answered(worker, event)

    def _give_back(
        self, lines: Sequence[tuple[str, SentLine]], loss: WorkerLost, name: str
    ) -> None:
        if loss.crashed:
            self._crashes.add(rid for rid, _ in lines)
        for rid, line in lines:
            if not line.answer.done():
                suspect = self._crashes.is_suspect(rid)
                line.answer.set_exception(
                    ReplicaLost(f"{name}: {loss.reason}", is_suspect=suspect)
                )

    def _leave_out(self, worker: FleetWorker) -> None:
        worker.status = WorkerStatus.LEFT_OUT
        logger.error(
            "Worker %s is left out, after %d crashes in a row: %s",
            worker.name,
            worker.failures,
            worker.reason,
        )
        states = {each.status for each in self._all}
        if states == {WorkerStatus.LEFT_OUT, WorkerStatus.RELEASED}:
            released = (w for w in self._all if w.status is WorkerStatus.RELEASED)
            again = next(released)
            again.keeper = asyncio.create_task(self._keep(again))
        elif states == {WorkerStatus.LEFT_OUT}:
            reasons = "; ".join(f"{w.name}: {w.reason}" for w in self._all)
            usable = any(not w.is_unusable for w in self._all)
            kind = EngineError if usable else ConfigError
            self._fail(kind(f"no engine of the fleet is left ({reasons})."))
        self._notify()

    def _fail(self, failure: SGLangBatchError) -> None:
        if self.failure is None:
            self.failure = failure
        self._renderer.fail(str(failure))
        for worker in self._all:
            for line in worker.lines.values():
                if not line.answer.done():
                    line.answer.set_exception(self.failure)
            worker.lines.clear()
        self._notify()


def _preference(worker: FleetWorker) -> tuple[int, bool]:
    assert worker.machine is not None
    machine = worker.machine
    return machine.limits.kv_capacity_tokens, machine.datasheet is None
