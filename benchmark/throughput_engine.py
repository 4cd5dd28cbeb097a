"""One engine in a process of its own: started, warmed up, timed on one job, ended.

    python benchmark/throughput_engine.py DIRECTORY

The task gives the engine, its arguments and the job. :class:`Engine` starts this file,
tells it when to begin and reads its results. Of several engines, each is timed alone, while
the others sleep.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import throughput_probe
from report import paths_given
from throughput_jobs import ThroughputJob
from throughput_probe import Steps, read_steps

from sglang_batch.planner.machine_model import Machine

TIMEOUT_S = 900
TASK_FILE, ANSWERS_FILE, STEPS_FILE = "task.json", "answers.json", "steps.bin"
READY_FILE, GO_FILE, JOB_FILE = "ready", "go", "job"
MACHINE_FILE = "machine.pickle"
# The first forward and the first plan cost seconds that no later one does.
WARM_UP_PROMPTS = [[prompt + 1] * 24 for prompt in range(4)]
# Of our scheduler's state: what attention read and did not read again, since the start.
COUNTS = (
    "attention_steps", "attention_steps_shared",
    "kv_read_bytes", "kv_read_bytes_saved",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """The measurement of one process.

    ours: whether to run this package with the order ``policy``, or stock SGLang with
        ``policy`` as its ``--schedule-policy``.
    arguments: of the server, the same for both.
    max_inflight: of our job. None leaves it to the engine.
    stop_after: of our job: end when that many requests are answered. The scheduler then
        has all requests before its first step.
    callers: how many tasks send the prompts of stock's engine one by one, each the next
        of the list when it has its answer. None sends all in one call.
    repeats: how often the engine runs the job, or others in its place, each time with an
        empty cache.
    threads: OpenMP threads of the engine's processes.
    in_turn: whether a mixed step that is split runs its halves one after the other.
    profile: arguments of SGLang's ``ProfileReq``, to record steps of the job. None: none.
    logprobs: whether answers have the log probabilities of their tokens.
    """

    ours: bool
    policy: str
    arguments: list[str]
    prompts: list[list[int]]
    sampling_params: list[dict[str, Any]]
    max_inflight: int | None = None
    stop_after: int | None = None
    callers: int | None = None
    repeats: int = 1
    threads: int = 1
    in_turn: bool = False
    profile: dict[str, Any] | None = None
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Answers in the order of the prompts.

    seconds: from the first prompt sent to the last answer, including the plan.
    cached_tokens: of each request's first prefill. SGLang does not count tokens that a
        retracted request finds in the cache.
    startup_s: until the engine is ready and warm.
    kv_tokens: that the engine's KV cache has room for.
    attention: ``COUNTS`` of this job. They are 0 with SGLang's scheduler, and where no
        decodes share prefixes.
    logprobs: of the tokens of each answer, if the task wants them.
    orders: of the plans of our job, one after the other.
    """

    seconds: float
    startup_s: float
    output_ids: list[list[int]]
    cached_tokens: int
    retractions: int
    kv_tokens: int
    attention: dict[str, int]
    logprobs: list[list[float]]
    steps: Steps
    orders: list[str] = field(default_factory=list)


def task_of(
    job: ThroughputJob, model: Path, *, ours: bool, policy: str, mixed: bool
) -> Task:
    """A job on one engine, with the arguments that all engines get."""
    # Engines that wait must not spin.
    arguments = [f"--model-path={model}", "--sleep-on-idle", *job.server_arguments]
    if mixed:
        arguments.append("--enable-mixed-chunk")
    return Task(ours, policy, arguments, job.prompts, job.sampling_params)


