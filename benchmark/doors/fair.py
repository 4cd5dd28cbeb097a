"""Jobs that are open together, and how soon estimates follow the answers.

The scheduler's own choices run in an engine of counters, step by step, with all requests
of a job waiting from its opening. A step lasts as long as the cost model says. So the
figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from report import Figure, print_table

from sglang_batch.config import POLICY_TABLE, OfflineBatchConfig
from sglang_batch.job.answer_feedback import AnswerFeedback
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.scheduling.job_plan import JobPlan, StepCost, unplanned
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.job_work import JobWork
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.next_step import EngineNow, choose
from sglang_batch.scheduling.open_jobs import OpenJobs
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

POLICIES = ("dfs", "dual-scan", "lof", "fcfs", "prefix-groups", "auto")
# Most time of a small job next to a large one, over its fair share.
FAIR = 1.3
SHARE = 0.05
STEP_TOKENS = 256
MAX_STEPS = 100_000

COST = CostModel(token_time_s=1e-5, kv_read_time_s=2e-8, weight_read_time_s=1e-3)


@dataclass(frozen=True, slots=True)
class Lines:
    """A job: prompts and the tokens that each request really generates."""

    name: str
    prompts: list[list[int]]
    output_len: list[int]
    max_new_tokens: int = 400


def groups(name: str, count: int, prompt: int, output: int, *, seed: int) -> Lines:
    """``count`` requests in groups of four, with answers of half to one and a half."""
    rng = np.random.default_rng(seed)
    prompts = []
    for number in range(count):
        if number % 4 == 0:
            shared = rng.integers(0, 1 << 30, prompt // 2).tolist()
        own = rng.integers(0, 1 << 30, prompt - prompt // 2).tolist()
        prompts.append(shared + own)
    lengths = rng.integers(output // 2, output + output // 2 + 1, count)
    return Lines(name, prompts, np.maximum(lengths, 1).tolist())


def blend(name: str, count: int, *, seed: int) -> Lines:
    """Half long prompts with short answers, half short prompts with long answers."""
    long = groups(name, count // 2, 120, 6, seed=seed)
    short = groups(name, count - count // 2, 12, 60, seed=seed + 1)
    prompts, lengths = long.prompts + short.prompts, long.output_len + short.output_len
    order = np.random.default_rng(seed).permutation(count)
    return Lines(name, [prompts[i] for i in order], [lengths[i] for i in order])


@dataclass(slots=True)
class Req:
    """The part of SGLang's request that the scheduler's decisions use."""

    rid: str
    output_ids: list[int] = field(default_factory=list)


class Engine:
    """Carries out the scheduler's choices for any number of jobs. Nothing is evicted.

    Attributes:
        seconds: the time of all steps, by the cost model.
        answered: job and time of each answer, in order.
    """

    def __init__(self, kv_tokens: int, rows: int) -> None:
        limits = EngineLimits(kv_tokens, step_tokens=STEP_TOKENS, max_running=rows)
        self.machine = Machine(COST, limits)
        self.jobs = OpenJobs()
        self.seconds = 0.0
        self.answered: list[tuple[str, float]] = []
        self._accounting = KvAccounting(kv_tokens)
        self._length: dict[str, int] = {}
        self._job_of: dict[str, JobState] = {}
        self._starting: list[ScheduledRequest] = []
        self._chunk: ScheduledRequest | None = None
        self._chunk_left = 0

    def plan(self, lines: Lines, policy: str) -> JobPlan:
        if not POLICY_TABLE[policy].uses_prompts:
            return unplanned(self.machine)
        n = len(lines.prompts)
        requests = PlanRequests(
            tokens=np.concatenate(lines.prompts).astype(np.int32),
            offsets=np.cumsum([0, *map(len, lines.prompts)], dtype=np.int64),
            max_new_tokens=np.full(n, lines.max_new_tokens, np.int32),
            known_output_len=np.full(n, UNKNOWN, np.int32),
        )
        config = OfflineBatchConfig(policy=policy)
        planner = JobPlanner(requests, np.arange(n), self.machine, config)
        if len(planner.sample):  # the plan after the sample was answered
            lengths = np.array(lines.output_len, np.int32)[planner.sample]
            planner.observe(planner.sample, lengths)
        return planner.plans()[0].for_scheduler(self.machine)

    def open(self, lines: Lines, policy: str, priority: int = 0) -> JobState:
        plan = self.plan(lines, policy)
        job = JobState(lines.name, plan, 1)
        self.jobs.add(job)
        self.jobs.set_priority(job, priority)
        self._accounting.extend_forecast(
            int(plan.est_decode_steps.max(initial=256)) + 1
        )
        for number, (prompt, length) in enumerate(
            zip(lines.prompts, lines.output_len, strict=True)
        ):
            self.jobs.arrives(job)
            rid = f"{lines.name}-{number}"
            self._length[rid], self._job_of[rid] = length, job
            job.add(Req(rid), number, len(prompt), lines.max_new_tokens - 1)
        return job

    def run_until(self, answers: int, of: str | None = None) -> None:
        """Run until a number of answers have come, of one job or of all."""
        for _ in range(MAX_STEPS):
            if sum(of in (None, job) for job, _ in self.answered) >= answers:
                return
            self._step()
        raise RuntimeError(f"only {len(self.answered)} answers in {MAX_STEPS} steps")

    def _step(self) -> None:
        accounting = self._accounting
        for request in self._starting:
            accounting.begin_decoding(request)
        self._starting.clear()
        decodes = sum(accounting.decoding) > 0
        reads = sum(accounting.reads)
        tokens = sum(accounting.decoding) + self._join()
        for job in self.jobs.each:
            job.work.did(*job.done.end_step(accounting.clock, decodes=decodes))
        self.seconds += tokens * COST.token_time_s + reads * COST.kv_read_time_s
        self.seconds += COST.weight_read_time_s
        if decodes:
            accounting.count_decode_step()
        for request in accounting.requests:
            if request.decoding and (
                request.steps_done(accounting.clock)
                >= self._length[request.req.rid] - 1
            ):
                self._end(request)

    def _now(self) -> EngineNow:
        accounting = self._accounting
        held = sum(accounting.kv) + self.jobs.locked_tokens + self.jobs.idle_tokens
        return EngineNow(
            step_tokens=STEP_TOKENS,
            decode_rows=sum(accounting.decoding),
            chunk=self._chunk,
            chunk_left=self._chunk_left,
            rows=int(self.machine.limits.max_running or 0) - accounting.num_running,
            room=accounting.capacity - held,
            page_size=1,
            idle_frees=False,
        )

    def _join(self) -> int:
        """Let requests join. Returns the prompt tokens of the step."""
        now, joined, total = self._now(), [], 0
        for jobs in self.jobs.by_priority():
            own = sum(job.uses.locked_tokens for job in jobs)
            now = now._replace(locked_elsewhere=self.jobs.locked_tokens - own)
            choice = choose(jobs, self._accounting, now, self.jobs.scan)
            total += choice.tokens
            joined += choice.requests
            if any(job.backlog.count for job in jobs):
                break
            now = now.after(choice)
        left = total
        chunk, of_chunk = self._chunk, self._chunk_left
        self._chunk, self._chunk_left = None, 0
        if chunk is not None:
            left = self._prefill(chunk, of_chunk, left)
        for request in joined:
            left = self._prefill(request, self._extend(request), left)
        return total

    def _extend(self, request: ScheduledRequest) -> int:
        """Tokens of a prompt that the request computes itself."""
        uses = self._job_of[request.req.rid].uses
        path = [int(uses.depth[n]) for n in uses.path(request.node)]
        led = [int(uses.depth[n]) for n in request.leading]
        kept = max((each for each in path if each not in led), default=0)
        return max(1, request.input_len - kept)

    def _prefill(self, request: ScheduledRequest, extend: int, left: int) -> int:
        job = self._job_of[request.req.rid]
        some = min(extend, left)
        done = request.input_len - (extend - some)
        job.done.prefilled(request, some, done - some, 0)
        if some < extend:
            self._chunk, self._chunk_left = request, extend - some
        else:
            self._starting.append(request)
        nodes = job.uses.computed(request, done)
        for node in nodes:
            if job.uses.wanted(node):
                job.uses.pin(node, node)
        job.release_followers(nodes)
        for node in job.uses.spent(request):
            job.uses.unpin(node)
        return left - some

    def _end(self, request: ScheduledRequest) -> None:
        job = self._job_of[request.req.rid]
        end(job, self._accounting, request)
        self.answered.append((job.job_id, self.seconds))
        if not len(job):
            self.jobs.remove(job)


def end(job: JobState, accounting: KvAccounting, request: ScheduledRequest) -> None:
    """A request has its answer, and gives its KV back."""
    accounting.remove(request)
    accounting.learn_output_len(request)
    job.work.ended(request)
    if request.leaf >= 0:
        job.leave(request, offloaded=False)
    job.forget(request)


# Shares -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """A large job that runs, and a small one that is opened meanwhile.

    limit: the target. None where the small job has to wait until running requests of the
        large one leave, since none is offloaded for a job of equal priority.
    """

    name: str
    large: Lines
    small: Lines
    kv_tokens: int
    rows: int
    after: int = 10
    limit: float | None = FAIR


def pairs() -> list[Pair]:
    """Six lines beside 150, other shapes with short answers, and huge prompts."""
    large = groups("large", 150, 40, 30, seed=1)
    short = groups("small", 24, 40, 8, seed=4)
    long = groups("large", 150, 40, 200, seed=1)
    tiny = groups("large", 400, 20, 20, seed=1)
    huge = groups("large", 40, 900, 20, seed=1)
    two = groups("small", 2, 900, 20, seed=2)
    few = groups("small", 24, 20, 20, seed=2)
    blends = blend("large", 200, seed=5), blend("small", 24, seed=7)
    return [
        Pair("6 beside 150", large, groups("small", 6, 40, 30, seed=2), 20_000, 8),
        Pair("KV is full", large, groups("small", 24, 40, 30, seed=3), 1_500, 64),
        Pair("short answers", large, short, 20_000, 16),
        Pair("blends", *blends, 2000, 32),
        Pair("beside huge prompts", huge, few, 2500, 64, after=4),
        Pair("two huge prompts", tiny, two, 2500, 64, after=40, limit=None),
        Pair("long answers hold the rows", long, short, 60_000, 16, limit=None),
    ]


def over_fair_share(pair: Pair, of_large: str, of_small: str) -> float:
    """Time of the small job from its opening to its last answer, over its fair share.

    The fair share is twice its time in an engine that it has for itself.
    """
    small = pair.small
    engine = Engine(pair.kv_tokens, pair.rows)
    engine.open(pair.large, of_large)
    engine.run_until(pair.after)
    opened = engine.seconds
    engine.open(small, of_small)
    engine.run_until(len(small.prompts), small.name)
    beside = engine.seconds - opened
    alone = Engine(pair.kv_tokens, pair.rows)
    alone.open(small, of_small)
    alone.run_until(len(small.prompts))
    return beside / (2 * alone.seconds)


def unequal(
    lines: Sequence[Lines], policies: Sequence[str], kv: int, rows: int
) -> float:
    """How far the work of two equal jobs is from a half each, while both have a backlog."""
    engine = Engine(kv, rows)
    jobs = [
        engine.open(each, policy) for each, policy in zip(lines, policies, strict=True)
    ]
    while all(job.num_waiting for job in jobs):
        engine.run_until(len(engine.answered) + 1)
    done = [job.done.done_s for job in jobs]
    return 2 * max(done) / sum(done) - 1


def shares(quick: bool) -> list[Figure]:
    policies = POLICIES[:2] if quick else POLICIES
    found: list[tuple[str, str, str, float]] = []
    for pair in pairs()[: 1 if quick else None]:
        for of_large, of_small in product(policies, policies):
            ratio = over_fair_share(pair, of_large, of_small)
            found.append((pair.name, of_large, of_small, round(ratio, 3)))
    worst: dict[str, tuple[str, str, str, float]] = {}
    for row in found:
        if row[0] not in worst or row[3] > worst[row[0]][3]:
            worst[row[0]] = row
    print_table(
        "Small job beside a large one: time over its fair share, worst pair",
        ["shape", "large", "small", "ratio"],
        list(worst.values()),
    )
    limits = {pair.name: pair.limit for pair in pairs()}
    figures = [
        Figure(
            f"small job, {name}",
            row[3],
            "",
            ("<=", limit) if (limit := limits[name]) else None,
            f"{row[1]}, {row[2]}",
        )
        for name, row in worst.items()
    ]
    equal = [
        (
            unequal(
                [blend("a", 160, seed=11), blend("b", 160, seed=13)], both, 2000, 32
            ),
            both,
        )
        for both in product(policies, policies)
    ]
    off, both = max(equal)
    figures.append(
        Figure("two equal jobs, off by", off, "", ("<=", SHARE), ", ".join(both))
    )
    return figures


# Estimates ----------------------------------------------------------------------------


def answers_learnt(num_lines: int) -> int:
    """Answers that a plan has learnt from while the first line of the sample runs on."""
    feedback = AnswerFeedback(np.arange(20), num_lines)
    for number in range(num_lines):
        feedback.add_started(0, number)
    learnt = 0
    for number in range(1, num_lines):
        feedback.add_answer(number, 100)
        while feedback.is_due:
            _, lengths = feedback.pop_answers()
            learnt += int((lengths >= 0).sum())
    return learnt


def lines_until_noticed(*, same_job: bool) -> int:
    """Lines until estimates are raised fourfold, after 20,000 that were half as long.

    Each line runs alone, the worst case: of lines that run together, all that outlive
    their estimate count at once.
    """
    accounting = KvAccounting(10**6)
    job = JobWork(StepCost(1e-5, 1e-8, 0.0, 0.0))

    def run(steps: int) -> None:
        req = Req("line")
        line = ScheduledRequest(req, -1, 0, 0, 10, 10, 10_000, 40, work=job)
        accounting.admit(line)
        accounting.begin_decoding(line)
        for _ in range(steps):
            accounting.count_decode_step()
        accounting.remove(line)
        accounting.learn_output_len(line)

    for _ in range(20_000):
        run(20)
    if not same_job:
        job = JobWork(job.cost)
    waiting = ScheduledRequest(Req("waits"), -1, 0, 0, 10, 10, 10_000, 40, work=job)
    lines = 0
    while accounting.corrected_est_decode_steps(waiting) < 4 * 40:
        run(200)
        lines += 1
    return lines


def estimates() -> list[Figure]:
    return [
        Figure(
            "answers learnt of 9,999 beside one endless line", answers_learnt(10_000),
            "", (">=", 5000), "was 0; plans are made at doubling distances",
        ),
        Figure(
            "lines until 5 x longer ones are noticed, next job",
            lines_until_noticed(same_job=False), "", ("<=", 99), "was 41,256",
        ),
        Figure(
            "the same, in the same job", lines_until_noticed(same_job=True), "",
            ("<=", 99), "was 41,256",
        ),
    ]  # fmt: skip


def measure(quick: bool) -> list[Figure]:
    return shares(quick) + ([] if quick else estimates())
