"""Measurements of every step in the scheduler process, for any scheduler.

``sglang.Engine`` starts its scheduler processes with the function it finds in its class
attribute ``run_scheduler_process_func``. :func:`install` puts the one below there. It
wraps three methods of the class that ``sglang.srt.managers.scheduler.Scheduler`` names
after plugins are loaded, and runs SGLang's own function. Nothing else is changed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP = np.dtype(
    [
        ("start", np.float64),  # time.perf_counter(), one clock for all processes
        ("forward_s", np.float64),  # in run_batch
        ("schedule_s", np.float64),  # in get_next_batch_to_run, for this step
        ("result_s", np.float64),  # in process_batch_result, since the step before
        ("gap_s", np.float64),  # since the run_batch before ended, idle time included
        ("idle_s", np.float64),  # part of it from finding no batch to the next look
        ("ingest_s", np.float64),  # part of it in ingest_requests
        ("host_cpu_s", np.float64),  # the thread's processor time in the same two
        ("added_s", np.float64),  # part of it in our own code, NaN if not measured
        ("resumed", np.float64),  # 1: the process was stopped since the step before
        ("cpu_s", np.float64),  # processor time in the three methods
        ("prefill_tokens", np.float64),
        ("decode_rows", np.float64),
        ("decode_kv_tokens", np.float64),  # KV tokens that the decode rows read
    ]
)
"""One record of the file. Steps are an array of these."""

Steps = NDArray[np.void]

# The child inherits it. Arguments of the process are SGLang's own.
PATH_VARIABLE = "BENCHMARK_STEPS_FILE"
HOLD_VARIABLE = "BENCHMARK_HOLD"
IN_TURN_VARIABLE = "BENCHMARK_HALVES_IN_TURN"
HOLD_TIMEOUT_S = 600


def install(
    path: Path, hold: tuple[int, int] = (0, 0), *, in_turn: bool = False
) -> None:
    """Have the engines that this process starts write their steps to ``path``.

    hold: ``(first, last)``. Once more than ``first`` requests have arrived, no step is
        made until ``last`` have, so that all of them wait when the next step begins.
    in_turn: whether split steps run their halves one after the other.
    """
    from sglang.srt.entrypoints.engine import Engine

    os.environ[PATH_VARIABLE] = str(path)
    os.environ[HOLD_VARIABLE] = f"{hold[0]}:{hold[1]}"
    os.environ[IN_TURN_VARIABLE] = "1" if in_turn else ""
    Engine.run_scheduler_process_func = staticmethod(run_scheduler_process)


def read_steps(path: Path, since: float = 0.0) -> Steps:
    """The steps that began after ``since``, in order."""
    steps = np.fromfile(path, dtype=STEP)
    return steps[steps["start"] >= since]


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of this name, with the scheduler's methods timed."""
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before looking the class up: a plugin may have replaced it
    probe = Probe(os.environ[PATH_VARIABLE])
    probe.wrap(scheduler.Scheduler)
    if scheduler.Scheduler.__name__ == "OfflineScheduler":
        probe.wrap_ours()
    if os.environ.get(IN_TURN_VARIABLE):
        from sglang_batch.srt.overlap.batch_halves import ThreadedHalves

        ThreadedHalves.at_once = False
    first, last = map(int, os.environ[HOLD_VARIABLE].split(":"))
    if last:
        hold_back(scheduler.Scheduler, first, last)
    scheduler.run_scheduler_process(*args, **kwargs)


