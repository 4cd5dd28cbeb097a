"""One place of a fleet, as its head sees it: its session, its lines and its speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from ..planner.costs.cost_model import CostModel
from ..planner.machine_model import Machine
from ..planner.sharding.speeds import ShardSpeeds
from ..request import RequestOutput, Usage
from .messages import (
    About,
    Command,
    Event,
    Exchange,
    Reply,
    Session,
    SessionRefused,
    loop_time,
)
from .places import Place, WorkerLost, WorkerPort
from .session_ends import HeadEnd

# A measurement needs so many answers in so many busy seconds, and is then started anew.
_MIN_ANSWERS = 64
_MIN_SECONDS = 10.0
# The share of a new measurement in the rate. Lines differ, so one says little.
_NEW_SHARE = 0.5


class WorkerMeter:
    """Measures a worker while it has lines.

    Attributes:
        rate: predicted seconds of the work that was done in each second, about constant for
            workers whose costs are right. None until it is known.
        tokens_per_s: prompt and output tokens of the last measurement, None before it.
        num_answers, usage: of all lines.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self.tokens_per_s: float | None = None
        self.num_answers = 0
        self.usage = Usage()
        self._begun: float | None = None
        self._answers = 0
        self._work_s = 0.0
        self._tokens = 0

    def busy(self, now: float) -> None:
        """It has lines, from now on."""
        if self._begun is None:
            self._begin(now)

    def idle(self) -> None:
        """It has none: the measurement so far is cut short, and does not count."""
        self._begun = None

    def forget_rate(self) -> None:
        """It was in seconds of other costs."""
        self.rate = self._begun = None

    def answered(self, cost: CostModel, usage: Usage, now: float) -> bool:
        """Add an answer. Returns whether :attr:`rate` is new. ``cost``: of the worker's
        machine.
        """
        self.num_answers += 1
        self.usage += usage
        if self._begun is None:
            return False
        self._answers += 1
        self._work_s += work_s(cost, usage)
        self._tokens += usage.input_tokens + usage.output_tokens
        seconds = now - self._begun
        if self._answers < _MIN_ANSWERS or seconds < _MIN_SECONDS:
            return False
        found = self._work_s / seconds
        last = self.rate
        self.rate = found if last is None else last + _NEW_SHARE * (found - last)
        self.tokens_per_s = self._tokens / seconds
        self._begin(now)
        return True

    def _begin(self, now: float) -> None:
        self._begun, self._answers, self._work_s, self._tokens = now, 0, 0.0, 0


def work_s(cost: CostModel, usage: Usage) -> float:
    """Seconds of one answered line: compute of its new tokens, and reads of its KV."""
    new = max(usage.input_tokens - usage.cached_tokens, 0)
    prefill_s = float(cost.prefill_time_s(new, usage.cached_tokens))
    decode_s = cost.token_time_s * usage.output_tokens
    memory_s = float(cost.memory_time_s(usage.input_tokens, usage.output_tokens))
    return float(cost.step_time_s(prefill_s + decode_s, memory_s))


class WorkerStatus(Enum):
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    LOST = "lost"
    LEFT_OUT = "left out"
    RELEASED = "released"


@dataclass(slots=True)
class SentLine:
    """A line that a worker has: its number in the job, and whether it has begun to run."""

    job_id: str
    index: int
    answer: asyncio.Future[RequestOutput]
    joined: bool = False