class Engine:
    """A task's engine: starting as soon as this is made, timed when told to."""

    def __init__(self, task: Task, scratch: Path) -> None:
        self._task = task
        self._scratch = scratch
        self._runs = 0
        (scratch / TASK_FILE).write_text(json.dumps(asdict(task)))
        with (scratch / "engine.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(scratch)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(task.threads)},
                start_new_session=True,
            )

    def until_ready(self) -> None:
        """Wait until the engine is ready and warm.

        Raises:
            RuntimeError: the process failed. The message has the end of its output.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not (self._scratch / READY_FILE).exists():
            if self._process.poll() is not None:
                raise self._failure(f"exit status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._failure(f"not ready after {TIMEOUT_S} s")
            time.sleep(0.1)

    def num_steps(self) -> int:
        """Steps that the engine has made since it started."""
        return len(read_steps(self._scratch / STEPS_FILE))

    @property
    def machine(self) -> Machine:
        """What our engine plans for when it starts. It has to be ready."""
        machine: Machine = pickle.loads((self._scratch / MACHINE_FILE).read_bytes())
        return machine

    def run(
        self,
        other: ThroughputJob | None = None,
        profile: dict[str, Any] | None = None,
        policy: str | None = None,
    ) -> TaskResult:
        """Run the task's job, or ``other``. The last of the repeats ends the engine.

        profile, policy: of ``other``, see :class:`Task`. Without a policy, the task's.

        Raises:
            RuntimeError: the process failed.
        """
        if other is not None:
            (self._scratch / f"{JOB_FILE}-{self._runs + 1}").write_text(
                json.dumps(
                    {
                        "prompts": other.prompts,
                        "sampling_params": other.sampling_params,
                        "profile": profile,
                        "policy": policy or self._task.policy,
                    }
                )
            )
        self._go()
        deadline = time.monotonic() + TIMEOUT_S
        while not self._answers.exists() or self._runs == self._task.repeats:
            if self._ends_within(0.1):
                break
            if time.monotonic() > deadline:
                self.kill()
                raise self._failure(f"no end after {TIMEOUT_S} s")
        return self._result()

    @property
    def _answers(self) -> Path:
        return self._scratch / f"{ANSWERS_FILE}-{self._runs}"

    def _go(self) -> None:
        self._runs += 1
        (self._scratch / f"{GO_FILE}-{self._runs}").touch()

    def run_until_first_step(self) -> None:
        """Begin the job, and pause the process as soon as it makes steps.

        Raises:
            RuntimeError: the process failed, or made no step.
        """
        steps = self._scratch / STEPS_FILE
        before = steps.stat().st_size
        self._go()
        deadline = time.monotonic() + TIMEOUT_S
        while steps.stat().st_size == before:
            if self._ends_within(0.01) or time.monotonic() > deadline:
                raise self._failure("no step")
        os.killpg(self._process.pid, signal.SIGSTOP)

    def run_for(self, seconds: float) -> TaskResult | None:
        """Continue for that many seconds. Returns the result if the job has ended.

        Raises:
            RuntimeError: the process failed.
        """
        os.killpg(self._process.pid, signal.SIGCONT)
        if self._ends_within(seconds):
            return self._result()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return None

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _result(self) -> TaskResult:
        if self._runs == self._task.repeats:
            self.kill()
        if self._process.poll() or not self._answers.exists():
            raise self._failure(f"exit status {self._process.poll()}")
        answers = json.loads(self._answers.read_text())
        begin = answers.pop("begin")
        steps = read_steps(self._scratch / STEPS_FILE, since=begin)
        return TaskResult(steps=steps, **answers)

    def kill(self) -> None:
        # Remaining processes of the engine would slow the next one down.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failure(self, what: str) -> RuntimeError:
        engine = "sglang-batch" if self._task.ours else "SGLang"
        tail = (self._scratch / "engine.log").read_text(errors="replace")[-4000:]
        return RuntimeError(f"{engine}, policy {self._task.policy}: {what}.\n{tail}")


def run_tasks(tasks: Sequence[Task]) -> Iterator[TaskResult]:
    """Start the tasks' engines, then run one after another.

    Tasks with repeats, which all have as many, take turns.
    """
    with ready_engines(tasks) as engines:
        for _ in range(tasks[0].repeats):
            for engine in engines:
                yield engine.run()


def run_in_slices(tasks: Sequence[Task], slice_s: float = 2.0) -> list[TaskResult]:
    """Run the tasks in alternation, ``slice_s`` seconds each.

    The speed of a machine that others use, too, varies by a tenth, and so all tasks
    meet the same variation. While one runs, the others are stopped, so a slice must be
    many steps long. Only processor times of the results are meaningful. Steps that
    ``resumed`` ran after others had displaced the engine's memory from the caches.
    """
    results: dict[int, TaskResult] = {}
    with ready_engines(tasks) as engines:
        for engine in engines:
            engine.run_until_first_step()
        while len(results) < len(engines):
            for index, engine in enumerate(engines):
                if index not in results:
                    result = engine.run_for(slice_s)
                    if result is not None:
                        results[index] = result
    return [results[index] for index in range(len(tasks))]


@contextmanager
def ready_engines(tasks: Sequence[Task]) -> Iterator[list[Engine]]:
    """The tasks' engines, as long as the context."""
    with ExitStack() as stack:
        engines = []
        for task in tasks:
            scratch = TemporaryDirectory(prefix="sglang-batch-bench-")
            engine = Engine(task, Path(stack.enter_context(scratch)))
            stack.callback(engine.kill)
            # One by one: two that start at the same time can choose the same port.
            engine.until_ready()
            engines.append(engine)
        yield engines


