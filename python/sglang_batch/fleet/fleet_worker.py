"""One place of a fleet, as its head sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from ..planner.machine_model import Machine
from ..request import RequestOutput
from .messages import About, Command
from .places import Loss, Place
from .worker_link import WorkerLink
from .worker_meter import WorkerMeter


class WorkerStatus(Enum):
    """What a worker is doing."""

    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    LOST = "lost"
    LEFT_OUT = "left out"
    RELEASED = "released"


@dataclass(slots=True)
class SentLine:
    """A line that a worker has.

    index: its number in the job.
    joined: whether it has begun to run.
    """

    job_id: str
    index: int
    answer: asyncio.Future[RequestOutput]
    joined: bool = False


@dataclass(slots=True)
class FleetWorker:
    """A place, its worker if there is one now, and the lines that it has.

    slots: the fleet's numbers of its replicas.
    about, machine: of the last worker that was attached here.
    lines: by request id.
    failures: crashes in a row without an answer in between.
    num_losses: losses of any kind.
    lost_at: when it was lost, on the event loop's clock.
    reason: of the last loss.
    is_unusable: whether it said what no worker of this version says.
    keeper: has a worker here as long as it runs.
    there_s: seconds in which earlier workers were attached here.
    attached_at: since when the present one is, on the event loop's clock.
    """

    place: Place
    slots: list[int] = field(default_factory=list)
    status: WorkerStatus = WorkerStatus.STARTING
    link: WorkerLink | None = None
    about: About | None = None
    machine: Machine | None = None
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
    def is_live(self) -> bool:
        """Whether it takes lines."""
        return self.status is WorkerStatus.RUNNING

    @property
    def is_idle(self) -> bool:
        """Whether it is there, or looked for, and has no lines."""
        kept = (WorkerStatus.STARTING, WorkerStatus.RUNNING, WorkerStatus.LOST)
        return not self.lines and self.status in kept

    def seconds(self, now: float) -> float:
        """In which a worker was attached here."""
        return self.there_s + (
            0.0 if self.attached_at is None else now - self.attached_at
        )

    def attached(self, link: WorkerLink, about: About, now: float) -> None:
        """A worker is there."""
        self.link, self.about, self.attached_at = link, about, now
        self.status, self.reason = WorkerStatus.RUNNING, ""

    def release(self, now: float) -> None:
        """The worker is not needed any more."""
        if self.keeper is not None:
            self.keeper.cancel()
        self._detached(WorkerStatus.RELEASED, now)

    def send(self, command: Command) -> None:
        """Send a command, if a worker is there."""
        if self.link is not None:
            self.link.send(command)

    def joined(self, job_id: str, numbers: list[int]) -> None:
        """These lines run now."""
        running = set(numbers)
        for line in self.lines.values():
            if line.job_id == job_id and line.index in running:
                line.joined = True

    def lost(self, loss: Loss, now: float) -> list[tuple[str, SentLine]]:
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
    there_s: seconds in which it was there, loaded and attached to this head.
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
