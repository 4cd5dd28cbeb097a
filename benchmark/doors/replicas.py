"""Jobs on several replicas: how far apart these end, and what moving requests costs.

A whole job runs, with its planner and dispatcher, on replicas that are engines of
counters (see ``fair``), so the figures are the same on every machine. Lengths are unknown.
Those of the first replica's shard are ten times those of the others. What a replica tells
or answers after a step is seen by the job at once, and the requests sent then join after
one more step, as with SGLang's overlap of steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from report import Figure, print_table

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job import replicas as job_replicas
from sglang_batch.job.job import Job
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.request import BatchRequestInput, RequestOutput, Usage
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

from . import fair

# Most time between the ends of two replicas, over that of the job.
APART = 0.03
SEEDS = (3, 10, 20, 30)
SKEW = 10
JOB = "job"
MAX_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A job and the replicas that run it.

    groups, size: groups of requests that share a prefix, and requests of each.
    system, shared, own: prompt tokens of all requests, of a group, and of one request.
    output: mean output length of the long requests.
    """

    name: str
    groups: int
    size: int
    shared: int
    own: int
    output: int = 100
    system: int = 0
    replicas: int = 2
    policy: str = "auto"
    kv_tokens: int = 20_000
    rows: int = 32
    seed: int = 3

    @property
    def count(self) -> int:
        return self.groups * self.size

    @property
    def machine(self) -> Machine:
        limits = EngineLimits(
            self.kv_tokens,
            step_tokens=fair.STEP_TOKENS,
            min_step_tokens=32,
            max_running=self.rows,
        )
        return Machine(fair.COST, limits)

    def prompts(self) -> list[list[int]]:
        """Prompts, the groups mixed, as arrays of token ids."""
        rng = np.random.default_rng(self.seed)

        def tokens(count: int) -> list[int]:
            found: list[int] = rng.integers(0, 1 << 30, count).tolist()
            return found

        system = tokens(self.system)
        shared = [system + tokens(self.shared) for _ in range(self.groups)]
        order = rng.permutation(self.count) % self.groups
        return [shared[group] + tokens(self.own) for group in order]

    def output_len(self, prompts: list[list[int]]) -> list[int]:
        """The long requests are those of the first shard."""
        n = len(prompts)
        requests = PlanRequests(
            tokens=np.concatenate(prompts).astype(np.int32),
            offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
            max_new_tokens=np.full(n, 10 * self.output, np.int32),
            known_output_len=np.full(n, UNKNOWN, np.int32),
        )
        config = OfflineBatchConfig(policy=self.policy)
        planner = JobPlanner(
            requests, np.arange(n), self.machine, config, max(2, self.replicas)
        )
        mean = np.full(n, self.output / SKEW)
        mean[planner.plans()[0].numbers] = self.output
        spread = np.random.default_rng(self.seed + 1).uniform(0.5, 1.5, n)
        lengths: list[int] = np.maximum(1, np.rint(mean * spread)).astype(int).tolist()
        return lengths


# With their earlier values, by the first seed, when a replica was sent a whole window ahead and
# took unsent requests from others without a plan: the time between both ends, and the
# cached share, in percent.
SHAPES = (
    (Shape("groups of 4", 500, 4, 20, 20), 45.8, 29.6),
    (Shape("groups of 4, dfs", 500, 4, 20, 20, policy="dfs"), 4.5, 26.4),
    (Shape("groups of 4, dual-scan", 500, 4, 20, 20, policy="dual-scan"), 47.6, 29.7),
    (Shape("long prefixes, dfs", 50, 40, 400, 20, policy="dfs"), 11.6, 81.6),
    (Shape("long prefixes", 50, 40, 400, 20), 10.7, 81.5),
    (Shape("little KV", 50, 40, 400, 20, policy="dfs", kv_tokens=6000), 35.4, 81.7),
    (Shape("two levels", 100, 20, 200, 20, system=1000), 30.7, 88.2),
    (Shape("one prefix", 1, 2000, 1000, 20), 33.3, 90.0),
    (Shape("nothing shared", 2000, 1, 0, 60), 29.2, 0.0),
    (Shape("short answers", 100, 20, 60, 60, 10, policy="dual-scan"), 6.5, 44.7),
    (Shape("4 replicas", 1600, 4, 20, 20, replicas=4), 3.0, 27.3),
    (Shape("4 replicas, long prefixes", 160, 40, 400, 20, replicas=4), 29.9, 76.3),
)
# Requests that each side is sent ahead at least, besides the setting in force.
AHEAD = (2, 32, 128, 1024)


# Replicas -----------------------------------------------------------------------------


