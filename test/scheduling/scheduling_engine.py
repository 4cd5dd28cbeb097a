"""An engine of counters that does what the scheduler chooses, and nothing else."""

from __future__ import annotations

from random import Random

from scheduling_jobs import arrive_all, job_of, plan_of, random_prompts

from sglang_batch.scheduling.admission import Choice, EngineNow, choose, put_back
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.line import Line
from sglang_batch.scheduling.occupancy import Occupancy


class ToyEngine:
    """Steps of one job. ``refuse`` is the chance that the engine takes less.

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
    ) -> None:
        self.job, self.random, self.mixed = job, random, mixed
        self.occupancy = Occupancy(capacity)
        self.occupancy.cover(400)
        self.step_tokens, self.page_size = step_tokens, page_size
        self.max_running, self.refuse, self.retract = max_running, refuse, retract
        self.chunk: Line | None = None
        self.chunk_left = 0
        self.starting: list[Line] = []
        self.length = {}
        for line in job.waiting():
            self.length[line.req.rid] = random.randint(0, min(line.max_steps, 30))
        self.computed: dict[int, int] = {}
        self.trace: list[tuple[tuple[str, ...], int]] = []

    @property
    def kept_for_later(self) -> int:
        return self.job.uses.idle_tokens

    @property
    def free(self) -> int:
        """Tokens that are free or hold nothing that is needed."""
        held = sum(self.occupancy.kv) + self.job.uses.locked_tokens
        return self.occupancy.capacity - held - self.kept_for_later

    def now(self) -> EngineNow:
        rows = len(self.occupancy.lines) - len(self.starting)
        rows -= self.occupancy.complete + (self.chunk is not None)
        return EngineNow(
            step_tokens=self.step_tokens,
            decode_rows=rows,
            chunk=self.chunk,
            chunk_left=self.chunk_left,
            rows=self.max_running - self.occupancy.running,
            room=self.free,
            page_size=self.page_size,
            mixed=self.mixed,
        )

    def begin(self) -> None:
        for line in self.starting:
            self.occupancy.begin_decoding(line)
        self.starting.clear()

    def refused(self, choice: Choice) -> list[Line]:
        """The last of the lines, which the engine does not take after all."""
        if self.random.random() >= self.refuse or not choice.lines:
            return []
        return choice.lines[self.random.randrange(len(choice.lines)) :]

    def run(self, choice: Choice) -> None:
        """Compute what was chosen, and a decode step of the others."""
        decodes = sum(self.occupancy.decoding) > 0
        decodes = decodes and (self.mixed or choice.tokens == 0)
        extends = self.extends(choice.lines)
        refused = self.refused(choice)
        for line in refused:
            put_back(self.job, self.occupancy, line)
        tokens = choice.tokens
        if self.chunk is not None:
            tokens = self.prefill(self.chunk, self.chunk_left, tokens)
        self.trace.append((tuple(ln.req.rid for ln in choice.lines), choice.tokens))
        taken = choice.lines[: len(choice.lines) - len(refused)]
        for line, extend in zip(taken, extends, strict=False):
            tokens = self.prefill(line, extend, tokens)
        if decodes:
            self.occupancy.tick()
        self.end_lines()

    def extends(self, lines: list[Line]) -> list[int]:
        """Tokens of the chosen lines' prompts that the cache does not have."""
        uses, counts = self.job.uses, []
        users = uses._running.copy()
        for line in lines:
            users[uses.path(line.node)] -= 1
        for line in lines:
            cached = 0
            for node in uses.path(line.node):
                others_have_it = users[node] > 0 and node not in uses.computing
                if node in uses.pins or others_have_it:
                    cached = int(uses.depth[node])
                    break
            users[uses.path(line.node)] += 1
            counts.append(max(1, line.input_len + line.steps - cached))
        return counts

    def prefill(self, line: Line, left: int, tokens: int) -> int:
        some = min(left, tokens)
        self.chunk, self.chunk_left = None, 0
        if some < left:
            self.chunk, self.chunk_left = line, left - some
        else:
            self.starting.append(line)
        uses = self.job.uses
        done = uses.computed(line, line.input_len + line.steps - (left - some))
        for node in done:
            self.computed[node] = self.computed.get(node, 0) + 1
            if uses.wanted(node):
                uses.pin(node, node)
        self.job.release_followers(done)
        for node in uses.spent(line):
            uses.unpin(node)
        return tokens - some

    def end_lines(self) -> None:
        """Requests end; now and then one gives its KV back and waits again."""
        for line in self.occupancy.lines:
            if not line.decoding:
                continue
            steps = line.steps_done(self.occupancy.clock)
            ended = steps >= self.length[line.req.rid]
            if not ended and self.random.random() >= self.retract:
                continue
            self.occupancy.leave(line)
            left = self.job.uses.leave(line, parked=not ended)
            self.job.release_followers(left)
            if ended:
                self.occupancy.ended(line)
                self.job.forget(line)
            else:
                self.job.backlog.add(line)

    def step(self) -> Choice:
        self.begin()
        choice = choose(self.job, self.occupancy, self.now())
        self.run(choice)
        return choice


def random_job(seed: int, *, dual: bool, page_size: int) -> tuple[JobState, Random]:
    """A job whose requests have all arrived."""
    random = Random(seed)
    prompts = random_prompts(random, random.randint(1, 40), page_size)
    turn = list(range(len(prompts)))
    random.shuffle(turn)
    density = [2.0 ** (3 - 6 * i / len(turn)) for i in range(len(turn))]
    plan = plan_of(
        prompts,
        turn=turn,
        density=density if dual else None,
        num_left=random.randint(0, len(turn)),
        steps=random.choice([2.0, 8.0, 30.0]),
    )
    job = job_of(plan, page_size)
    arrive_all(job, max_steps=random.choice([0, 5, 40]))
    return job, random


def trace_of(seed: int, *, dual: bool) -> list[tuple[tuple[str, ...], int]]:
    """What was chosen in each step of a run."""
    job, random = random_job(seed, dual=dual, page_size=4)
    engine = ToyEngine(job, random, capacity=600, page_size=4, refuse=0.2, retract=0.01)
    while len(job) and len(engine.trace) < 5000:
        engine.step()
    return engine.trace