class Probe:
    """Times of the current step, and the file for finished steps."""

    def __init__(self, path: str) -> None:
        # Unbuffered: the process is killed in the end.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._schedule_s = 0.0
        self._result_s = self._ingest_s = self._idle_s = 0.0
        self._found_none = 0.0
        self._schedule_cpu_s = self._result_cpu_s = self._added_s = 0.0
        self._cpu_s = 0.0
        self._resumed = False
        self._looks_at_ours = False
        self._wrapped_ours = False
        self._last_end = time.perf_counter()
        signal.signal(signal.SIGCONT, self._resume)

    def _resume(self, *_: Any) -> None:
        self._resumed = True

    def wrap(self, scheduler_class: Any) -> None:
        """Put the timed methods in place of the class's own."""
        get_next = scheduler_class.get_next_batch_to_run
        process_result = scheduler_class.process_batch_result
        run_batch = scheduler_class.run_batch
        ingest = scheduler_class.ingest_requests

        def timed_ingest(scheduler: Any) -> Any:
            begin = time.perf_counter()
            done = ingest(scheduler)
            self._ingest_s += time.perf_counter() - begin
            return done

        def timed_get_next(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            begin, begin_cpu = time.perf_counter(), time.process_time()
            begin_thread = time.thread_time()
            if self._found_none:
                self._idle_s += begin - self._found_none
            plan = get_next(scheduler, *args, **kwargs)
            self._schedule_cpu_s = time.thread_time() - begin_thread
            end = time.perf_counter()
            self._schedule_s = end - begin
            self._found_none = 0.0 if plan.batch_to_run else end
            if plan.batch_to_run:  # an idle scheduler looks for work all the time
                self._cpu_s += time.process_time() - begin_cpu
            return plan

        def timed_process_result(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            begin, begin_cpu = time.perf_counter(), time.process_time()
            begin_thread = time.thread_time()
            done = process_result(scheduler, *args, **kwargs)
            self._result_cpu_s += time.thread_time() - begin_thread
            self._result_s += time.perf_counter() - begin
            self._cpu_s += time.process_time() - begin_cpu
            return done

        def recorded_run_batch(
            scheduler: Any, batch: Any, *args: Any, **kw: Any
        ) -> Any:
            # Before the step: sequence lengths belong to the next one after it.
            work = _work_of(batch)
            return self._record(work, lambda: run_batch(scheduler, batch, *args, **kw))

        scheduler_class.get_next_batch_to_run = timed_get_next
        scheduler_class.process_batch_result = timed_process_result
        scheduler_class.run_batch = recorded_run_batch
        scheduler_class.ingest_requests = timed_ingest

    def wrap_ours(self) -> None:
        """Time our scheduler's additions to SGLang's own methods, every other step.

        The measurement adds a tenth to the measured time.
        """
        self._wrapped_ours = True
        from sglang_batch.srt.scheduler.engine_jobs import RequestRegistry
        from sglang_batch.srt.scheduler.plan_scheduler import PlanScheduler

        def timed(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._looks_at_ours:
                    return method(*args, **kwargs)
                begin = time.thread_time()
                done = method(*args, **kwargs)
                self._added_s += time.thread_time() - begin
                return done

            return call

        next_batch = PlanScheduler.next_batch

        def timed_next_batch(
            plan_scheduler: Any, running_batch: Any, build: Any
        ) -> Any:
            if not self._looks_at_ours:
                return next_batch(plan_scheduler, running_batch, build)

            def timed_build(batch: Any) -> Any:
                begin = time.thread_time()
                plan = build(batch)
                self._added_s -= time.thread_time() - begin
                return plan

            return timed(next_batch)(plan_scheduler, running_batch, timed_build)

        PlanScheduler.next_batch = timed_next_batch  # type: ignore[assignment,method-assign]
        for owner, name in (
            (PlanScheduler, "begin_step"), (PlanScheduler, "end_step"),
            (RequestRegistry, "released"),
        ):  # fmt: skip
            setattr(owner, name, timed(getattr(owner, name)))

    def _record(self, work: tuple[int, int, int], run: Callable[[], Any]) -> Any:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        # While it runs, the next step's may begin.
        resumed, self._resumed = self._resumed, False
        done = run()
        end = time.perf_counter()
        gap_s = begin - self._last_end
        host_cpu_s = self._schedule_cpu_s + self._result_cpu_s
        added_s = self._added_s if self._looks_at_ours else float("nan")
        times = (
            self._schedule_s,
            self._result_s,
            gap_s,
            self._idle_s,
            self._ingest_s,
            host_cpu_s,
            added_s,
            resumed,
        )
        cpu_s = self._cpu_s + time.process_time() - begin_cpu
        record = np.array([(begin, end - begin, *times, cpu_s, *work)], dtype=STEP)
        self._file.write(record.tobytes())
        self._last_end = end
        self._result_s = self._result_cpu_s = self._added_s = self._cpu_s = 0.0
        self._ingest_s = self._idle_s = 0.0
        self._looks_at_ours = self._wrapped_ours and not self._looks_at_ours
        return done


def hold_back(scheduler_class: Any, first: int, last: int) -> None:
    """Keep the class receiving, without a step, from ``first`` to ``last`` requests.

    Its methods then raise RuntimeError if the rest does not come in time.
    """
    ingest, add = scheduler_class.ingest_requests, scheduler_class._add_request_to_queue
    arrived = 0

    def counted_add(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal arrived
        arrived += 1
        return add(scheduler, *args, **kwargs)

    def held_ingest(scheduler: Any) -> Any:
        done = ingest(scheduler)
        deadline = time.monotonic() + HOLD_TIMEOUT_S
        while first < arrived < last:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {arrived} of {last} requests arrived.")
            time.sleep(0.001)  # leaves the core to the sender
            done = ingest(scheduler)
        return done

    scheduler_class.ingest_requests = held_ingest
    scheduler_class._add_request_to_queue = counted_add


def _work_of(batch: Any) -> tuple[int, int, int]:
    """Tokens prefilled, decode rows, and KV tokens that these read."""
    mode = batch.forward_mode
    if mode.is_decode():
        return 0, batch.batch_size(), int(batch.seq_lens_cpu.sum())
    if mode.is_mixed():
        # The rows of decodes come last, and each counts as one token of the extend.
        rows = len(batch.decoding_reqs)
        kv_tokens = int(batch.seq_lens_cpu[-rows:].sum()) if rows else 0
        return int(batch.extend_num_tokens) - rows, rows, kv_tokens
    return int(batch.extend_num_tokens or 0), 0, 0
