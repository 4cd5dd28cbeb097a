"""A fleet of workers as one :class:`~sglang_batch.job.engine.Engine` with many replicas.

The head of a fleet runs jobs as on one machine. Here its replicas are in workers, which start,
die, leave and join while jobs run. A line that a lost worker had is given back to the job,
which sends it to another one. The lost worker's session has ended: it is not heard any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop

from ..job import traces
from ..job.engine import KvUse, PreparedRequest, ReplicaLost
from ..job.retrying_engine import engine_died
from ..planner.machine_model import Machine
from ..request import (
    BatchRequestInput,
    RequestOutput,
    line_request_id,
    parse_request_id,
)
from ..scheduling.job_plan import JobPlan, unplanned
from ..scheduling.running_tree import TreeNow
from . import plan_bytes
from .fleet_renderer import FleetLine, restored
from .fleet_worker import FleetWorker, SentLine
from .fleet_workers import FleetWorkers
from .messages import (
    AbortLine,
    About,
    CloseJob,
    EndLine,
    EngineQuery,
    LineAnswer,
    LinesJoined,
    OpenJob,
    SetPriority,
    loop_time,
)

logger = logging.getLogger(__name__)


class FleetEngine(FleetWorkers):
    """Runs requests on workers. Arguments and errors are those of :class:`.FleetWorkers`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._jobs: dict[str, FleetJob] = {}

    @property
    def model_names(self) -> tuple[str, ...]:
        return _about(self.reference).model_names

    @property
    def default_max_inflight(self) -> int:
        return sum(_about(w).default_max_inflight for w in self.live) or 1

    @property
    def max_running_requests(self) -> int:
        return sum(_about(w).max_running_requests for w in self.live)

    @property
    def is_paused(self) -> bool:
        return False

    @property
    def num_replicas(self) -> int:
        return len(self.slots)

    @property
    def replica_changes(self) -> FleetWorkers:
        return self

    async def kv_use(self) -> KvUse | None:
        total: Counter[str] = Counter()
        for found in await self.ask(EngineQuery("kv_use"), KvUse):
            total.update(dataclasses.asdict(found))
        return KvUse(**total) if total else None

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        query = EngineQuery("running_tree", limit)
        found: list[Any] = await self.ask(query, list[dict[str, Any]])
        return [tree for trees in found for tree in trees] or None

    async def running_s(self) -> dict[str, float]:
        found = await self.ask(EngineQuery("running_s"), dict[str, float])
        return {rid: seconds for each in found for rid, seconds in each.items()}

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        job = self._jobs.setdefault(job_id, FleetJob(plans, lambda _: None))
        job.plans = plans
        for worker in self.live:
            slots, machine = worker.slots, self.machine
            commands = await asyncio.to_thread(job.commands, job_id, slots, machine)
            for command in commands:
                worker.send(command)

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        self._jobs[job_id] = FleetJob((), on_joined)
        return True

    async def set_priority(self, job_id: str, priority: int) -> None:
        if (job := self._jobs.get(job_id)) is not None:
            job.priority = priority
        for worker in self.live:
            worker.send(SetPriority(job_id, priority))

    async def close_job(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        for worker in self:
            worker.send(CloseJob(job_id))

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        if not tokenize:
            return FleetLine(request, rid)
        self.check()
        rendering = await self._renderer.render(request, rid)
        if isinstance(rendering, LineAnswer):
            return rendering.output()
        return FleetLine(request, rid, rendering)

    def stored(self, prepared: FleetLine) -> bytes | None:
        return prepared.stored()

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> FleetLine:
        return restored(request, rid, stored, input_ids)

    async def execute(
        self, prepared: FleetLine, replica: int | None = None
    ) -> RequestOutput:
        is_suspect = self._crashes.is_suspect(prepared.rid)
        job_id, _, _ = parse_request_id(prepared.rid)
        lines = (line for worker in self for line in worker.lines.values())
        if is_suspect and any(line.job_id == job_id for line in lines):
            raise ReplicaLost("it waits until it can run alone", is_suspect=True)
        if replica is not None:
            return await self._run(prepared, *self.slots[replica])
        while True:
            slot = await self.least_busy()
            try:
                return await self._run(prepared, *slot)
            except ReplicaLost as lost:
                if lost.is_suspect and not is_suspect:
                    raise  # it waits until it can run alone
                logger.info("Request %s runs again on another worker", prepared.rid)

    def end_early(self, rid: str) -> None:
        job_id, _, _ = parse_request_id(rid)
        if (job := self._jobs.get(job_id)) is not None:
            job.ending.add(rid)
        for worker in self.live:
            if any(line_request_id(each) == rid for each in worker.lines):
                worker.send(EndLine(rid))

    @traces.span("fleet call")
    async def _run(
        self, line: FleetLine, worker: FleetWorker, replica: int
    ) -> RequestOutput:
        traces.note(worker=worker.name)
        self.check()
        if self._crashes.is_reason(line.rid):
            return engine_died(line.rid, self._crashes[line.rid])
        link = worker.link
        if link is None or not worker.is_live:
            raise ReplicaLost(f"{worker.name} is {worker.status.value}")
        job_id, index, _ = parse_request_id(line.rid)
        sent = SentLine(job_id, index, asyncio.get_running_loop().create_future())
        worker.lines[line.rid] = sent
        worker.meter.busy(loop_time())
        link.send(line.command(job_id, replica, trusted=link.port.trusted))
        job, first = self._jobs.get(job_id), line_request_id(line.rid)
        if job is not None and first in job.ending:
            link.send(EndLine(first))
        try:
            output = await sent.answer
        except asyncio.CancelledError:
            link.send(AbortLine(line.rid))
            raise
        finally:
            if worker.lines.get(line.rid) is sent:
                del worker.lines[line.rid]
            if not worker.lines:
                worker.meter.idle()
        return output

    def _joined(self, worker: FleetWorker) -> None:
        # All at once: a line must not be sent before its job is open.
        for job_id, job in self._jobs.items():
            for command in job.commands(job_id, worker.slots, self.machine):
                worker.send(command)

    def _answered(self, worker: FleetWorker, event: LineAnswer | LinesJoined) -> None:
        match event:
            case LineAnswer():
                line = worker.lines.get(event.rid)
                if line is None or line.answer.done():
                    return  # it was aborted
                output = event.output()
                line.answer.set_result(output)
                if worker.meter.answered(worker.cost, output.usage, loop_time()):
                    self.measured()
            case LinesJoined():
                worker.joined(event.job_id, event.numbers)
                if (job := self._jobs.get(event.job_id)) is not None:
                    job.on_joined(event.numbers)


@contextmanager
def on_loop(
    engine: FleetEngine,
) -> Iterator[tuple[FleetEngine, asyncio.AbstractEventLoop]]:
    """A fleet and an event loop for its calls, until the block ends."""
    loop = uvloop.new_event_loop()
    try:
        yield engine, loop
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


def _about(worker: FleetWorker) -> About:
    assert worker.about is not None
    return worker.about


@dataclass(slots=True)
class FleetJob:
    """A job's last plans, and who hears which of its lines run.

    plans: one for each slot of the fleet, or one without requests for all. Empty before the
        first.
    ending: ids of samples that are to end early, those not sent yet included.
    """

    plans: Sequence[JobPlan]
    on_joined: Callable[[list[int]], None]
    priority: int = 0
    ending: set[str] = field(default_factory=set)

    def commands(
        self, job_id: str, slots: Sequence[int], machine: Machine
    ) -> list[OpenJob | SetPriority]:
        """What opens the job at a worker, or gives it the last plans.

        Args:
            slots: the fleet's numbers of the worker's replicas. One without a plan gets one
                without requests.
            machine: that jobs are planned for.
        """
        if not self.plans:
            return []
        if len(self.plans) == 1 and not self.plans[0].num_requests:
            plans = [self.plans[0]] * len(slots)
        else:
            plans = [
                self.plans[slot] if slot < len(self.plans) else unplanned(machine)
                for slot in slots
            ]
        opening = OpenJob(job_id, [plan_bytes.to_bytes(plan) for plan in plans])
        if self.priority:
            return [opening, SetPriority(job_id, self.priority)]
        return [opening]
