"""``sglang-batch run``: answer files of requests in one process, without a server.

While the job runs, its state is in the directory ``<output>.job``: the record of the job
(``job.json``) and the finished results (``results.jsonl``). The same command resumes from
there. The output appears, in input order, when all requests are done.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import OfflineBatchConfig
from ..errors import EngineError, ExitStatus, SGLangBatchError
from ..inputs.job_input import JobInput
from ..inputs.staging import Staging
from . import run_options
from .backend_options import (
    BACKENDS,
    StartEngine,
    check_backend_arguments,
    chosen_backend,
    transformers_engine,
    transformers_options,
)
from .checked_input import checked_again, checked_requests
from .engine_log import EngineLog
from .job_directory import JobDirectory
from .model_place import check_model
from .outputs import Outputs
from .progress import Display, elapsed
from .summary import Summary


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``sglang-batch run``.

    server_argv: the options that are the engine's.
    backend: one of :data:`.backend_options.BACKENDS`.
    """

    job_input: JobInput
    outputs: Outputs
    overwrite: bool
    policy: str | None
    max_inflight: int | None
    skip_invalid: bool
    server_argv: list[str]
    backend: str = BACKENDS[0]


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
    known = check_backend_arguments(options.backend, options.server_argv)
    with JobDirectory(options.outputs) as directory:
        staging = Staging(directory.path)
        earlier = None
        if not options.overwrite:
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
    if not finished:  # which needs no model
        check_model(known)  # before standard input is read or anything is downloaded
    local = staging.stage(options.job_input, afresh=options.overwrite)
    if not options.overwrite:
        directory.check_input(local)
    if finished:
        return _finished(options, directory)
    # All lines are checked before SGLang is imported, which takes seconds.
    named = run_options.named_model(options.server_argv)
    requests = checked_requests(local, named, skip_invalid=options.skip_invalid)
    from .running_job import RunningJob  # takes half a second to import

    with EngineLog(directory.engine_log) as engine_log:
        display = Display(engine_log.terminal)
        try:
            with display.showing(elapsed("Loading the engine")):
                settings, note = _settings(options)
            if note:
                display.say(note)
            model = _model_name(settings.server_args)
            requests = checked_again(
                requests, local, named=named, model=model,
                skip_invalid=options.skip_invalid,
            )  # fmt: skip
            job = RunningJob(
                directory, local, requests, settings.config, engine_log, display
            )
            with requests.closing():
                summary = job.run(
                    settings.start, memory_note=settings.memory_note,
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


@dataclass(frozen=True, slots=True)
class _Settings:
    """SGLang's arguments, our settings, and the model before SGLang resolves it.

    memory_note: the size of SGLang's KV cache where it is our default, else empty.
    start: loads the model in the chosen engine.
    model, served_model: its path or name, and its name in requests.
    """

    server_args: Any
    memory_note: str
    start: StartEngine
    config: OfflineBatchConfig
    model: str
    served_model: str


def _settings(options: RunOptions) -> tuple[_Settings, str]:
    """The settings of a run, and which engine ``--backend auto`` chose and why.

    Named options override the JSON ones.
    """
    from ..srt.engine import in_process
    from ..srt.plugin import engine_death

    backend, argv, note = options.backend, options.server_argv, ""
    if backend == "auto":
        backend, reason = chosen_backend(argv)
        note = f"--backend {backend}: {reason}."
    if backend == "transformers":
        server_args, start = transformers_engine(argv)
    else:
        if not any(argument.split("=")[0] == "--log-level" for argument in argv):
            argv = [*argv, "--log-level=info"]
        server_args = in_process.parse_server_args(argv)
        start = partial(in_process.engine, server_args)
    # Resolving may replace the names by the path of a downloaded file.
    model, served_model = server_args.model_path, in_process.model_name(server_args)
    memory_note = ""
    if backend == "transformers":
        model = transformers_options(argv).model_path
    else:
        in_process.resolve(server_args, engine_death.tell)
        memory_note = in_process.memory_note(server_args)
    named = {"policy": options.policy, "max_inflight": options.max_inflight}
    given: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
    config = dataclasses.replace(server_args.offline_config, **given)
    settings = _Settings(server_args, memory_note, start, config, model, served_model)
    return settings, note


def _model_name(server_args: Any) -> str:
    from ..srt.engine import in_process

    return in_process.model_name(server_args)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _report(options: RunOptions, directory: JobDirectory, summary: Summary) -> int:
    print(summary.as_table(directory.outputs))
    print(summary.as_json())
    expected = summary.refused if options.skip_invalid else 0
    return ExitStatus.FAILED_LINES if summary.failed > expected else ExitStatus.OK
