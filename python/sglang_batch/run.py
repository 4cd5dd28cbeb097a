"""``sglang-batch run``: a file in, a file out, in one process.

Beside the output stands a directory ``<output>.job`` while the job runs: what the job
is (``job.json``) and what is finished (``results.jsonl``). The same command started
again reads both and goes on; the output appears, in input order, when all is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .batch_api.jsonl import BatchFile, LineError, LineRules, validate
from .batch_api.lines import result_line
from .config import OfflineBatchConfig
from .errors import InputError, StoreError
from .job import Job
from .progress import Progress
from .request import BatchRequestInput, RequestOutput
from .store.files import atomic_write
from .store.lock import FileLock
from .store.result_log import ResultLog
from .summary import Summary

EXIT_OK = 0
EXIT_LINES_FAILED = 3
EXIT_INTERRUPTED = 130

COMMIT_EVERY_S = 0.5
MAX_ERRORS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``sglang-batch run`` that are not SGLang's."""

    input_file: Path
    output_file: Path
    error_file: Path | None
    overwrite: bool
    policy: str | None
    max_inflight: int | None
    server_argv: list[str]


class JobRecord(msgspec.Struct, kw_only=True):
    """What a job is; a later run must be the same job to continue it."""

    input_sha256: str
    model: str
    num_requests: int
    complete: bool = False
    summary: dict[str, Any] | None = None


def run(options: RunOptions) -> int:
    """Run a batch file; returns the process's exit status.

    Raises:
        InputError: the input cannot be used, or is not the one the job began with.
        StoreError: the output cannot be written, or another run is at work on it.
        ConfigError: an option cannot be used.
    """
    _check_paths(options)
    # What needs no SGLang is checked first: a typo should not cost its import.
    validated_file(options.input_file, LineRules(require_model=False))
    from .srt import launch

    server_args = launch.parse_server_args(options.server_argv)
    config = _config(options, server_args.offline_config)
    rules = LineRules(
        models=(launch.model_name(server_args),),
        require_model=False,
        check_body=launch.check_body,
    )
    requests = validated_file(options.input_file, rules)
    with ExitStack() as stack:
        stack.enter_context(requests.closing())
        state = _JobState(options, server_args.model_path, len(requests))
        if state.record.complete:
            print(f"{options.output_file} is complete: nothing to do.", file=sys.stderr)
            return _report(Summary(**(state.record.summary or {})))
        stack.enter_context(state)
        if len(state.log.unfinished()):
            engine, loop = stack.enter_context(launch.engine(server_args))
            summary = loop.run_until_complete(
                _run_job(options, requests, engine, config, state.log)
            )
            if summary is None:
                print(
                    f"Stopped with {state.log.num_done} of {len(requests)} requests "
                    "done. The same command continues from there.",
                    file=sys.stderr,
                )
                return EXIT_INTERRUPTED
        else:
            summary = Summary.of_log(state.log, seconds=0.0)
        state.finish(options, summary)
        return _report(summary)


def _config(options: RunOptions, base: OfflineBatchConfig) -> OfflineBatchConfig:
    """The settings of ``--offline-batch-config``, under those given by name."""
    named = {"policy": options.policy, "max_inflight": options.max_inflight}
    given = {key: value for key, value in named.items() if value is not None}
    return dataclasses.replace(base, **given)


def _check_paths(options: RunOptions) -> None:
    if not options.input_file.is_file():
        raise InputError(f"input file {options.input_file} does not exist.")
    outputs = [path for path in (options.output_file, options.error_file) if path]
    if options.input_file.resolve() in [path.resolve() for path in outputs]:
        raise InputError(f"{options.input_file} is both input and output.")
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise InputError(f"{options.output_file} is both output and error file.")
    for path in outputs:
        if path.is_dir() or not path.parent.is_dir():
            reason = "is a directory" if path.is_dir() else "has no directory to be in"
            raise StoreError(f"cannot write {path}: it {reason}.")


def validated_file(path: Path, rules: LineRules) -> BatchFile:
    result = validate(path, rules)
    if isinstance(result, BatchFile):
        return result
    shown = "\n".join(f"  {error}" for error in result[:MAX_ERRORS_SHOWN])
    more = len(result) - MAX_ERRORS_SHOWN
    if more > 0:
        shown += f"\n  ... and {more} more"
    hint = _hint(result)
    raise InputError(f"{path} cannot be run:\n{shown}{hint}")


def _hint(errors: list[LineError]) -> str:
    if any(error.code == "model_not_found" for error in errors):
        return "\nName the model that the file asks for with --served-model-name."
    return ""


