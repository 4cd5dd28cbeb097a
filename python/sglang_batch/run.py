"""``sglang-batch run``: files in, a file out, in one process.

Beside the output stands a directory ``<output>.job`` while the job runs: what the job
is (``job.json``) and what is finished (``results.jsonl``). The same command started
again reads both and goes on; the output appears, in input order, when all is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from .batch_api.jsonl import BatchFile, LineError, LineRules, validate
from .batch_api.lines import result_line
from .config import OfflineBatchConfig
from .errors import InputError
from .inputs.sources import InputOptions, check
from .inputs.staging import LocalInput, Staging
from .job import Job
from .progress import Progress
from .request import BatchRequestInput, RequestOutput
from .run_outputs import Outputs
from .run_state import JobRecord, JobState
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

    inputs: InputOptions
    outputs: Outputs
    overwrite: bool
    policy: str | None
    max_inflight: int | None
    server_argv: list[str]


def run(options: RunOptions) -> int:
    """Run a batch file; returns the process's exit status.

    Raises:
        InputError: the input cannot be used, or is not the one the job began with.
        StoreError: the output cannot be written, or another run is at work on it.
        ConfigError: an option cannot be used.
    """
    check(options.inputs)
    options.outputs.check(options.inputs)
    with JobState(options.outputs) as state:
        if not options.overwrite:
            state.check_output()
        staging = Staging(state.directory)
        status = _run_in(state, staging, options)
        if state.record.complete:
            staging.drop_copy()
        return status


def _run_in(state: JobState, staging: Staging, options: RunOptions) -> int:
    found = None if options.overwrite else staging.found(options.inputs)
    finished = found is not None and state.is_finished(found.sha256)
    if not finished:
        local = staging.bring(options.inputs, afresh=options.overwrite)
        # What needs no SGLang is checked first: a typo should not cost its import.
        with validated_file(local, LineRules(require_model=False)).closing():
            pass
        if not options.overwrite:
            state.check_input(local.sha256)
    from .srt import launch

    server_args = launch.parse_server_args(options.server_argv)
    config = _config(options, server_args.offline_config)
    rules = LineRules(
        models=(launch.model_name(server_args),),
        require_model=False,
        check_body=launch.check_body,
    )
    if finished and found is not None:  # its lines are not needed, and may be gone
        asked = JobRecord(
            input_sha256=found.sha256, model=server_args.model_path, num_requests=0
        )
        state.begin(asked, overwrite=False)
        return _nothing_to_do(state)
    requests = validated_file(local, rules)
    with requests.closing():
        asked = JobRecord(
            input_sha256=local.sha256(),
            model=server_args.model_path,
            num_requests=len(requests),
        )
        state.begin(asked, overwrite=options.overwrite)
        if state.record.complete:
            return _nothing_to_do(state)
        return _run_requests(state, requests, server_args, config)


def _nothing_to_do(state: JobState) -> int:
    """Of a job that is complete: upload what a run before could not."""
    state.upload()
    print(f"{state.outputs.output} is complete: nothing to do.", file=sys.stderr)
    return _report(Summary(**(state.record.summary or {})))


def _run_requests(
    state: JobState, requests: BatchFile, server_args: Any, config: OfflineBatchConfig
) -> int:
    from .srt import launch

    state.open_log()
    with ExitStack() as stack:
        if len(state.log.unfinished()):
            engine, loop = stack.enter_context(launch.engine(server_args))
            job_id = _job_id(state.outputs)
            summary = loop.run_until_complete(
                _run_job(job_id, requests, engine, config, state.log)
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
        state.finish(summary)
    state.upload()
    return _report(summary)


def _job_id(outputs: Outputs) -> str:
    path = str(outputs.output.path)
    return f"batch_{hashlib.sha256(path.encode()).hexdigest()[:16]}"


def _config(options: RunOptions, base: OfflineBatchConfig) -> OfflineBatchConfig:
    """The settings of ``--offline-batch-config``, under those given by name."""
    named = {"policy": options.policy, "max_inflight": options.max_inflight}
    given: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
    return dataclasses.replace(base, **given)


def validated_file(local: LocalInput, rules: LineRules) -> BatchFile:
    """The input as requests; raises InputError that names the bad lines."""
    rules = dataclasses.replace(rules, line_name=local.line_name)
    result = validate(local.path, rules)
    if isinstance(result, BatchFile):
        return result
    shown = "".join(
        f"\n  {_described(error, local)}" for error in result[:MAX_ERRORS_SHOWN]
    )
    more = len(result) - MAX_ERRORS_SHOWN
    if more > 0:
        shown += f"\n  ... and {more} more"
    raise InputError(f"{local.title} cannot be run:{shown}{_hint(result)}")


def _described(error: LineError, local: LocalInput) -> str:
    without_line = dataclasses.replace(error, line=None)
    where = "" if error.line is None else f"{local.line_name(error.line)}: "
    return f"{where}{without_line}"


def _hint(errors: list[LineError]) -> str:
    if any(error.code == "model_not_found" for error in errors):
        return "\nName the model that the file asks for with --served-model-name."
    return ""


async def _run_job(
    job_id: str,
    requests: BatchFile,
    engine: Any,
    config: OfflineBatchConfig,
    log: ResultLog,
) -> Summary | None:
    """Run what is not finished; None when stopped before the end."""
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