def run_task(task: Task) -> TaskResult:
    """Run a task in a fresh process.

    Raises:
        RuntimeError: the process failed. The message has the end of its output.
    """
    return next(run_tasks([task]))


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one process. See bench_offline_throughput.py."""

    seconds: float
    startup_s: float
    cached_share: float
    num_steps: int
    prefill_tokens: int
    recomputed_tokens: int
    retractions: int
    blend_spread: float
    host_ms: float
    cpu_s: float
    kv_tokens: int
    attention: dict[str, int]

    @classmethod
    def of(cls, job: ThroughputJob, done: TaskResult) -> Run:
        steps, prompt_tokens = done.steps, job.num_prompt_tokens
        prefilled = int(steps["prefill_tokens"].sum())
        return cls(
            seconds=done.seconds,
            startup_s=done.startup_s,
            cached_share=done.cached_tokens / prompt_tokens,
            num_steps=len(steps),
            prefill_tokens=prefilled,
            recomputed_tokens=prefilled - (prompt_tokens - done.cached_tokens),
            retractions=done.retractions,
            blend_spread=blend_spread(job, steps),
            host_ms=1e3 * float((steps["schedule_s"] + steps["result_s"]).mean()),
            cpu_s=float(steps["cpu_s"].sum()),
            kv_tokens=done.kv_tokens,
            attention=done.attention,
        )


def blend_spread(job: ThroughputJob, steps: Steps) -> float:
    """How unequal the steps' mixes of compute and memory are, 0..0.5."""
    outputs = np.array(job.output_lens)
    inputs = np.array([len(prompt) for prompt in job.prompts])
    least_tokens = job.tree().num_unique_tokens + outputs.sum()
    # The first token comes from the prefill. The k-th decode reads input + k tokens.
    least_kv = ((outputs - 1) * inputs + outputs * (outputs - 1) / 2).sum()
    compute = (steps["prefill_tokens"] + steps["decode_rows"]) / least_tokens
    memory = steps["decode_kv_tokens"] / max(least_kv, 1)
    work = compute + memory
    share = compute / work
    mean = np.average(share, weights=work)
    return float(np.sqrt(np.average((share - mean) ** 2, weights=work)))


# In the process of the engine ---------------------------------------------------------


def run_stock(task: Task, scratch: Path, started: float) -> Iterator[dict[str, Any]]:
    """All prompts in one call of ``sglang.Engine``, or from several callers."""
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()  # a plugin makes SGLang run on a CPU
    from sglang.srt.server_args import prepare_server_args

    arguments = [f"--schedule-policy={task.policy}", "--log-level=error"]
    server_args = prepare_server_args([*task.arguments, *arguments])
    engine = sglang.Engine(server_args=server_args)
    session = _Session(engine.loop, engine.tokenizer_manager, started)
    try:
        engine.generate(input_ids=WARM_UP_PROMPTS, sampling_params=_short())
        for number in range(1, task.repeats + 1):
            if number > 1 and not engine.flush_cache().success:
                raise RuntimeError("the cache was not emptied")
            task = wait_for_go(task, scratch, number)
            session.begin(task.profile)
            if task.callers is None:
                answers = engine.generate(
                    input_ids=task.prompts,
                    sampling_params=task.sampling_params,
                    return_logprob=task.logprobs,
                )
            else:
                calls = call_one_by_one(engine, task, task.callers)
                answers = engine.loop.run_until_complete(calls)
            yield session.end(answers)
    finally:
        engine.shutdown()


