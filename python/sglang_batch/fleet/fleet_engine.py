"""A fleet of workers as one :class:`~sglang_batch.engine.Engine` with many replicas.

The head of a fleet runs jobs as on one machine: it plans, sends lines and keeps the results,
each once, in its result log. Here its replicas are in workers, which start, die, leave and
join while jobs run. A line that a lost worker had is given back to the job, which sends it
to another one. What the lost worker may still send is of a session that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import __version__
from ..engine import KvUse, PreparedRequest, ReplicaLost
from ..errors import ConfigError, EngineError, SGLangBatchError
from ..job.retrying_engine import engine_died
from ..planner.machine_model import Machine
from ..planner.sharding.speeds import ShardSpeeds
from ..request import (
    BatchRequestInput,
    RequestOutput,
    line_request_id,
    parse_request_id,
)
from ..scheduling.job_plan import JobPlan
from ..scheduling.reports.running_tree import TreeNow
from . import plan_bytes
from .crash_counts import CrashCounts
from .fleet_job import FleetJob
from .fleet_speeds import differ, speeds_of
from .fleet_worker import FleetWorker, SentLine, WorkerState, WorkerStatus
from .messages import (
    AbortLine,
    About,
    Broken,
    CloseJob,
    EndLine,
    EngineQuery,
    Event,
    Leaving,
    LineAnswer,
    LinesJoined,
    Session,
    SetPriority,
)
from .places import Loss, Place, WorkerLost
from .rendering.fleet_line import FleetLine, restored
from .rendering.fleet_renderer import FleetRenderer
from .worker_link import Superseded, WorkerLink

logger = logging.getLogger(__name__)

# A place is left out if its worker crashed or could not start so often in a row, without an
# answer in between, or if it could not be reached for so many seconds.
MOST_FAILURES = 3
MOST_SILENCE_S = 1800.0
# Seconds before a lost worker is looked for, doubled with each failure in a row.
_BACK_OFF_S = 1.0
_MOST_BACK_OFF_S = 60.0
# How long a worker that was found may take to answer for the first time.
_ATTACH_S = 60.0


class FleetEngine:
    """Runs requests on workers at ``places``.

    Args:
        epoch: higher than that of any earlier head of these workers.
        min_workers: the job starts with so many, or with all that can start if these are
            fewer. The others join when they are ready.
        gives_up: whether a place is left out where no worker lasts. False: it is tried
            again as long as the fleet is there.
        crashes: of earlier heads of the same jobs.
        releases: whether the fleet is for one job: a worker ends when nothing is left for it,
            while others still run the job's last lines.

    Raises:
        ConfigError: there are no places.
    """

    def __init__(
        self,
        places: Sequence[Place],
        epoch: int,
        min_workers: int = 1,
        *,
        gives_up: bool = True,
        crashes: CrashCounts | None = None,
        releases: bool = False,
    ) -> None:
        if not places:
            raise ConfigError("A fleet needs a place for one worker or more.")
        self._workers = [FleetWorker(place) for place in places]
        self._epoch = epoch
        self._min_workers = min_workers
        self._gives_up = gives_up
        self._releases = releases
        self._num_sessions = 0
        self._slots: list[tuple[FleetWorker, int]] = []
        self._jobs: dict[str, FleetJob] = {}
        self._crashes = crashes or CrashCounts()
        self._renderer = FleetRenderer()
        self._clock = time.monotonic
        self._freeing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._on_change: list[Callable[[], None]] = []
        self._failure: SGLangBatchError | None = None
        self._told_speeds: ShardSpeeds | None = None

    # Start and end --------------------------------------------------------------------

    async def connect(self) -> None:
        """Start the workers, and wait until there are enough of them.

        Raises:
            ConfigError: a worker cannot run with this model and these options, or
                workers differ.
            EngineError: too few could start.
        """
        self._clock = asyncio.get_running_loop().time
        for worker in self._workers:
            worker.keeper = asyncio.create_task(self._keep(worker))
        while self._failure is None:
            states = Counter(worker.status for worker in self._workers)
            running, out = states[WorkerStatus.RUNNING], states[WorkerStatus.LEFT_OUT]
            settled = running + out == len(self._workers)
            if running >= self._min_workers or (settled and running):
                return
            self._changed.clear()
            await self._changed.wait()
        failure = self._failure
        await self.close()
        raise failure

    async def close(self) -> None:
        """End the workers that this fleet has started."""
        keepers = [w.keeper for w in self._workers if w.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, *self._freeing, return_exceptions=True)
        await asyncio.gather(
            *(worker.place.free() for worker in self._workers), return_exceptions=True
        )

    def states(self) -> list[WorkerState]:
        """The table of workers."""
        now = self._clock()
        return [WorkerState.of(worker, now) for worker in self._workers]

    # The Engine protocol --------------------------------------------------------------

    @property
    def model_names(self) -> tuple[str, ...]:
        return _about(self._reference).model_names

    @property
    def default_max_inflight(self) -> int:
        return sum(_about(w).default_max_inflight for w in self._live) or 1

    @property
    def max_running_requests(self) -> int:
        return sum(_about(w).max_running_requests for w in self._live)

    @property
    def is_paused(self) -> bool:
        return False

    @property
    def machine(self) -> Machine:
        """That with the least KV: what fits there fits everywhere."""
        machine = self._reference.machine
        assert machine is not None
        return machine

    @property
    def num_replicas(self) -> int:
        return len(self._slots)

    @property
    def replica_changes(self) -> FleetEngine:
        return self

    @property
    def speeds(self) -> ShardSpeeds:
        return speeds_of([worker for worker, _ in self._slots], self.machine.cost)

    @property
    def failure(self) -> SGLangBatchError | None:
        return self._failure

    def watch(self, on_change: Callable[[], None]) -> None:
        self._on_change.append(on_change)

    def unwatch(self, on_change: Callable[[], None]) -> None:
        if on_change in self._on_change:
            self._on_change.remove(on_change)

    def release_idle(self) -> None:
        if not self._releases or not any(worker.lines for worker in self._workers):
            return
        idle = [worker for worker in self._workers if worker.is_idle]
        for worker in idle:
            logger.info("Worker %s is released: nothing is left for it", worker.name)
            worker.release(_now())
            freeing = asyncio.create_task(worker.place.free())
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)
        if idle:
            self._notify()

    async def kv_use(self) -> KvUse | None:
        total: Counter[str] = Counter()
        for found in await self._ask(EngineQuery("kv_use")):
            if isinstance(found, dict):
                total.update(found)
        return KvUse(**total) if total else None

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        trees: list[Any] = []
        for found in await self._ask(EngineQuery("running_tree", limit)):
            if isinstance(found, list):
                trees += found
        return trees or None

    async def running_s(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for found in await self._ask(EngineQuery("running_s")):
            if isinstance(found, dict):
                seconds |= found
        return seconds

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        job = self._jobs.setdefault(job_id, FleetJob(plans, lambda _: None))
        job.plans = plans
        for worker in self._live:
            slots, machine = worker.slots, self.machine
            commands = await asyncio.to_thread(job.commands, job_id, slots, machine)
            for command in commands:
                self._send(worker, command)

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        self._jobs[job_id] = FleetJob((), on_joined)
        return True

    async def set_priority(self, job_id: str, priority: int) -> None:
        if (job := self._jobs.get(job_id)) is not None:
            job.priority = priority
        for worker in self._live:
            self._send(worker, SetPriority(job_id, priority))

    async def close_job(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        for worker in self._workers:
            if worker.link is not None:
                self._send(worker, CloseJob(job_id))

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        if not tokenize:
            return FleetLine(request, rid)
        self._check()
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
        if is_suspect and self._has_lines(parse_request_id(prepared.rid)[0]):
            raise ReplicaLost("it waits until it can run alone", is_suspect=True)
        if replica is not None:
            return await self._run(prepared, *self._slots[replica])
        while True:
            slot = await self._least_busy()
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
        for worker in self._live:
            if any(line_request_id(each) == rid for each in worker.lines):
                self._send(worker, EndLine(rid))

    # Lines ----------------------------------------------------------------------------

    async def _run(
        self, line: FleetLine, worker: FleetWorker, replica: int
    ) -> RequestOutput:
        self._check()
        if self._crashes.is_reason(line.rid):
            return engine_died(line.rid, self._crashes[line.rid])
        link = worker.link
        if link is None or not worker.is_live:
            raise ReplicaLost(f"{worker.name} is {worker.status.value}")
        job_id, index, _ = parse_request_id(line.rid)
        sent = SentLine(job_id, index, asyncio.get_running_loop().create_future())
        worker.lines[line.rid] = sent
        worker.meter.busy(_now())
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

    def _has_lines(self, job_id: str) -> bool:
        """Whether workers have lines of a job."""
        lines = (line for worker in self._workers for line in worker.lines.values())
        return any(line.job_id == job_id for line in lines)

    async def _least_busy(self) -> tuple[FleetWorker, int]:
        """The slot of the live worker with the fewest lines, once there is one."""
        while True:
            self._check()
            live = [slot for slot in self._slots if slot[0].is_live]
            if live:
                return min(live, key=lambda slot: len(slot[0].lines))
            self._changed.clear()
            await self._changed.wait()

    def _give_back(
        self, lines: Sequence[tuple[str, SentLine]], loss: Loss, name: str
    ) -> None:
        """Return lines to their jobs."""
        if loss.crashed:
            self._crashes.add(rid for rid, _ in lines)
        for rid, line in lines:
            if not line.answer.done():
                suspect = self._crashes.is_suspect(rid)
                line.answer.set_exception(
                    ReplicaLost(f"{name}: {loss.reason}", is_suspect=suspect)
                )

    # Workers --------------------------------------------------------------------------

    async def _keep(self, worker: FleetWorker) -> None:
        """Have a worker at a place, as long as that works."""
        worker.lost_at = _now()
        try:
            while not self._gives_up or (
                worker.failures < MOST_FAILURES
                and _now() < worker.lost_at + MOST_SILENCE_S
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
            if any(each.is_live for each in self._workers):
                worker.reason = str(error)
                self._leave_out(worker)
            else:
                self._fail(error)
        except Exception as error:
            logger.exception("%s", worker.name)
            self._fail(EngineError(f"{worker.name}: {type(error).__name__}: {error}"))

    async def _serve(self, worker: FleetWorker) -> None:
        """One life of a worker: find it, attach it, until it is lost."""
        worker.status = WorkerStatus.STARTING
        answers, attached = worker.meter.num_answers, False
        try:
            port = await worker.place.find()
            self._num_sessions += 1
            session = Session(self._epoch, self._num_sessions)
            link = WorkerLink(port, session, partial(self._heard, worker))
            await link.attach(_ATTACH_S)
            await self._join(worker, link)
            attached = True
            rendering = asyncio.create_task(self._renderer.serve(port))
            try:
                loss = await link.run()
            finally:
                rendering.cancel()
                await asyncio.wait({rendering})
        except WorkerLost as lost:
            loss = lost.loss
        if worker.status is WorkerStatus.LEAVING:  # it ended as it was asked to
            loss = Loss(worker.reason, crashed=False)
        logger.warning("Worker %s is lost: %s", worker.name, loss.reason)
        if worker.meter.num_answers > answers:
            worker.failures = 0
        if attached:
            worker.lost_at = _now()
        lines = worker.lost(loss, _now())
        explained = self._crashes.explain([rid for rid, _ in lines])
        worker.failures += loss.crashed and not explained
        self._give_back(lines, loss, worker.name)
        self._notify()
        if loss.crashed:
            await worker.place.free()

    async def _join(self, worker: FleetWorker, link: WorkerLink) -> None:
        about = link.about
        worker.machine = await asyncio.to_thread(plan_bytes.machine_of, about.machine)
        _check_version(worker.name, about)
        for other in self._workers:
            if other.about is not None:
                _check_model(other.name, other.about, worker.name, about)
        worker.attached(link, about, _now())
        while len(worker.slots) < about.num_replicas:
            worker.slots.append(len(self._slots))
            self._slots.append((worker, len(worker.slots) - 1))
        logger.info("Worker %s is ready", worker.name)
        # All at once: a line must not be sent before its job is open.
        for job_id, job in self._jobs.items():
            for command in job.commands(job_id, worker.slots, self.machine):
                self._send(worker, command)
        self._notify()

    def _heard(self, worker: FleetWorker, event: Event) -> None:
        match event:
            case LineAnswer():
                line = worker.lines.get(event.rid)
                if line is None or line.answer.done():
                    return  # it was aborted
                output = event.output()
                line.answer.set_result(output)
                assert worker.machine is not None
                cost = worker.machine.cost
                measured = worker.meter.answered(cost, output.usage, _now())
                if measured and differ(self.speeds, self._told_speeds):
                    self._notify()
            case LinesJoined():
                worker.joined(event.job_id, event.numbers)
                if (job := self._jobs.get(event.job_id)) is not None:
                    job.on_joined(event.numbers)
            case Leaving():
                logger.warning("Worker %s leaves: %s", worker.name, event.reason)
                worker.status, worker.reason = WorkerStatus.LEAVING, event.reason
                waiting = [
                    (r, sent) for r, sent in worker.lines.items() if not sent.joined
                ]
                for rid, _ in waiting:
                    self._send(worker, AbortLine(rid))
                    del worker.lines[rid]
                self._give_back(waiting, Loss(event.reason, False), worker.name)
                self._notify()
            case Broken():
                raise WorkerLost(event.reason, crashed=True)

    def _leave_out(self, worker: FleetWorker) -> None:
        worker.status = WorkerStatus.LEFT_OUT
        logger.error(
            "Worker %s is left out after %d failures in a row: %s",
            worker.name,
            worker.failures,
            worker.reason,
        )
        states = {each.status for each in self._workers}
        if states == {WorkerStatus.LEFT_OUT, WorkerStatus.RELEASED}:
            released = (w for w in self._workers if w.status is WorkerStatus.RELEASED)
            again = next(released)
            again.keeper = asyncio.create_task(self._keep(again))
        elif states == {WorkerStatus.LEFT_OUT}:
            reasons = "; ".join(f"{w.name}: {w.reason}" for w in self._workers)
            self._fail(EngineError(f"no engine of the fleet is left ({reasons})."))
        self._notify()

    def _fail(self, failure: SGLangBatchError) -> None:
        """Nothing can run any more."""
        if self._failure is None:
            self._failure = failure
        self._renderer.fail(str(failure))
        for worker in self._workers:
            for line in worker.lines.values():
                if not line.answer.done():
                    line.answer.set_exception(self._failure)
            worker.lines.clear()
        self._notify()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send(self, worker: FleetWorker, command: Any) -> None:
        if worker.link is not None:
            worker.link.send(command)

    def _notify(self) -> None:
        self._changed.set()
        self._told_speeds = self.speeds if self._slots else None
        for on_change in [*self._on_change]:
            on_change()

    async def _ask(self, query: EngineQuery) -> list[object]:
        """The answers of all live workers. One that fails has none."""
        ports = [w.link.port for w in self._live if w.link is not None]
        asked = (port.query(query) for port in ports)
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [each for each in found if not isinstance(each, BaseException)]

    @property
    def _live(self) -> list[FleetWorker]:
        return [worker for worker in self._workers if worker.is_live]

    @property
    def _reference(self) -> FleetWorker:
        """The live worker with the least KV, or what was known of one."""
        known = self._live or [w for w in self._workers if w.machine is not None]
        if not known:
            raise EngineError("The fleet has no worker yet; await connect() first.")
        return min(known, key=_kv_capacity)


def _about(worker: FleetWorker) -> About:
    assert worker.about is not None
    return worker.about


def _check_version(name: str, about: About) -> None:
    """Check that a worker speaks as this head does.

    Raises:
        ConfigError: it does not.
    """
    if about.version != __version__:
        raise ConfigError(
            f"{name} has sglang-batch {about.version} and this process {__version__}; "
            "install the same version everywhere."
        )


def _check_model(name: str, about: About, new_name: str, new: About) -> None:
    """Check that a job can run on both workers.

    Raises:
        ConfigError: it cannot.
    """
    if new.model_names != about.model_names:
        raise ConfigError(
            f"{name} serves {about.model_names[0]} and {new_name} serves "
            f"{new.model_names[0]}; all engines of a fleet need the same model."
        )


def _kv_capacity(worker: FleetWorker) -> int:
    assert worker.machine is not None
    return worker.machine.limits.kv_capacity_tokens


def _now() -> float:
    return asyncio.get_running_loop().time()
