"""A run before its engine starts: all that can be checked by then is checked here, once.

:func:`prepare` goes from cheap to dear: the names of files, the engine's options and our
settings, a fleet or a place for the state that must answer, the earlier job with this
output, the model, the input, and each of its lines. SGLang is imported after that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..batch_api.jsonl import BatchFile
from ..batch_api.lines import UNKNOWN_MODEL, LineRules
from ..config import OfflineBatchConfig
from ..inputs.job_input import JobInput
from ..inputs.local_input import LocalInput
from ..inputs.staging import Staging, check_template
from ..store.files import check_writable
from . import run_options
from .fleet_options import EngineOptions, engine_options
from .job_directory import JobDirectory, JobRecord
from .model_place import served_name
from .outputs import Outputs
from .shared_state import StateUrl
from .vllm_flags import sglang_argv

_WAY_OUT = "--skip-invalid answers bad lines with an error and runs the others."


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``sglang-batch run``.

    engine: where the model runs, with its own options.
    settings: those of our settings that have an option and are given.
    enough: the share of answers after which the job ends.
    state: URL or directory that keeps the job's state too.
    """

    job_input: JobInput
    outputs: Outputs
    engine: EngineOptions
    settings: Mapping[str, Any]
    overwrite: bool
    skip_invalid: bool
    enough: float | None
    state: str | None

    @classmethod
    def of(cls, options: argparse.Namespace, server_argv: list[str]) -> RunOptions:
        """The options that were parsed, and those left for the engine.

        Raises ConfigError if one of them cannot be used, whatever the others are.
        """
        argv = sglang_argv(server_argv, lambda note: print(note, file=sys.stderr))
        settings = run_options.given_settings(options)
        OfflineBatchConfig(**settings)  # raises
        job_input = run_options.job_input(options)
        return cls(
            job_input=job_input,
            outputs=Outputs.of(
                options.output_file, options.error_file, options.output_tmp_dir
            ).of_input(job_input),
            engine=engine_options(options, argv),
            settings=settings,
            overwrite=options.overwrite,
            skip_invalid=options.skip_invalid,
            enough=options.enough,
            state=options.state,
        )

    def check_files(self) -> None:
        """Look for errors in the names of inputs and outputs.

        Raises:
            InputError: an input is missing, or two of the files are the same.
            ConfigError: an output cannot be created, or a scheme cannot be used.
        """
        self.job_input.check()
        self.outputs.check(self.job_input)


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start. It keeps others from its output until its block ends.

    known: the engine's options, by SGLang's names, as far as they are given.
    config: our settings.
    afresh: an earlier job with this output is discarded.
    requests: those of ``local``. Both are None if the job is complete.
    """

    options: RunOptions
    known: argparse.Namespace
    config: OfflineBatchConfig
    directory: JobDirectory
    staging: Staging
    afresh: bool
    local: LocalInput | None = None
    requests: BatchFile | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> PreparedRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def prepare(options: RunOptions) -> PreparedRun:
    """Check everything that can be checked before the engine starts.

    Raises:
        InputError: the input cannot be used, or differs from that of an earlier run.
        ConfigError: an option or the model cannot be used.
        StoreError: the output cannot be written, or another run is writing it.
    """
    options.check_files()
    known = options.engine.arguments()
    config = OfflineBatchConfig.from_json(getattr(known, "offline_batch_config", None))
    config = replace(config, **options.settings)
    if config.answer_cache is not None:
        check_writable(Path(config.answer_cache), "answer_cache")
    options.engine.check_settings(config)
    state = None if options.state is None else StateUrl(options.state)
    if state is not None:
        state.check()
    with ExitStack() as stack:
        directory = stack.enter_context(JobDirectory(options.outputs, state))
        staging = Staging(directory.path)
        earlier = None if options.overwrite else directory.restore()
        afresh = options.overwrite or _starts_again(options, directory, earlier)
        if afresh:
            earlier = None
        elif earlier is not None:
            directory.check_model(earlier, known)
        prepared = PreparedRun(options, known, config, directory, staging, afresh)
        complete = earlier is not None and directory.is_complete(earlier)
        if not complete:
            options.engine.find_model(known)  # before any input is read or downloaded
        elif earlier and staging.earlier_sha256(options.job_input) == (
            earlier.input_sha256
        ):
            # The staged input may be gone.
            return replace(prepared, _open=stack.pop_all())
        if not options.skip_invalid:
            check_template(options.job_input, line_rules(known))
        local = staging.stage(options.job_input, afresh=options.overwrite)
        if earlier is not None:
            directory.check_input(earlier, local)
        if not complete:
            requests = checked_requests(local, known, skip_invalid=options.skip_invalid)
            stack.enter_context(requests.closing())
            prepared = replace(prepared, local=local, requests=requests)
        return replace(prepared, _open=stack.pop_all())


def _starts_again(
    options: RunOptions, directory: JobDirectory, earlier: JobRecord | None
) -> bool:
    """Whether other options make requests from rows. InputError: answers would be lost."""
    changed = [] if earlier is None else earlier.changed_options(options.job_input)
    if earlier is None or not changed:
        return False
    difference = " and ".join(changed)
    if directory.has_answers(earlier):
        raise directory.another(difference)
    print(
        f"Starting again with another {difference}: no line of the earlier run was "
        "answered.",
        file=sys.stderr,
    )
    return True


def line_rules(known: argparse.Namespace) -> LineRules:
    """The rules for lines of an engine with these options."""
    from ..srt.engine.checks.body_checks import body_errors

    compiles = getattr(known, "grammar_backend", "xgrammar") == "xgrammar"
    limits = getattr(known, "limits", UNKNOWN_MODEL)
    check = partial(body_errors, compiles=compiles, limits=limits)
    models = (served_name(known),)
    return LineRules(models=models, require_model=False, check_body=check)


def checked_requests(
    local: LocalInput, known: argparse.Namespace, *, skip_invalid: bool
) -> BatchFile:
    """The requests of a file, checked in one pass.

    Args:
        known: the engine's options.
        skip_invalid: keep bad lines as such, if there is a good one. Otherwise they
            reject the file.

    Raises InputError if lines are bad; the message lists them.
    """
    rules = line_rules(known)
    if not skip_invalid:
        return local.requests(rules, way_out=_WAY_OUT)
    requests = local.requests(rules, skip_invalid=True)
    if requests.invalid and len(requests.invalid) == len(requests):
        # Most likely an option is wrong, such as the model's name.
        with requests.closing():
            return local.requests(rules)
    return requests