async def call_one_by_one(
    engine: Any, task: Task, callers: int
) -> list[dict[str, Any]]:
    answers: dict[int, dict[str, Any]] = {}
    numbers = iter(range(len(task.prompts)))

    async def call() -> None:
        for number in numbers:
            answers[number] = await engine.async_generate(
                input_ids=task.prompts[number],
                sampling_params=task.sampling_params[number],
            )

    await asyncio.gather(*(call() for _ in range(callers)))
    return [answers[number] for number in sorted(answers)]


def run_ours(task: Task, scratch: Path, started: float) -> Iterator[dict[str, Any]]:
    """The same prompts as one job of this package."""
    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.srt.engine import in_process

    config = OfflineBatchConfig(max_inflight=task.max_inflight)
    server_args = in_process.parse_server_args([*task.arguments, "--log-level=error"])
    with in_process.engine(server_args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        session = _Session(loop, engine.manager, started)
        orders = _orders_of_plans(engine)
        (scratch / MACHINE_FILE).write_bytes(pickle.dumps(engine.machine))

        def run(
            prompts: list[list[int]],
            params: list[dict[str, Any]],
            stop_after: int | None = None,
        ) -> list[dict[str, Any]]:
            planned = replace(config, policy=task.policy)
            orders.clear()
            job = answer_all(
                engine, planned, prompts, params, stop_after, logprobs=task.logprobs
            )
            answers: list[dict[str, Any]] = loop.run_until_complete(job)
            return answers

        run(WARM_UP_PROMPTS, [_short()] * len(WARM_UP_PROMPTS))
        for number in range(1, task.repeats + 1):
            if number > 1:
                manager: Any = engine.manager
                if not loop.run_until_complete(manager.flush_cache()).success:
                    raise RuntimeError("the cache was not emptied")
            task = wait_for_go(task, scratch, number)
            session.begin(task.profile)
            answers = run(task.prompts, task.sampling_params, task.stop_after)
            yield {**session.end(answers), "orders": orders}


def _orders_of_plans(engine: Any) -> list[str]:
    """Gets the order of each plan that the engine is given from now on."""
    orders: list[str] = []
    open_job = engine.open_job

    async def noted(job_id: str, plans: Sequence[Any], *more: Any) -> None:
        orders.append(plans[0].policy)
        await open_job(job_id, plans, *more)

    engine.open_job = noted
    return orders


async def answer_all(
    engine: Any,
    config: Any,
    prompts: list[list[int]],
    sampling_params: list[dict[str, Any]],
    stop_after: int | None = None,
    *,
    logprobs: bool = False,
) -> list[dict[str, Any]]:
    """The answers of one job, in the order of its prompts, as far as it ran."""
    from sglang_batch.job.engine import GENERATE_URL
    from sglang_batch.job.job import Job
    from sglang_batch.request import BatchRequestInput, RequestOutput, named_job_id

    more = {"return_logprob": True} if logprobs else {}
    requests = [
        BatchRequestInput(
            index,
            str(index),
            GENERATE_URL,
            json.dumps(
                {"input_ids": prompt, "sampling_params": params, **more}
            ).encode(),
        )
        for index, (prompt, params) in enumerate(
            zip(prompts, sampling_params, strict=True)
        )
    ]
    answers: dict[int, dict[str, Any]] = {}
    enough = asyncio.Event()

    def keep(request: BatchRequestInput, output: RequestOutput) -> None:
        if not output.ok:
            raise RuntimeError(f"request {request.index}: {output.body.decode()}")
        answers[request.index] = json.loads(output.body)
        if len(answers) == (stop_after or len(prompts)):
            enough.set()

    name = named_job_id(f"benchmark-{len(prompts)}")
    job = Job(name, requests, range(len(requests)), engine, config, keep)
    running = asyncio.ensure_future(job.run())
    stopping = asyncio.ensure_future(enough.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if stop_after is None or running.done():
        await running
    return [answers[index] for index in sorted(answers)]


def num_steps(loop: asyncio.AbstractEventLoop, engine: Any) -> int:
    """Steps that an engine has made."""
    from sglang_batch.srt.compat.support import STATE_KEY

    states = loop.run_until_complete(engine.manager.get_internal_state())
    return int(states[0][STATE_KEY]["steps"])


def _short() -> dict[str, Any]:
    return {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


class _Session:
    """An engine that runs jobs one after another, and its state around each."""

    def __init__(self, loop: Any, manager: Any, started: float) -> None:
        self._loop, self._manager, self._started = loop, manager, started
        self._profiled = False
        self._before: dict[str, int] = {}
        self._begin = 0.0

    def begin(self, profile: dict[str, Any] | None) -> None:
        """A job begins now. ``profile``: see :class:`Task`."""
        self._before = self._counts(self._state())
        self._profiled = profile is not None
        if profile is not None:
            from sglang.srt.managers.io_struct import ProfileReq

            request = ProfileReq(**profile)
            self._loop.run_until_complete(self._manager.start_profile(request))
        self._begin = time.perf_counter()

    def end(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """The job's results, as :class:`TaskResult` has them, and when it began."""
        end = time.perf_counter()
        if self._profiled:
            # A stage with fewer steps than were asked for is still being recorded.
            with suppress(RuntimeError):
                self._loop.run_until_complete(self._manager.stop_profile())
        infos = [answer["meta_info"] for answer in answers]
        state = self._state()
        after = self._counts(state)
        return {
            "begin": self._begin,
            "seconds": end - self._begin,
            "startup_s": self._begin - self._started,
            "output_ids": [list(map(int, answer["output_ids"])) for answer in answers],
            "cached_tokens": sum(info["cached_tokens"] for info in infos),
            "retractions": sum(info.get("num_retractions") or 0 for info in infos),
            "kv_tokens": int(state["memory_usage"]["token_capacity"]),
            "attention": {name: after[name] - self._before[name] for name in COUNTS},
            "logprobs": [
                [float(token[0]) for token in info.get("output_token_logprobs") or ()]
                for info in infos
            ],
        }

    def _state(self) -> dict[str, Any]:
        states = self._loop.run_until_complete(self._manager.get_internal_state())
        state: dict[str, Any] = states[0]
        return state

    @staticmethod
    def _counts(state: dict[str, Any]) -> dict[str, int]:
        ours = state.get("offline_batch", {})
        return {name: int(ours.get(name, 0)) for name in COUNTS}


def wait_for_go(task: Task, scratch: Path, number: int) -> Task:
    """The task whose job is to be run now."""
    (scratch / READY_FILE).touch()
    while not (scratch / f"{GO_FILE}-{number}").exists():
        time.sleep(0.01)
    job = scratch / f"{JOB_FILE}-{number}"
    return replace(task, **json.loads(job.read_text())) if job.exists() else task


def main() -> None:
    started = time.perf_counter()
    [scratch] = paths_given(__doc__, "DIRECTORY")
    task = Task(**json.loads((scratch / TASK_FILE).read_text()))
    hold = (0, 0)
    if task.stop_after is not None:
        warm_up = len(WARM_UP_PROMPTS)
        hold = (warm_up, warm_up + len(task.prompts))
    throughput_probe.install(scratch / STEPS_FILE, hold, in_turn=task.in_turn)
    run = run_ours if task.ours else run_stock
    for number, found in enumerate(run(task, scratch, started), 1):
        written = scratch / ANSWERS_FILE
        written.write_text(json.dumps(found))
        written.rename(scratch / f"{ANSWERS_FILE}-{number}")


if __name__ == "__main__":
    main()
