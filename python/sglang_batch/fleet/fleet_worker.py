"""One place of a fleet, as its head sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from ..planner.machine_model import Machine
from ..request import RequestOutput
from .messages import About
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

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def is_live(self) -> bool:
        """Whether it takes lines."""
        return self.status is WorkerStatus.RUNNING

    def joined(self, job_id: str, numbers: list[int]) -> None:
        """These lines run now."""
        running = set(numbers)
        for line in self.lines.values():
            if line.job_id == job_id and line.index in running:
                line.joined = True

    def lost(self, loss: Loss) -> list[tuple[str, SentLine]]:
        """The worker is gone. Returns the lines that it had."""
        self.status, self.link = WorkerStatus.LOST, None
        self.num_losses += 1
        self.reason = loss.reason
        self.meter.idle()
        lines = list(self.lines.items())
        self.lines.clear()
        return lines


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

    @property
    def is_running(self) -> bool:
        return self.status == WorkerStatus.RUNNING.value

    @classmethod
    def of(cls, worker: FleetWorker) -> WorkerState:
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
        )