@dataclass(slots=True)
class FleetWorker:
    """A place, its worker if there is one now, and the lines that it has.

    slots: the fleet's numbers of its replicas.
    about, machine: of the last worker that was attached here.
    by_datasheet: whether it is compared with others by datasheets: one of them has timed no
        steps yet.
    lines: by request id.
    failures: crashes in a row without an answer in between.
    num_losses: losses of any kind.
    lost_at: when it was lost, on the event loop's clock.
    reason: of the last loss.
    is_unusable: whether it broke the protocol of this version.
    keeper: has a worker here as long as it runs.
    there_s: seconds in which earlier workers were attached here, times their replicas.
    attached_at: since when the present one is, on the event loop's clock.
    """

    place: Place
    slots: list[int] = field(default_factory=list)
    status: WorkerStatus = WorkerStatus.STARTING
    link: WorkerLink | None = None
    about: About | None = None
    machine: Machine | None = None
    by_datasheet: bool = False
    lines: dict[str, SentLine] = field(default_factory=dict)
    meter: WorkerMeter = field(default_factory=WorkerMeter)
    failures: int = 0
    num_losses: int = 0
    lost_at: float = 0.0
    reason: str = ""
    is_unusable: bool = False
    keeper: asyncio.Task[None] | None = None
    there_s: float = 0.0
    attached_at: float | None = None

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def cost(self) -> CostModel:
        """By which it is measured and compared with others."""
        assert self.machine is not None
        datasheet = self.machine.datasheet if self.by_datasheet else None
        return datasheet or self.machine.cost

    @property
    def is_live(self) -> bool:
        """Whether it takes lines."""
        return self.status is WorkerStatus.RUNNING

    @property
    def is_idle(self) -> bool:
        """Whether it is there, or looked for, and has no lines."""
        kept = (WorkerStatus.STARTING, WorkerStatus.RUNNING, WorkerStatus.LOST)
        return not self.lines and self.status in kept

    def seconds(self, now: float) -> float:
        """In which a worker was attached here, those of each of its replicas."""
        if self.attached_at is None or self.about is None:
            return self.there_s
        return self.there_s + (now - self.attached_at) * self.about.num_replicas

    def attached(self, link: WorkerLink, about: About, now: float) -> None:
        self.link, self.about, self.attached_at = link, about, now
        self.status, self.reason = WorkerStatus.RUNNING, ""

    def compare(self, by_datasheet: bool) -> None:
        """Compare it with others so from now on."""
        if self.by_datasheet != by_datasheet:
            self.by_datasheet = by_datasheet
            self.meter.forget_rate()

    def release(self, now: float) -> None:
        if self.keeper is not None:
            self.keeper.cancel()
        self._detached(WorkerStatus.RELEASED, now)

    def send(self, command: Command) -> None:
        if self.link is not None:
            self.link.send(command)

    def joined(self, job_id: str, numbers: list[int]) -> None:
        running = set(numbers)
        for line in self.lines.values():
            if line.job_id == job_id and line.index in running:
                line.joined = True

    def lost(self, loss: WorkerLost, now: float) -> list[tuple[str, SentLine]]:
        """The worker is gone. Returns the lines that it had."""
        self._detached(WorkerStatus.LOST, now)
        self.num_losses += 1
        self.reason = loss.reason
        lines = list(self.lines.items())
        self.lines.clear()
        return lines

    def _detached(self, status: WorkerStatus, now: float) -> None:
        self.there_s, self.attached_at = self.seconds(now), None
        self.status, self.link = status, None
        self.meter.idle()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A row of the table of workers.

    lines, running: lines that it has, and those of them that run.
    answered: lines that it has answered.
    tokens: prompt and output tokens of them.
    tokens_per_s: tokens in a second as last measured, None before that and without lines.
    cached_share: share of their prompt tokens that came from the cache, 0 to 1.
    losses: how often it was lost.
    reason: of the last loss, or why it is left out.
    there_s: seconds in which it was there, loaded and attached to this head, times its
        replicas.
    """

    name: str
    status: str
    lines: int
    running: int
    answered: int
    tokens: int
    tokens_per_s: float | None
    cached_share: float
    losses: int
    reason: str
    there_s: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.status == WorkerStatus.RUNNING.value

    @classmethod
    def of(cls, worker: FleetWorker, now: float) -> WorkerState:
        usage, rate = worker.meter.usage, worker.meter.tokens_per_s
        return cls(
            worker.name,
            worker.status.value,
            len(worker.lines),
            sum(line.joined for line in worker.lines.values()),
            worker.meter.num_answers,
            usage.input_tokens + usage.output_tokens,
            round(rate, 1) if rate is not None and worker.lines else None,
            round(usage.cache_hit_rate, 4),
            worker.num_losses,
            worker.reason,
            round(worker.seconds(now), 3),
        )


# Measured rates that differ by less are equal: lines differ more than that.
_NOISE = 0.15


def speeds_of(slots: Sequence[FleetWorker], reference: FleetWorker) -> ShardSpeeds:
    """The speed of each slot: by its worker's costs, and as measured.

    A worker that does less of what its costs predict than the others, in the median, is so
    much slower. ``reference``: whose machine jobs are planned for.
    """
    costs = [w.cost if w.is_live else None for w in slots]
    speeds = ShardSpeeds.of_costs(reference.cost, costs)
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


# A call waits so long for an event, as a share of the lease.
_WAIT_SHARE = 1 / 4
# Seconds before a failed call is repeated.
_RETRY_S = 0.2
# So long after a command, a call waits for others.
_GATHER_S = 0.002


class Superseded(Exception):
    """A worker serves another head, which began later."""

    def __init__(self, session: Session) -> None:
        super().__init__(f"epoch {session.epoch}")


class WorkerLink:
    """Sends commands to a worker and passes on its events, each once and in order, to
    ``on_event``. ``about``: the worker, once it is attached.
    """

    about: About

    def __init__(
        self, port: WorkerPort, session: Session, on_event: Callable[[Event], None]
    ) -> None:
        self.port = port
        self._end = HeadEnd(session)
        self._on_event = on_event
        self._commands = asyncio.Event()
        self._silence_s = 0.0
        self._heard = 0.0

    async def attach(self, patience_s: float) -> None:
        """Begin the session, and repeat calls that fail for ``patience_s``.

        Raises:
            WorkerLost: the worker does not answer.
            Superseded: it serves a later head.
        """
        deadline = loop_time() + patience_s
        found: About | SessionRefused
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    found = await self.port.call("attach", self._end.session)
                break
            except (OSError, TimeoutError) as error:
                if loop_time() >= deadline:
                    raise _silent(patience_s, error) from None
            await asyncio.sleep(_RETRY_S)
        if isinstance(found, SessionRefused):
            raise self._refusal(found)
        self.about = found
        self._silence_s = found.lease_s
        self._heard = loop_time()

    def send(self, command: Command) -> None:
        """Send a command with the next call. Without a worker, nobody hears it."""
        self._end.add(command)
        self._commands.set()

    async def run(self) -> WorkerLost:
        """Exchange calls until the worker is lost. Returns why. Raises Superseded if it serves
        a later head.
        """
        tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._talk())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done = next(task for task in tasks if task.done())
            done.result()
            raise AssertionError("both run until they fail")
        except WorkerLost as lost:
            return lost
        finally:
            await cancel_all(tasks)

    async def _listen(self) -> None:
        """Always have a call with the worker, which waits for its next event."""
        while True:
            wait_s = _WAIT_SHARE * self._silence_s
            await self._call(self._end.waiting_call(wait_s))

    async def _talk(self) -> None:
        """Send commands at once, one call after the other."""
        while True:
            await self._commands.wait()
            self._commands.clear()
            await asyncio.sleep(_GATHER_S)  # take those along that come with it
            while self._end.has_unsent:
                call = self._end.call()
                applied = await self._call(call)
                if applied < call.first + len(call.commands) - 1:
                    self._end.repeat()

    async def _call(self, call: Exchange) -> int:
        """One exchange. Returns the last command that the worker has, as far as known."""
        reply: Reply | SessionRefused
        try:
            async with asyncio.timeout_at(self._heard + self._silence_s):
                reply = await self.port.call("exchange", call)
        except (OSError, TimeoutError) as error:
            if loop_time() - self._heard >= self._silence_s:
                raise _silent(self._silence_s, error) from None
            await asyncio.sleep(_RETRY_S)
            return 0
        if isinstance(reply, SessionRefused):
            raise self._refusal(reply)
        self._heard = loop_time()
        for event in self._end.receive(reply):
            self._on_event(event)
        return reply.applied

    def _refusal(self, refused: SessionRefused) -> Exception:
        theirs = refused.session
        if theirs is not None and theirs.epoch > self._end.session.epoch:
            return Superseded(theirs)
        return WorkerLost("it has started anew", crashed=theirs is None)


def _silent(seconds: float, error: BaseException) -> WorkerLost:
    reason = str(error) or type(error).__name__
    return WorkerLost(f"no answer in {seconds:g} s ({reason})", crashed=False)


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end. Their errors count as seen."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
