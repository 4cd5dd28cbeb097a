"""An engine of counters that runs the scheduler's choices, and nothing else."""

from __future__ import annotations

from random import Random

from scheduling_jobs import arrive_all, job_of, plan_of, random_prompts, waiting_of

from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.next_step import Choice, EngineNow, choose, put_back
from sglang_batch.scheduling.open_jobs import ScanPace
from sglang_batch.scheduling.scheduled_request import ScheduledRequest


class ToyEngine:
    """Steps of one job. ``refuse`` is the chance that the engine takes less.

    apart: whether a mixed step would lose, so that prompts have steps of their own.

    computed: by node, how many requests have computed it.
    """

    def __init__(
        self,
        job: JobState,
        random: Random,
        *,
        capacity: int,
        step_tokens: int = 64,
        page_size: int = 1,
        max_running: int = 8,
        refuse: float = 0.0,
        retract: float = 0.0,
        mixed: bool = True,
        apart: bool = False,
    ) -> None:
        self.job, self.random, self.mixed, self.apart = job, random, mixed, apart
        self.kv_accounting = KvAccounting(capacity, page_size, mixed=mixed)
        self.kv_accounting.extend_forecast(400)
        self.scan = ScanPace()
        self.step_tokens, self.page_size = step_tokens, page_size
        self.max_running, self.refuse, self.retract = max_running, refuse, retract
        self.chunk: ScheduledRequest | None = None
        self.chunk_left = 0
        self.starting: list[ScheduledRequest] = []
        self.length = {}
        for request in waiting_of(job):
            self.length[request.req.rid] = random.randint(
                0, min(request.max_decode_steps, 30)
            )
        self.computed: dict[int, int] = {}
        self.trace: list[tuple[tuple[str, ...], int]] = []

    @property
    def kept_for_later(self) -> int:
        return self.job.uses.idle_tokens

    @property
    def free(self) -> int:
        """Tokens that are free or hold KV that no request needs."""
        held = sum(self.kv_accounting.kv) + self.job.uses.locked_tokens
        return self.kv_accounting.capacity - held - self.kept_for_later

    def now(self) -> EngineNow:
        rows = len(self.kv_accounting.requests) - len(self.starting)
        rows -= self.kv_accounting.num_complete + (self.chunk is not None)
        return EngineNow(
            step_tokens=self.step_tokens,
            decode_rows=rows,
            chunk=self.chunk,
            chunk_left=self.chunk_left,
            rows=self.max_running - self.kv_accounting.num_running,
            room=self.free,
            page_size=self.page_size,
            mixed=self.mixed,
            apart=lambda _: self.apart,
        )

    def begin(self) -> None:
        for request in self.starting:
            self.kv_accounting.begin_decoding(request)
        self.starting.clear()

    def refused(self, choice: Choice) -> list[ScheduledRequest]:
        """The last of the requests, which the engine does not take after all."""
        if self.random.random() >= self.refuse or not choice.requests:
            return []
        return choice.requests[self.random.randrange(len(choice.requests)) :]

    def run(self, choice: Choice) -> None:
        """Compute the chosen requests, and a decode step of the others."""
        decodes = sum(self.kv_accounting.decoding) > 0
        shared = self.mixed and not self.apart
        decodes = decodes and (shared or choice.tokens == 0)
        extends = self.extends(choice.requests)
        refused = self.refused(choice)
        for request in refused:
            put_back(self.job, self.kv_accounting, request)
        tokens = choice.tokens
        if self.chunk is not None:
            tokens = self.prefill(self.chunk, self.chunk_left, tokens)
        self.trace.append(
            (tuple(request.req.rid for request in choice.requests), choice.tokens)
        )
        taken = choice.requests[: len(choice.requests) - len(refused)]
        for request, extend in zip(taken, extends, strict=False):
            tokens = self.prefill(request, extend, tokens)
        if decodes:
            self.kv_accounting.count_decode_step()
        self.end_lines()

    def extends(self, requests: list[ScheduledRequest]) -> list[int]:
        """Tokens of the chosen requests' prompts that the cache does not have."""
        uses, counts = self.job.uses, []
        users = uses.running.copy()
        for request in requests:
            users[uses.path(request.node)] -= 1
        for request in requests:
            cached = 0
            for node in uses.path(request.node):
                others_have_it = users[node] > 0 and node not in uses.computing
                if node in uses.pins or others_have_it:
                    cached = int(uses.depth[node])
                    break
            users[uses.path(request.node)] += 1
            counts.append(max(1, request.input_len + request.steps - cached))
        return counts

    def prefill(self, request: ScheduledRequest, left: int, tokens: int) -> int:
        some = min(left, tokens)
        self.chunk, self.chunk_left = None, 0
        if some < left:
            self.chunk, self.chunk_left = request, left - some
        else:
            self.starting.append(request)
        uses = self.job.uses
        done = uses.computed(request, request.input_len + request.steps - (left - some))
        for node in done:
            self.computed[node] = self.computed.get(node, 0) + 1
            if uses.wanted(node):
                uses.pin(node, node)
        self.job.release_followers(done)
        for node in uses.spent(request):
            uses.unpin(node)
        return tokens - some

    def end_lines(self) -> None:
        """Requests end. Now and then one gives its KV back and waits again."""
        for request in self.kv_accounting.requests:
            if not request.decoding:
                continue
            steps = request.steps_done(self.kv_accounting.clock)
            ended = steps >= self.length[request.req.rid]
            if not ended and self.random.random() >= self.retract:
                continue
            self.kv_accounting.remove(request)
            left = self.job.uses.leave(request, offloaded=not ended)
            self.job.release_followers(left)
            if ended:
                self.kv_accounting.learn_output_len(request)
                self.job.forget(request)
            else:
                self.job.backlog.add(request)

    def step(self) -> Choice:
        self.begin()
        choice = choose([self.job], self.kv_accounting, self.now(), self.scan)
        self.run(choice)
        return choice


def random_job(seed: int, *, dual: bool, page_size: int) -> tuple[JobState, Random]:
    """A job whose requests have all arrived."""
    random = Random(seed)
    prompts = random_prompts(random, random.randint(1, 40), page_size)
    position = list(range(len(prompts)))
    random.shuffle(position)
    density = [2.0 ** (3 - 6 * i / len(position)) for i in range(len(position))]
    plan = plan_of(
        prompts,
        position=position,
        density=density if dual else None,
        num_left=random.randint(0, len(position)),
        est_decode_steps=random.choice([2.0, 8.0, 30.0]),
    )
    job = job_of(plan, page_size)
    arrive_all(job, max_decode_steps=random.choice([0, 5, 40]))
    return job, random


def trace_of(seed: int, *, dual: bool) -> list[tuple[tuple[str, ...], int]]:
    """What was chosen in each step of a run."""
    job, random = random_job(seed, dual=dual, page_size=4)
    engine = ToyEngine(job, random, capacity=600, page_size=4, refuse=0.2, retract=0.01)
    while len(job) and len(engine.trace) < 5000:
        engine.step()
    return engine.trace