class Replica(fair.Engine):
    """One engine of counters. Prefixes are evicted if there is no KV for others.

    Attributes:
        computed: prompt tokens that were computed.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.kv_tokens, shape.rows)
        self.machine = shape.machine
        self.computed = 0
        self.ends: list[int] = []
        self.joins: list[int] = []
        self._inbox: list[int] = []
        self._arriving: list[int] = []
        self._job: JobState | None = None

    def plan_is(self, plan: JobPlan) -> None:
        longest = int(plan.est_decode_steps.max(initial=256)) + 1
        self._accounting.extend_forecast(longest)
        job = self._job
        if job is None:
            self._job = JobState(JOB, plan, 1)
            self.jobs.add(self._job)
        elif job.plan.same_requests(plan):
            job.replan(plan)
        else:
            extension = job.extend(plan, self._cached_len)
            for request, own in extension.resized:
                self._accounting.resize(request, own)
            for request in extension.running:
                for node in job.uses.path(request.node):
                    if job.uses.depth[node] <= self._cached_len(request):
                        self._pin(node)

    def _cached_len(self, request: ScheduledRequest) -> int:
        left = self._chunk_left if request is self._chunk else 0
        return request.input_len - left

    def _pin(self, node: int) -> None:
        assert self._job is not None
        if self._job.uses.wanted(node):
            self._job.uses.pin(node, node)

    def send(self, number: int) -> None:
        self._inbox.append(number)

    @property
    def is_busy(self) -> bool:
        return bool(self._inbox or self._arriving or (self._job and len(self._job)))

    def step(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        job = self._job
        assert job is not None
        if not len(job):
            self._arriving += self._inbox
            self._inbox = []
        for number in self._arriving:
            rid = f"{JOB}-{number}"
            self._length[rid], self._job_of[rid] = lengths[number], job
            steps = 10 * max(lengths) - 1
            job.add(fair.Req(rid), number, len(prompts[number]), steps)
        self._arriving, self._inbox = self._inbox, []
        self._step()

    def _now(self) -> Any:
        return super()._now()._replace(idle_frees=True)

    def _join(self) -> int:
        before = {id(request) for request in self._accounting.requests}
        tokens = super()._join()
        self.computed += tokens
        self.joins += [
            request.number
            for request in self._accounting.requests
            if id(request) not in before
        ]
        assert self._job is not None
        uses, accounting = self._job.uses, self._accounting
        while sum(accounting.kv) + uses.locked_tokens + uses.idle_tokens > (
            accounting.capacity
        ):
            node = uses.furthest()
            if not node:
                break
            uses.unpin(node)
        return tokens

    def _end(self, request: ScheduledRequest) -> None:
        job = self._job
        assert job is not None
        fair.end(job, self._accounting, request)
        self.ends.append(request.number)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as :class:`Replicas` renders it."""

    number: int
    input_ids: list[int] | None
    max_new_tokens: int
    ignore_eos: bool = False
    shareable_len: int | None = None
    has_media: bool = False
    adapter: str = ""
    namespace: str = ""


