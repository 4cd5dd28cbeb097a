"""A fleet whose workers, network and time are simulated. Everything else is the real code.

Jobs, plans, the dispatcher, the head and the worker hosts are those of the product. Engines
take virtual seconds for a line. The network loses, delays and doubles calls and is cut in
two; processes of workers die, are asked to leave and start again; heads die too. All of it
follows from one seed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import EngineError
from sglang_batch.fleet.fleet_engine import FleetEngine
from sglang_batch.fleet.head_state import CrashCounts
from sglang_batch.fleet.places import WorkerLost, WorkerPort
from sglang_batch.fleet.worker_host import WorkerHost
from sglang_batch.job.bucketed_job import BucketedJob
from sglang_batch.job.engine import KvUse, PreparedRequest
from sglang_batch.job.job import Job
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.request import (
    BatchRequestInput,
    RequestOutput,
    Sink,
    Usage,
    parse_request_id,
)
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.scheduling.running_tree import TreeNow

URL = "/v1/completions"
# Heads beyond the faults after which a job counts as one that never ends.
MOST_HEADS = 8
MACHINE = Machine(
    CostModel(token_time_s=1e-4, kv_read_time_s=1e-7),
    EngineLimits(kv_capacity_tokens=100_000),
)


@dataclass(frozen=True, slots=True)
class _Prepared:
    request: BatchRequestInput
    rid: str
    input_ids: list[int]
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    shareable_len: int | None = None
    has_media: bool = False
    adapter: str = ""
    namespace: str = ""


@dataclass(slots=True)
class Computed:
    """What all engines together did.

    times: how often each line was run to its end.
    """

    times: Counter[int] = field(default_factory=Counter)


class SimulatedEngine:
    """Runs so many lines at a time, each for so many virtual seconds.

    Args:
        poison: numbers of lines that take the engine down.
        on_death: what takes it down.
    """

    model_names = ("simulated",)
    machine = MACHINE
    num_replicas = 1
    replica_changes = None
    is_paused = False

    def __init__(
        self,
        rows: int,
        seconds: Callable[[int], float],
        poison: frozenset[int],
        on_death: Callable[[], None],
        computed: Computed,
    ) -> None:
        self.max_running_requests = rows
        self.default_max_inflight = 2 * rows
        self._rows = asyncio.Semaphore(rows)
        self._seconds = seconds
        self._poison = poison
        self._on_death = on_death
        self._computed = computed
        self._watching: dict[str, Callable[[list[int]], None]] = {}

    async def kv_use(self) -> KvUse | None:
        return None

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        return None

    async def running_s(self) -> dict[str, float]:
        return {}

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        await asyncio.sleep(0.001)

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        self._watching[job_id] = on_joined
        return True

    async def set_priority(self, job_id: str, priority: int) -> None: ...

    async def close_job(self, job_id: str) -> None:
        self._watching.pop(job_id, None)

    def end_early(self, rid: str) -> None: ...

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        await asyncio.sleep(0)
        return _Prepared(
            request, rid, list(json.loads(request.body)["prompt"].encode())
        )

    def stored(self, prepared: _Prepared) -> bytes | None:
        return b"stored"

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> PreparedRequest:
        assert stored == b"stored"
        return _Prepared(request, rid, list(input_ids))

    async def execute(
        self, prepared: _Prepared, replica: int | None = None
    ) -> RequestOutput:
        job_id, number, _ = parse_request_id(prepared.rid)
        async with self._rows:
            if job_id in self._watching:
                self._watching[job_id]([number])
            await asyncio.sleep(self._seconds(number))
            if number in self._poison:
                self._on_death()
                await asyncio.sleep(1e9)
        self._computed.times[number] += 1
        tokens = len(prepared.input_ids)
        return RequestOutput(200, prepared.rid, b'{"ok": true}', Usage(tokens, 0, 8, 0))


class SimulatedPlace:
    """A process of a worker that can be started again, and the network to it."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self._world = world
        self._host: WorkerHost | None = None
        self._started = self._lived_s = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.cut_until = 0.0
        self.broken = False

    async def find(self) -> SimulatedPort:
        if self._host is None:
            await asyncio.sleep(self._world.load_s)
        if self.broken:
            raise WorkerLost("it does not start", crashed=True)
        if self._host is None:
            self._world.num_starts += 1
            self._started = asyncio.get_running_loop().time()
            world = self._world
            engine = SimulatedEngine(
                world.rows, world.seconds, world.poison, self.kill, world.computed
            )
            self._host = WorkerHost(engine, self.name)
        return SimulatedPort(self, self._host)

    async def free(self) -> None:
        self.kill()

    def kill(self) -> None:
        """The process ends, with all that it was doing."""
        host, self._host = self._host, None
        if host is None:
            return
        self._lived_s += asyncio.get_running_loop().time() - self._started
        for task in (*self._tasks, *host._lines.values(), host._watching):
            if task is not None:
                task.cancel()

    def lived_s(self, now: float) -> float:
        """Seconds in which a process was there."""
        running = 0.0 if self._host is None else now - self._started
        return self._lived_s + running

    def leave(self) -> None:
        """The process is asked to end, and does so when its lines have ended."""
        if (host := self._host) is not None:
            host.leave("SIGTERM")
            self._world.spawn(self._end_when_idle(host))

    async def _end_when_idle(self, host: WorkerHost) -> None:
        await asyncio.sleep(1.0)
        while host.is_busy and self._host is host:
            await asyncio.sleep(0.1)
        if self._host is host:
            self.kill()

    @property
    def is_busy(self) -> bool:
        """Whether a process is there that has lines."""
        return self._host is not None and self._host.is_busy

    def is_process_of(self, host: WorkerHost) -> bool:
        return self._host is host

    async def call(self, host: WorkerHost, work: Coroutine[Any, Any, Any]) -> Any:
        """Work inside of the process, which ends with it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task})
        if task.cancelled():
            raise WorkerLost("its process died", crashed=True)
        return task.result()


class SimulatedPort(WorkerPort):
    """Calls over the simulated network."""

    trusted = True

    def __init__(self, place: SimulatedPlace, host: WorkerHost) -> None:
        self._place = place
        self._host = host

    async def ask(self, name: str, data: bytes) -> bytes:
        answer: bytes = await self._carried(lambda: self._host.call(name, data))
        return answer

    async def _carried(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        world, place = self._place._world, self._place
        random_, now = world.random, asyncio.get_running_loop().time
        await asyncio.sleep(world.delay_s())
        if now() < place.cut_until:
            await asyncio.sleep(place.cut_until - now() + 1.0)
            raise OSError("the network is cut")
        if random_.random() < world.loss:
            await asyncio.sleep(random_.uniform(0.0, 3.0))
            raise OSError("the call was lost")
        if not place.is_process_of(self._host):
            raise WorkerLost("its process died", crashed=True)
        if random_.random() < world.loss:  # it arrives twice
            world.spawn(_ignored(place.call(self._host, work())))
        reply = await place.call(self._host, work())
        await asyncio.sleep(world.delay_s())
        if now() < place.cut_until or random_.random() < world.loss:
            await asyncio.sleep(random_.uniform(0.0, 3.0))
            raise OSError("the reply was lost")
        return reply


async def _ignored(work: Coroutine[Any, Any, Any]) -> None:
    with suppress(OSError, WorkerLost):
        await work


@dataclass(slots=True)
class Outcome:
    """How a job ended.

    answered: how often each line's answer was taken into the result log, by number.
    failed: numbers of the lines that were answered with an error.
    computed: how often engines ran each line to its end.
    losses: workers that were lost.
    heads: heads that the job needed.
    seconds: of the virtual clock.
    engine_s: in which engines were there, added up.
    attached_s: the same as the heads count it.
    released: workers that ended because nothing was left for them.
    """

    answered: Counter[int]
    failed: set[int]
    computed: Counter[int]
    losses: int
    heads: int
    seconds: float
    engine_s: float
    attached_s: float
    released: int


class World:
    """A job of ``num_lines`` lines on ``num_workers`` workers, with faults.

    Args:
        faults: how many happen, at random times in the first ``fault_s`` seconds.
        loss: share of calls, and of replies, that are lost, and of calls that are doubled.
        poison: lines that take down every engine that runs them.
        heads_die: whether heads are among what dies.
        releases: whether workers end when nothing is left for them.
        seconds: how long each line runs. None: at random, 2.5 s in the mean.
        bucket_requests: requests above which the job is planned in buckets.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_lines: int = 120,
        num_workers: int = 3,
        rows: int = 4,
        faults: int = 6,
        fault_s: float = 60.0,
        loss: float = 0.02,
        poison: frozenset[int] = frozenset(),
        heads_die: bool = True,
        policy: str = "dfs",
        releases: bool = False,
        seconds: Sequence[float] | None = None,
        bucket_requests: int = 1_000_000,
    ) -> None:
        self.random = random.Random(seed)
        self.rows, self.loss, self.poison = rows, loss, poison
        self.load_s, self._latency_s, self._no_time = 5.0, 0.01, False
        self.computed = Computed()
        self._lines = [_line(i, self.random) for i in range(num_lines)]
        self._seconds = [self.random.expovariate(0.4) for _ in range(num_lines)]
        if seconds is not None:
            self._seconds = list(seconds)
        self._faults, self._fault_s = faults, fault_s
        self._heads_die = heads_die
        self._releases = releases
        self._config = OfflineBatchConfig(
            policy=policy, bucket_requests=bucket_requests
        )
        self.places = [SimulatedPlace(f"worker {i}", self) for i in range(num_workers)]
        self._answers: Counter[int] = Counter()
        self._failed: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._head: asyncio.Task[None] | None = None
        self._heads = self._losses = self._released = 0
        self._attached_s = 0.0
        self.num_starts = 0
        self._crashes = CrashCounts()  # heads leave them to each other on disk
        self._error: EngineError | None = None

    def seconds(self, number: int) -> float:
        """How long a line runs."""
        return 0.0 if self._no_time else self._seconds[number]

    def delay_s(self) -> float:
        """How long a message travels."""
        return self.random.expovariate(1 / self._latency_s) if self._latency_s else 0.0

    def takes_no_time(self) -> None:
        """Have engines and network take none, on a clock that is real."""
        self.load_s = self._latency_s = 0.0
        self._no_time = True

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something that goes on beside."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> Outcome:
        """Run the job to its end, whatever dies."""
        for _ in range(self._faults):
            self.spawn(self._fault(self.random.uniform(4.0, self._fault_s)))
        while len(self._answers) < len(self._lines):
            self._heads += 1
            if self._heads > self._faults + MOST_HEADS:
                raise AssertionError(f"the job does not end: {self._error}")
            self._head = asyncio.ensure_future(self._run_head(self._heads))
            await asyncio.wait({self._head})
            try:
                self._head.result()
            except asyncio.CancelledError:
                pass
            except EngineError as error:  # the user starts another
                self._error = error
        now = asyncio.get_running_loop().time()
        return Outcome(
            self._answers,
            self._failed,
            self.computed.times,
            self._losses,
            self._heads,
            now,
            sum(place.lived_s(now) for place in self.places),
            self._attached_s,
            self._released,
        )

    async def _run_head(self, epoch: int) -> None:
        todo = [i for i in range(len(self._lines)) if i not in self._answers]
        engine = FleetEngine(self.places, epoch, crashes=self._crashes)

        def sink(request: BatchRequestInput, output: RequestOutput) -> None:
            self._answers[request.index] += 1
            if not output.ok:
                self._failed.add(request.index)

        try:
            await engine.connect()
            await self._job(todo, engine, sink).run()
        finally:
            states = engine.states()
            self._losses += sum(state.losses for state in states)
            self._attached_s += sum(state.there_s for state in states)
            self._released += sum(state.status == "released" for state in states)
            # A head that dies frees nothing.
            await asyncio.gather(*engine.forget(), return_exceptions=True)

    def _job(
        self, todo: list[int], engine: FleetEngine, sink: Sink
    ) -> BucketedJob | Job:
        """As ``run`` runs it, or without the end of workers that are idle."""
        kind = BucketedJob if self._releases else Job
        return kind("job", self._lines, todo, engine, self._config, sink)

    def kill_head(self) -> None:
        """The head's process ends. The next one begins at once."""
        if self._head is not None:
            self._head.cancel()

    async def _fault(self, at: float) -> None:
        await asyncio.sleep(at)
        place = self.random.choice(self.places)
        what = self.random.choice(("kill", "cut", "leave", "head"))
        now = asyncio.get_running_loop().time()
        if what == "kill":
            place.kill()
        elif what == "cut":
            place.cut_until = now + self.random.uniform(1.0, 30.0)
        elif what == "leave":
            place.leave()
        elif what == "head" and self._heads_die:
            self.kill_head()


def _line(number: int, random_: random.Random) -> BatchRequestInput:
    family = random_.randrange(8)
    prompt = f"Family {family}: {'shared ' * (4 * family)}question {number}"
    body = json.dumps({"prompt": prompt, "max_tokens": 64}).encode()
    return BatchRequestInput(number, f"line-{number}", URL, body)
