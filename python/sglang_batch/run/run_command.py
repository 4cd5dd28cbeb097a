"""``sglang-batch run``: answer files of requests in one process, without a server.

While the job runs, its state is in the directory ``<output>.job``: the record of the job
(``job.json``) and the finished results (``results.jsonl``). The same command resumes from
there. The output appears, in input order, when all requests are done.
"""

from __future__ import annotations

import signal
import sys
import traceback

import msgspec

from ..errors import EngineError, ExitStatus, SGLangBatchError, StoreWriteError
from .engine_log import EngineLog
from .prepare import PreparedRun, RunOptions, prepare
from .progress import Display, elapsed
from .summary import Summary


def run(options: RunOptions) -> int:
    """Run a job, or resume it. Returns the process's exit status.

    Raises as :func:`~.prepare.prepare`, and EngineError if the engine failed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with prepare(options) as prepared:
        directory = prepared.directory
        if prepared.requests is None:
            summary = msgspec.convert(directory.record.summary or {}, Summary)
        elif (answered := _answered(prepared)) is not None:
            summary = answered
        else:
            return ExitStatus.INTERRUPTED
        directory.upload()  # also where an earlier run failed to
        if prepared.requests is None:
            said = f"{options.outputs.output} is complete: nothing to do."
            print(said, file=sys.stderr)
        print(summary.as_table(options.outputs))
        print(summary.as_json())
        prepared.staging.drop_copy()
    expected = summary.refused if options.skip_invalid else 0
    return ExitStatus.FAILED_LINES if summary.failed > expected else ExitStatus.OK


def _answered(prepared: PreparedRun) -> Summary | None:
    """Have the engine answer all requests. None if a signal stopped it."""
    from ..server.result_saver import is_write_error
    from .running_job import RunningJob  # takes half a second to import

    with EngineLog(prepared.directory.engine_log) as engine_log:
        display = Display(engine_log.terminal)
        try:
            with display.showing(elapsed("Loading the engine")):
                settings = prepared.options.engine.settings()
            if settings.note:
                display.say(settings.note)
            cached = None
            if prepared.config.answer_cache is not None:
                from ..job.answer_cache import ModelAnswers

                options, model = vars(settings.server_args), prepared.known.model_path
                cached = ModelAnswers(prepared.config, model, options).of()
            return RunningJob(prepared, settings, engine_log, display, cached).run()
        except (SGLangBatchError, KeyboardInterrupt):
            raise
        except Exception as error:
            if is_write_error(error):  # the log of the engine cannot be written, either
                place = prepared.directory.path
                raise StoreWriteError(f"cannot write {place}: {error}") from error
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            raise EngineError(
                f"{reason}; the traceback is in {engine_log.path}."
            ) from error