class Replicas:
    """The :class:`~sglang_batch.job.engine.Engine` of a job. Time is that of the counters."""

    model_names = ("counters",)
    is_paused = False

    def __init__(self, shape: Shape) -> None:
        self.machine = shape.machine
        self.num_replicas = shape.replicas
        self.replica_changes = None
        self.default_max_inflight = 1024
        self.max_running_requests = shape.rows * shape.replicas
        self.prompts = shape.prompts()
        self.lengths = shape.output_len(self.prompts)
        self.replicas = [Replica(shape) for _ in range(shape.replicas)]
        self.ends = [0.0] * shape.replicas
        self.plan_bytes = 0
        self.num_plans = 0
        self._plans: list[JobPlan] = []
        self._on_joined: Callable[[list[int]], None] = lambda numbers: None
        self._answers: dict[int, asyncio.Future[RequestOutput]] = {}

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        self._on_joined = on_joined
        return True

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        self.num_plans += 1
        same = self._plans and all(
            plan.same_requests(last)
            for plan, last in zip(plans, self._plans, strict=True)
        )
        for place, (replica, plan) in enumerate(zip(self.replicas, plans, strict=True)):
            data = plan.changes_from(self._plans[place]) if same else plan.to_bytes()
            self.plan_bytes += len(data)
            replica.plan_is(plan)
        self._plans = list(plans)

    async def close_job(self, job_id: str) -> None:
        pass

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> Prepared:
        ids = self.prompts[request.index] if tokenize else None
        return Prepared(request.index, ids, 10 * max(self.lengths))

    def stored(self, prepared: Any) -> None:
        return None

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        number = prepared.number
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.replicas[replica or 0].send(number)
        output: RequestOutput = await answer
        return output

    async def run(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a job, step by step: always the replica whose time is least."""
        work = asyncio.ensure_future(job)
        await _settled()
        for _ in range(MAX_STEPS):
            if work.done():
                return await work
            busy = [each for each in self.replicas if each.is_busy]
            if not busy:
                raise RuntimeError("The job has stalled.")
            replica = min(busy, key=lambda each: each.seconds)
            replica.step(self.prompts, self.lengths)
            self._tell(replica)
            await _settled()
            for each in self.replicas:  # an idle one waits
                if each not in busy and each.is_busy:
                    each.seconds = max(each.seconds, replica.seconds)
        raise RuntimeError(f"The job takes more than {MAX_STEPS} steps.")

    def _tell(self, replica: Replica) -> None:
        if replica.joins:
            self._on_joined(replica.joins)
        for number in replica.ends:
            self.ends[self.replicas.index(replica)] = replica.seconds
            usage = Usage(
                input_tokens=len(self.prompts[number]),
                output_tokens=self.lengths[number],
            )
            self._answers.pop(number).set_result(
                RequestOutput(200, f"{JOB}-{number}", b"{}", usage)
            )
        replica.joins, replica.ends = [], []


async def _settled() -> None:
    """Wait until the job waits for the engine."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    while ready:
        await asyncio.sleep(0)


class _AtOnce(ThreadPoolExecutor):
    """Runs functions when they are submitted: plans take no time."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass(frozen=True, slots=True)
class Run:
    """A job that was run.

    apart: between the first and the last end of a replica, over the last.
    cached: share of the prompt tokens that were not computed.
    control: bytes of plans for each request.
    """

    seconds: float
    apart: float
    cached: float
    control: float
    num_plans: int


def run(shape: Shape) -> Run:
    engine: Any = Replicas(shape)
    n = shape.count
    answered: list[int] = []

    class Requests:
        def __len__(self) -> int:
            return n

        def __getitem__(self, index: int) -> BatchRequestInput:
            return BatchRequestInput(index, str(index), "/v1/completions", b"{}")

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(_AtOnce())
        job = Job(
            JOB, Requests(), range(n), engine, OfflineBatchConfig(policy=shape.policy),
            lambda request, output: answered.append(request.index),
        )  # fmt: skip
        await engine.run(job.run())

    asyncio.run(scenario())
    if sorted(answered) != list(range(n)):
        raise RuntimeError("Some requests were not answered, or twice.")
    last = max(engine.ends)
    prompt = sum(map(len, engine.prompts))
    computed = sum(replica.computed for replica in engine.replicas)
    return Run(
        last, 1 - min(engine.ends) / last, 1 - computed / prompt,
        engine.plan_bytes / n, engine.num_plans,
    )  # fmt: skip


def ahead(shape: Shape) -> list[tuple[object, ...]]:
    """The same job with other numbers of requests that are sent ahead."""
    rows: list[tuple[object, ...]] = []
    least = job_replicas.MIN_AHEAD
    try:
        for job_replicas.MIN_AHEAD in sorted({*AHEAD, least}):
            found = run(shape)
            rows.append(
                (
                    shape.name,
                    job_replicas.MIN_AHEAD,
                    round(found.seconds, 3),
                    round(100 * found.apart, 2),
                    round(100 * found.cached, 2),
                )
            )
    finally:
        job_replicas.MIN_AHEAD = least
    return rows


def measure(quick: bool) -> list[Figure]:
    figures = []
    shapes = SHAPES[:1] if quick else SHAPES
    for shape, was_apart, was_cached in shapes:
        runs = [
            run(replace(shape, seed=seed)) for seed in SEEDS[: 1 if quick else None]
        ]
        apart = [100 * each.apart for each in runs]
        cached = [100 * each.cached for each in runs]
        first = runs[0]
        figures += [
            Figure(
                f"{shape.name}: ends apart", sum(apart) / len(apart), "%",
                ("<=", 100 * APART),
                f"mean of {len(runs)}, at most {max(apart):.2g} %, was {was_apart} %; "
                f"{first.seconds:.3g} s, {first.num_plans} plans of "
                f"{first.control:.0f} B per request",
            ),
            Figure(
                f"{shape.name}: cached share", min(cached), "%", (">=", was_cached),
                f"least of {len(runs)}",
            ),
        ]  # fmt: skip
    if quick:
        return [replace(figure, target=None) for figure in figures]
    print_table(
        "Requests sent ahead of those that run: effect on the job",
        ["shape", "at least", "seconds", "apart, %", "cached, %"],
        [row for shape, _, _ in SHAPES[2:5] for row in ahead(shape)],
    )
    return figures
