"""A data frame in, the same frame with a column of answers out.

A frame is read through the Arrow PyCapsule protocol (``__arrow_c_stream__``), which pandas,
Polars, pyarrow and DuckDB have in common. Adding columns takes a line for each of them, so
that a frame keeps its index, its types and its connection.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..batch_api.lines import LineRules
from ..batch_api.protocol import ACTIVE_STATUSES, COMPLETED, ENDPOINTS
from ..errors import ConfigError, EngineError, ExitStatus, InputError, ServerError
from ..inputs.job_input import DEFAULT_ENDPOINT, JobInput, input_sources
from ..inputs.staging import Staging, check_template
from ..inputs.tables import arrow_columns, check_columns
from ..inputs.template import Template
from ..run.answer_table import answers_of, check_one_answer
from .own_server import flags_of


class DataFrame:
    """A frame of some library. Raises ConfigError if it is none."""

    def __init__(self, frame: Any) -> None:
        if not hasattr(frame, "__arrow_c_stream__"):
            raise ConfigError(
                f"a {type(frame).__name__} is no table: pass a DataFrame of pandas or "
                "Polars, a pyarrow.Table, a DuckDB relation, or anything else with "
                "__arrow_c_stream__."
            )
        self._frame = frame
        roots = {kind.__module__.partition(".")[0] for kind in type(frame).__mro__}
        self._is_pandas, self._is_polars = "pandas" in roots, "polars" in roots
        self._is_duckdb = bool(roots & {"duckdb", "_duckdb"})
        if (self._is_pandas or self._is_polars) and not hasattr(frame, "columns"):
            raise ConfigError(
                f"a {type(frame).__name__} is one column: make a DataFrame of it."
            )

    @property
    def columns(self) -> list[str]:
        """The names of its columns, as text. Those of pandas may be any values."""
        if self._is_pandas or self._is_polars:
            return list(map(str, self._frame.columns))
        return list(self._whole.column_names)

    def has_column(self, name: str) -> bool:
        """Whether a new column cannot have this name. DuckDB does not tell cases apart."""
        if self._is_duckdb:
            return name.lower() in map(str.lower, self.columns)
        return name in self.columns

    def arrow(self, columns: Collection[str]) -> Any:
        """These columns, as a ``pyarrow.Table``. Raises InputError if one is missing, or has
        no type in Arrow.
        """
        import pyarrow

        names, found = sorted(columns), self.columns
        check_columns("the table", names, found)
        try:
            if self._is_pandas:  # its other columns may have no type in Arrow
                chosen = self._frame.iloc[:, [found.index(name) for name in names]]
                chosen = chosen.set_axis(names, axis=1)
                return pyarrow.Table.from_pandas(chosen, preserve_index=False)
            return self._whole.select(names)
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise InputError(f"the table cannot be read as Arrow: {error}") from None

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> Any:
        """A frame of the same kind with further columns, or else a ``pyarrow.Table``."""
        if self._is_pandas:
            frame = self._frame.copy(deep=False)
            levels = frame.columns.nlevels
            for name, values in columns.items():
                label = name if levels == 1 else (name, *[""] * (levels - 1))
                frame[label] = values
            return frame
        added = arrow_columns(columns)
        if self._is_polars:
            return self._frame.hstack(type(self._frame)(added))
        table = self._whole
        for name in added.column_names:
            table = table.append_column(name, added[name])
        if not self._is_duckdb:
            return table
        answered = table  # noqa: F841 - DuckDB finds it by this name
        return self._frame.query("table_before", "SELECT * FROM answered")

    @cached_property
    def _whole(self) -> Any:
        """All of it, read once: a relation is a query, and its rows may have no order."""
        import pyarrow

        return pyarrow.table(self._frame)


def map_table(
    frame: Any,
    template: Mapping[str, Any] | str,
    *,
    model_path: str | None = None,
    server: str | None = None,
    api_key: str | None = None,
    endpoint: str = DEFAULT_ENDPOINT,
    optimize_fields: bool = True,
    answer: str = "answer",
    error: str = "error",
    job: str | Path | None = None,
    **options: Any,
) -> Any:
    """Answer one request per row of a table.

    Args:
        frame: a DataFrame of pandas or Polars, a ``pyarrow.Table``, a DuckDB relation, or
            anything else with ``__arrow_c_stream__``.
        template: the body of a request, in which ``"{{column}}"`` stands for a value of the
            row: a dictionary, its JSON text, or ``@FILE``. A text that is no JSON is the
            user's message, or the prompt or input of the endpoint. Strings with tags are
            Jinja2. See ``docs/run.md``.
        model_path: runs the job as ``sglang-batch run`` does, in a process of its own.
        server: URL of a server with the batch API, which runs it instead.
        api_key: of that server.
        endpoint: of the requests.
        optimize_fields: choose the order of the fields in the template's block, if it has
            one.
        answer: name of the column with answers: text, or for embeddings a list of numbers.
            For ``/v1/score``, ``/v1/rerank`` and ``/v1/classify`` it is the body as JSON.
        error: name of the column with errors. It is there only if a row has failed, with a
            warning, and then null for all other rows. Failed rows have a null answer.
        job: a directory that keeps the job. If it stops, the same call resumes it. By
            default nothing is kept.
        options: with ``model_path``: options of ``sglang-batch run`` and of SGLang, such as
            ``tp=2`` for ``--tp 2``, and ``trust_remote_code=True`` for
            ``--trust-remote-code``.

    Returns:
        A frame of the same kind with the rows in the same order. A ``pyarrow.Table`` if
        that library is not among the four.

    Raises:
        ConfigError: an argument or the template cannot be used.
        InputError: the table lacks a column, or ``sglang-batch run`` refuses a row, the model
            or an option.
        EngineError: the engine failed.
        ServerError: the server failed, or ended the batch before its end.
    """
    for name in options:
        for meant in difflib.get_close_matches(name, _OWN, 1, cutoff=0.8):
            raise ConfigError(f"map_table has no {name!r}; is {meant!r} meant?")
        for own in _SET_HERE:
            if own.startswith(name):  # as an option may be shortened
                raise ConfigError(
                    f"map_table sets {own!r} itself, for the rows of the table: drop "
                    f"{name!r}."
                )
    if (model_path is None) == (server is None):
        raise ConfigError("map_table needs either model_path or server.")
    if endpoint not in ENDPOINTS:
        raise ConfigError(f"endpoint {endpoint!r} is none of {', '.join(ENDPOINTS)}.")
    if server is not None and options:
        raise ConfigError(
            f"map_table has no {next(iter(options))!r}, and options of an engine are for "
            f"model_path. With a server there are {', '.join(_OWN)}."
        )
    for name, value in (("server", server), ("api_key", api_key)):
        if not isinstance(value, str | None):
            raise ConfigError(f"{name} is a {type(value).__name__}: give it as text.")
    parsed = Template.of(template, endpoint)
    check_one_answer(parsed.body, endpoint)
    given = DataFrame(frame)
    if answer == error:
        raise ConfigError(f"answer and error are one column, {answer!r}: name two.")
    for role, name in (("answer", answer), ("error", error)):
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{role}={name!r} is no name of a column, which is a text."
            )
        if given.has_column(name):
            raise ConfigError(
                f"the table has a column {name!r} already: name others with answer= and "
                "error=."
            )
    table = given.arrow(parsed.columns)
    optimize = optimize_fields and parsed.block is not None
    with contextlib.ExitStack() as stack:
        keeps = job is not None
        if job is None:
            job = stack.enter_context(TemporaryDirectory(prefix="sglang-batch-"))
        place = Path(job)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise ConfigError(f"job={str(job)!r} cannot be used: {reason}.") from None
        rows = place / "rows.arrow"
        _write(table, rows)
        if not table.num_rows:
            return given.with_columns({answer: []})
        results = place / "results.jsonl"
        if model_path is not None:
            flags = flags_of({"model_path": model_path, "url": endpoint, **options})
            body = json.dumps(parsed.body)
            arguments = ["-i", str(rows), "-o", str(results), "--template", body]
            run_job([*arguments, *["--optimize-fields"] * optimize, *flags])
        else:
            assert server is not None
            inputs = JobInput(
                input_sources([str(rows)]), parsed, endpoint, optimize_fields=optimize
            )
            _submit(server, api_key, inputs, place, keeps)
        answers, errors = answers_of(results, endpoint, table.num_rows)
    columns: dict[str, Any] = {answer: answers}
    if failed := sum(each is not None for each in errors):
        columns[error] = errors
        first = next(each for each in errors if each is not None)
        warnings.warn(
            f"{failed:,} of {table.num_rows:,} rows failed, see column {error!r}: {first}",
            stacklevel=2,
        )
    return given.with_columns(columns)


# Options of ``sglang-batch run`` that say where rows come from and answers go.
_SET_HERE = ("input_file", "output_file", "error_file", "id_column", "url", "dry_run")
_OWN = [
    name
    for name, each in inspect.signature(map_table).parameters.items()
    if each.kind is not each.VAR_KEYWORD
]


def _write(table: Any, path: Path) -> None:
    import pyarrow

    with pyarrow.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


def run_job(arguments: list[str]) -> None:
    """Run ``sglang-batch run`` and pass on its output, in a process of its own: the engine's
    memory is free afterwards, and its end is not that of the caller.
    """
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "sglang_batch", "run", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                # argparse begins with the name of the command.
                if said or re.match(r"(sglang-batch run: )?error: ", line):
                    said.append(line)
                else:
                    sys.stderr.write(line)
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        status = process.wait()
    reason = "".join(said).partition("error: ")[2].strip()
    if status in (ExitStatus.OK, ExitStatus.FAILED_LINES):
        return
    if status == ExitStatus.BAD_INPUT:
        raise InputError(reason)
    if status == ExitStatus.INTERRUPTED:
        raise KeyboardInterrupt
    raise EngineError(reason or f"sglang-batch run ended with status {status}.")


def _submit(
    server: str, api_key: str | None, inputs: JobInput, place: Path, keeps: bool
) -> None:
    """Have a server run a batch, and wait. A later call goes on with it if the place is kept,
    and it is cancelled otherwise."""
    from ..run.client.batch_client import BatchClient, first_errors
    from ..run.client.client_commands import download_all, until_ended
    from ..run.progress import Display
    from ..srt.engine.checks.body_checks import body_errors

    with contextlib.closing(BatchClient(server, api_key)) as client:
        template = inputs.template
        assert template is not None
        if "model" not in template.body:
            model = client.call("GET", "/v1/models")["data"][0]["id"]
            template = Template({"model": model, **template.body})
            inputs = replace(inputs, template=template)
        check_template(inputs, LineRules(check_body=body_errors))
        local = Staging(place).stage(inputs)
        record = place / "batch.json"
        asked = [client.url, inputs.endpoint, local.sha256()]
        batch = _begun(client, record, asked)
        if batch is None:
            batch = client.start(
                local.path, "rows.jsonl", inputs.endpoint, completion_window="24h"
            )
            record.write_text(json.dumps([*asked, batch["id"]]))
        try:
            batch = until_ended(client, batch, Display(sys.stderr))
        except KeyboardInterrupt:
            if not keeps:
                with contextlib.suppress(ConfigError, ServerError):  # it has ended
                    client.cancel(batch["id"])
            raise
        if batch["status"] != COMPLETED:
            ended = f"{batch['id']} is {batch['status']} at {client.url}."
            raise ServerError(" ".join([ended, *first_errors(batch)]))
        download_all(client, batch, place / "results.jsonl")


def _begun(client: Any, record: Path, asked: list[str]) -> Any:
    """The batch that an earlier call began for the same rows, unless it has failed."""
    with contextlib.suppress(OSError, ValueError):  # the latter if it was deleted, too
        *before, batch_id = json.loads(record.read_bytes())
        batch = client.get(batch_id) if before == asked else {}
        return batch if batch.get("status") in (*ACTIVE_STATUSES, COMPLETED) else None
    return None
