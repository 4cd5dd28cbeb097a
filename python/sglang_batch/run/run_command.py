"""``sglang-batch run``: answer files of requests in one process, without a server.

While the job runs, its state is in the directory ``<output>.job``: the record of the job
(``job.json``) and the finished results (``results.jsonl``). The same command resumes from
there. The output appears, in input order, when all requests are done.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, EngineError, ExitStatus, SGLangBatchError
from ..fleet.head_state import HeadState
from ..inputs.job_input import JobInput
from ..inputs.staging import Staging
from . import run_options
from .backend_options import (
    BACKENDS,
    EngineSettings,
    StartEngine,
    check_backend_arguments,
    engine_settings,
)
from .engine_log import EngineLog
from .fleet_options import FleetOptions, WorkerOptions
from .job_directory import JobDirectory
from .model_place import check_model
from .outputs import Outputs
from .prepare import checked_again, checked_requests
from .progress import Display, elapsed
from .shared_state import StateUrl
from .summary import Summary

if TYPE_CHECKING:
    from ..job.answer_cache import CachedAnswers


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``sglang-batch run``.

    enough: the share of answers after which the job ends.
    dollars_per_hour: price of an engine.
    server_argv: the options that are the engine's.
    backend: one of :data:`.options.backend_options.BACKENDS`.
    fleet: the engines, if not one in this process.
    state: URL or directory that keeps the job's state too.
    """

    job_input: JobInput
    outputs: Outputs
    overwrite: bool
    policy: str | None
    max_inflight: int | None
    dedupe: str | None
    answer_cache: str | None
    enough: float | None
    dollars_per_hour: float | None
    stop_rules: str | None
    skip_invalid: bool
    server_argv: list[str]
    backend: str = BACKENDS[0]
    fleet: FleetOptions | None = None
    state: str | None = None


def run(options: RunOptions) -> int:
    """Run a job, or resume it. Returns the process's exit status.

    Raises:
        InputError: the input cannot be used, or differs from that of an earlier run.
        ConfigError: an option or the model cannot be used.
        StoreError: the output cannot be written, or another run is writing it.
        EngineError: the engine failed.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    options.job_input.check()
    options.outputs.check(options.job_input)
    check = check_backend_arguments if options.fleet is None else options.fleet.check
    known = check(options.backend, options.server_argv)
    state = None
    if options.state is not None:
        state = StateUrl(options.state)
        state.check()
    with JobDirectory(options.outputs, state) as directory:
        staging = Staging(directory.path)
        earlier = None
        if not options.overwrite:
            directory.restore()
            directory.check_output()
            earlier = staging.earlier(options.job_input)
        if earlier is not None and directory.is_finished(earlier.sha256):
            # Its staged input may be gone.
            directory.check_model(known)
            status = _finished(options, directory)
        else:
            status = _run_input(options, directory, staging, known)
        if directory.record.complete:
            staging.drop_copy()
        return status


def _run_input(
    options: RunOptions,
    directory: JobDirectory,
    staging: Staging,
    known: argparse.Namespace,
) -> int:
    if not options.overwrite:
        directory.check_model(known)
    finished = not options.overwrite and directory.is_finished()
    if not finished and not isinstance(options.fleet, WorkerOptions):
        check_model(known)  # before standard input is read or anything is downloaded
    local = staging.stage(options.job_input, afresh=options.overwrite)
    if not options.overwrite:
        directory.check_input(local)
    if finished:
        return _finished(options, directory)
    # All lines are checked before SGLang is imported, which takes seconds.
    named = run_options.named_model(options.server_argv)
    if isinstance(options.fleet, WorkerOptions):
        named = str(known.served_model_name)
    requests = checked_requests(local, named, skip_invalid=options.skip_invalid)
    from .running_job import RunningJob  # takes half a second to import

    with EngineLog(directory.engine_log) as engine_log:
        display = Display(engine_log.terminal)
        try:
            with display.showing(elapsed("Loading the engine")):
                settings = _settings(options)
            if settings.note:
                display.say(settings.note)
            model = _model_name(settings)
            requests = checked_again(
                requests, local, named=named, model=model,
                skip_invalid=options.skip_invalid,
            )  # fmt: skip
            job = RunningJob(
                directory, local, requests, settings.config, engine_log, display,
                enough=options.enough, cached=_cached(options, settings),
            )  # fmt: skip
            with requests.closing():
                summary = job.run(
                    _start(options, settings, directory),
                    memory_note=settings.memory_note,
                    model=settings.model, served_model=settings.served_model,
                    overwrite=options.overwrite,
                )  # fmt: skip
        except (SGLangBatchError, KeyboardInterrupt):
            raise
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(
                f"{reason}; the traceback is in {engine_log.path}."
            ) from error
    if summary is None:
        return ExitStatus.INTERRUPTED
    directory.upload()
    return _report(options, directory, summary)


def _finished(options: RunOptions, directory: JobDirectory) -> int:
    """The job is complete, but an earlier run may have failed to upload it."""
    record = directory.resume_finished()
    directory.upload()
    print(f"{directory.outputs.output} is complete: nothing to do.", file=sys.stderr)
    return _report(options, directory, Summary.of_record(record.summary or {}))


def _settings(options: RunOptions) -> EngineSettings:
    """The settings of a run. Named options override the JSON ones."""
    make = engine_settings if options.fleet is None else options.fleet.settings
    return make(
        options.backend,
        options.server_argv,
        policy=options.policy,
        max_inflight=options.max_inflight,
        dedupe=options.dedupe,
        answer_cache=options.answer_cache,
        dollars_per_hour=options.dollars_per_hour,
        stop_rules=options.stop_rules,
    )


def _start(
    options: RunOptions, settings: EngineSettings, job: JobDirectory
) -> StartEngine:
    """What starts the engine: in this process, or a fleet of them."""
    if options.fleet is None:
        return settings.start
    # SGLang, which does this, is in other processes.
    logging.basicConfig(
        level=logging.INFO, format="[%(asctime)s] %(message)s", force=True
    )
    return partial(_started_fleet, options, settings, job)


def _started_fleet(
    options: RunOptions, settings: EngineSettings, job: JobDirectory
) -> Any:
    """The engines of a fleet, after the job has begun: then the run has its epoch."""
    assert options.fleet is not None
    head = HeadState.begin(job.job_id, job.path, job.epoch())
    start = options.fleet.start(settings, options.backend, options.server_argv, head)
    return start()


def _cached(options: RunOptions, settings: EngineSettings) -> CachedAnswers | None:
    """The answers of earlier jobs, if they are kept.

    Raises:
        ConfigError: they cannot be, or the model is on other servers.
    """
    if settings.config.answer_cache is None:
        return None
    if isinstance(options.fleet, WorkerOptions):
        raise ConfigError(
            "--answer-cache has no use with --workers, whose model may change: start the "
            "servers with --offline-batch-config '{\"answer_cache\": ...}'."
        )
    from ..job.answer_cache import ModelAnswers

    model = settings.model
    return ModelAnswers(settings.config, model, vars(settings.server_args)).of()


def _model_name(settings: EngineSettings) -> str:
    if settings.server_args is None:
        return settings.served_model
    from ..srt.engine import in_process

    return in_process.model_name(settings.server_args)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _report(options: RunOptions, directory: JobDirectory, summary: Summary) -> int:
    print(summary.as_table(directory.outputs))
    print(summary.as_json())
    expected = summary.refused if options.skip_invalid else 0
    return ExitStatus.FAILED_LINES if summary.failed > expected else ExitStatus.OK