class _JobState:
    """The job's directory, checked against what is asked for now."""

    log: ResultLog

    def __init__(self, options: RunOptions, model: str, num_requests: int) -> None:
        output = options.output_file
        self.directory = output.with_name(output.name + ".job")
        self._record_path = self.directory / "job.json"
        self._lock = FileLock(self.directory / "lock")
        if options.overwrite:
            self._forget(output)
        asked = JobRecord(
            input_sha256=_sha256(options.input_file),
            model=model,
            num_requests=num_requests,
        )
        self.record = self._resume(asked, output)

    def _resume(self, asked: JobRecord, output: Path) -> JobRecord:
        try:
            found = msgspec.json.decode(self._record_path.read_bytes(), type=JobRecord)
        except FileNotFoundError:
            if output.exists():
                raise StoreError(
                    f"{output} exists and no job of ours wrote it; remove it, choose "
                    "another output, or pass --overwrite."
                ) from None
            return asked
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StoreError(
                f"{self._record_path} cannot be read ({error}); "
                "pass --overwrite to start again."
            ) from None
        for field, what in (("input_sha256", "input file"), ("model", "--model-path")):
            if getattr(found, field) != getattr(asked, field):
                raise InputError(
                    f"{output} was begun with another {what}: it was "
                    f"{getattr(found, field)}, now it is {getattr(asked, field)}. "
                    "Restore it to continue, or pass --overwrite to start again."
                )
        # A finished job whose output is gone has nothing left: it starts again.
        return found if output.exists() or not found.complete else asked

    def _forget(self, output: Path) -> None:
        if self.directory.exists():
            self._acquire()  # not from under a run that is still at work
            shutil.rmtree(self.directory)
            self._lock.release()
        output.unlink(missing_ok=True)

    def _acquire(self) -> None:
        holder = self._lock.acquire("another sglang-batch run")
        if holder is not None:
            raise StoreError(f"{self.directory} is in use by {holder}.")

    def __enter__(self) -> _JobState:
        self.directory.mkdir(exist_ok=True)
        self._acquire()
        self._write_record()
        self.log = ResultLog(self.directory / "results.jsonl", self.record.num_requests)
        return self

    def __exit__(self, *exc: object) -> None:
        self.log.close()
        self._lock.release()

    def finish(self, options: RunOptions, summary: Summary) -> None:
        """Write the output files in input order; only then is the job complete."""
        with ExitStack() as stack:
            outputs = stack.enter_context(atomic_write(options.output_file))
            errors = outputs
            if options.error_file is not None:
                errors = stack.enter_context(atomic_write(options.error_file))
            self.log.write_ordered(outputs, errors)
        self.record.complete = True
        self.record.summary = summary.as_dict()
        self._write_record()
        self.log.close()
        self.log.path.unlink()

    def _write_record(self) -> None:
        with atomic_write(self._record_path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.record)))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _run_job(
    options: RunOptions,
    requests: BatchFile,
    engine: Any,
    config: OfflineBatchConfig,
    log: ResultLog,
) -> Summary | None:
    """Run what is not finished; None when stopped before the end."""
    job_id = (
        "batch_" + hashlib.sha256(str(options.output_file).encode()).hexdigest()[:16]
    )
    stop = asyncio.Event()
    await engine.connect()
    _on_signals(stop.set)
    started = time.monotonic()
    todo = log.unfinished()
    with Progress(len(requests), log) as progress:

        def store(request: BatchRequestInput, output: RequestOutput) -> None:
            line = result_line(request, job_id, output)
            log.put(request.index, line, ok=output.ok, usage=output.usage)
            progress.update()

        job = Job(
            job_id, requests, todo, engine, config, store,
            on_rendered=progress.rendered,
        )  # fmt: skip
        committing = asyncio.create_task(_commit_regularly(log))
        try:
            await job.run(stop)
        finally:
            committing.cancel()
            with suppress(asyncio.CancelledError):
                await committing
            log.commit()
    if len(log.unfinished()):
        return None
    return Summary.of_log(
        log,
        time.monotonic() - started,
        optimal_cached_share=job.optimal_prefix_sharing_ratio,
    )


async def _commit_regularly(log: ResultLog) -> None:
    while True:
        await asyncio.sleep(COMMIT_EVERY_S)
        await asyncio.to_thread(log.commit)


def _on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)


def _report(summary: Summary) -> int:
    print(summary.as_table())
    print(summary.as_json())
    return EXIT_LINES_FAILED if summary.failed else EXIT_OK
