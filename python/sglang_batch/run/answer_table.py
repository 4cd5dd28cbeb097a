"""Answers as columns: of the table that a run reads, or of a data frame."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from ..batch_api.jsonl import read_lines
from ..batch_api.lines import line_error, loads_lenient
from ..batch_api.protocol import GENERATING_URLS
from ..errors import ConfigError, InputError
from ..inputs import tables
from ..inputs.cells import cell_text, text_of
from ..inputs.compression import open_plain, plain_name, undamaged
from ..inputs.job_input import InputSource, JobInput, LocalFileSource

ANSWER, ERROR = "answer", "error"
NO_OBJECT = "the answer is no JSON object; was it cut at max_tokens?"


def is_table(path: Path) -> bool:
    """Whether an output of this name is a table."""
    return _suffix(path) in _WRITERS


def check_holds_lines(path: Path) -> None:
    """Raises ConfigError if a file for JSON lines has the name of a table."""
    if _suffix(path) in _TABLES:
        raise ConfigError(
            f"{path.name} would hold JSON lines, and no table: name it *.jsonl. Tables are "
            f"written by `sglang-batch run`, as {', '.join(_WRITERS)}."
        )


def _suffix(path: Path) -> str:
    return Path(plain_name(path.name)).suffix.lower()


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """The table of a job's input with a column ``answer``, one for each key of the JSON schema
    that its template asks for, and ``error`` if a row has failed.

    path: of the output, whose suffix is the format.
    read: the identity of the input when the run began.
    """

    source: InputSource
    endpoint: str
    keys: tuple[str, ...]
    path: Path
    read: list[Any]

    @classmethod
    def of(cls, job_input: JobInput, path: Path) -> AnswerTable:
        """Raises ConfigError if the input is no table on this machine, InputError if it is
        missing."""
        template, (source, *others) = job_input.template, job_input.sources
        if template is None or others or not isinstance(source, LocalFileSource):
            raise ConfigError(
                f"{path.name} as a table needs --template and one file on this machine as "
                "input, whose columns it has; or name the output *.jsonl."
            )
        packed = plain_name(path.name) != path.name
        if packed and _WRITERS[_suffix(path)] is _write_parquet:
            raise ConfigError(f"{path.name}: Parquet is compressed by itself.")
        source.check(has_template=True)
        check_one_answer(template.body, job_input.endpoint)
        keys = schema_keys(template.body)
        return cls(source, job_input.endpoint, keys, path, source.identity())

    def check(self) -> None:
        """Raises ConfigError if the input has a column of the same name as a new one,
        InputError if it has two of one name, or cannot be read.
        """
        title, path = self.source.title, Path(self.source.name)
        with undamaged(title):
            found = tables.columns_of_file(title, path)
        tables.check_columns(title, found, found)
        for name in (ANSWER, ERROR, *self.keys):
            if name in found:
                raise ConfigError(
                    f"{title} has a column {name!r} already, which {self.path.name} is to "
                    "get: rename one, or name the output *.jsonl."
                )

    def write(self, results: Path, num_rows: int, output: BinaryIO) -> list[int]:
        """Write the table. Returns the rows whose answers lack the object that was asked for.

        results: a line for each of the first ``num_rows`` rows.

        Raises InputError if the input has changed meanwhile.
        """
        if self.source.identity() != self.read:
            raise InputError(
                f"{self.source.title} has changed since the run began. Restore it, and the "
                f"same command writes {self.path.name}."
            )
        answers, errors = answers_of(results, self.endpoint, num_rows, in_order=True)
        columns: dict[str, list[Any]] = {ANSWER: answers}
        for key in self.keys:
            columns[key] = [None] * num_rows
        no_object = []
        for row, text in enumerate(answers if self.keys else ()):
            values = {} if errors[row] else _json_object(text or "")
            if values is None:
                errors[row] = NO_OBJECT
                no_object.append(row)
                continue
            for key in self.keys:
                columns[key][row] = values.get(key)
        if any(errors):
            # Also where the schema has a key of this name.
            of_key = columns.get(ERROR, errors)
            columns[ERROR] = [e or k for e, k in zip(errors, of_key, strict=True)]
        _WRITERS[_suffix(self.path)](self.source, columns, output)
        return no_object


def check_one_answer(body: Mapping[str, Any], endpoint: str) -> None:
    """Raises ConfigError if a request asks for several answers, of which one is kept."""
    prompt = body.get("prompt", body.get("input"))
    texts = (
        [e for e in prompt if isinstance(e, str)] if isinstance(prompt, list) else []
    )
    if (endpoint in _VALUES and len(texts) > 1) or body.get("n") not in (None, 1):
        raise ConfigError(
            "the template asks for several answers for a row, of which a table has one: "
            "leave out n, or further prompts, or run lines into a *.jsonl."
        )


def schema_keys(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of the JSON objects that a request asks for, none if it asks for no object."""
    for names in (
        ("response_format", "json_schema", "schema", "properties"),
        ("response_format", "schema", "properties"),  # SGLang takes it, too
        ("text", "format", "schema", "properties"),
    ):
        found: Any = body
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            return tuple(found)
    return ()


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = loads_lenient(text.encode(errors="replace"))
        text_of(value)  # which fails if it is nested too deep to be written
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _write_csv(
    source: InputSource,
    columns: Mapping[str, Sequence[Any]],
    output: BinaryIO,
    delimiter: str = ",",
) -> None:
    path = Path(source.name)
    names = tables.columns_of_file(source.title, path)
    with open_plain(path) as file:  # Excel knows UTF-8 by its mark, as it writes it
        code = "utf-8-sig" if file.read(3) == codecs.BOM_UTF8 else "utf-8"
    # A key may hold half of a surrogate pair, which UTF-8 lacks.
    text = io.TextIOWrapper(output, code, "replace", newline="", write_through=True)
    plain, quoted = (
        csv.writer(text, delimiter=delimiter, lineterminator="\n", quoting=quoting)
        for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
    )
    # The first rows alone have answers, with --max-requests.
    answered = zip(*columns.values(), tables.whole_rows(source.title, path))  # noqa: B905
    rows = ([*map(row.get, names), *answer] for *answer, row in answered)
    for row in chain([[*names, *columns]], rows):
        cells = list(map(cell_text, row))
        # Readers end a row at a bare carriage return, which Python leaves without quotes.
        (quoted if any("\r" in cell for cell in cells) else plain).writerow(cells)
    text.detach()


def _write_parquet(
    source: InputSource, columns: Mapping[str, Sequence[Any]], output: BinaryIO
) -> None:
    from pyarrow import ArrowNotImplementedError, parquet

    added = tables.arrow_columns(columns)
    table = tables.table_of_file(source.title, Path(source.name))
    table = table.slice(0, added.num_rows)
    for place, name in enumerate(table.column_names):
        try:
            parquet.write_table(table.select([name]).slice(0, 0), io.BytesIO())
        except ArrowNotImplementedError:  # Parquet has no such type
            text = tables.arrow_columns({name: table[name].to_pylist()}, as_text=True)
            table = table.set_column(place, name, text[name])
    for name in added.column_names:
        table = table.append_column(name, added[name])
    parquet.write_table(table, output)


_WRITERS: dict[str, Callable[..., None]] = {
    ".csv": _write_csv,
    ".tsv": partial(_write_csv, delimiter="\t"),
    ".parquet": _write_parquet,
    ".pq": _write_parquet,
}
_TABLES = tables.TABLE_SUFFIXES | {".xlsx", ".xls", ".ods"}


def answers_of(
    path: Path, endpoint: str, num_rows: int, *, in_order: bool = False
) -> tuple[list[Any], list[str | None]]:
    """The answer and the error of each row, one of which is None.

    Args:
        path: lines of results.
        in_order: a line per row. Otherwise custom ids are the numbers of rows.
    """
    answers: list[Any] = [None] * num_rows
    errors: list[str | None] = ["no answer"] * num_rows
    value: Callable[[dict[str, Any]], Any] = _VALUES.get(endpoint, _whole)
    with open(path, "rb") as file:
        for number, (_, _, line) in enumerate(read_lines(file)):
            entry = json.loads(line)
            row = number if in_order else int(entry["custom_id"])
            errors[row] = error_of(entry)
            if errors[row] is None:
                answers[row] = value(entry["response"]["body"])
    return answers, errors


def error_of(entry: dict[str, Any]) -> str | None:
    """Why a line of results has no answer, or None if it has one."""
    response = entry.get("response") or {}
    if entry.get("error") is None and response.get("status_code") == 200:
        return None
    return line_error(entry)


def _whole(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False)


def _texts(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts if "text" in part)


def text_in(body: Any) -> str | None:
    """What the model wrote, without its reasoning: the text or the first choice of the answer
    of any endpoint that generates. None for others.
    """
    text: Any = None
    if not isinstance(body, dict):
        return None
    if choices := body.get("choices"):
        text = choices[0].get("message") or choices[0]
        text = text.get("content", text.get("text"))
    elif "output" in body:  # /v1/responses
        items = (item for item in body["output"] if item.get("type") != "reasoning")
        text = "".join(_texts(item.get("content") or []) for item in items)
    elif "content" in body:  # /v1/messages
        text = _texts(body["content"])
    else:
        text = body.get("text")  # of a transcription
    return text if isinstance(text, str) else None


def _text_or_calls(body: dict[str, Any]) -> str | None:
    """The text of an answer, or else its calls of tools as JSON."""
    if text := text_in(body):
        return text
    message = (body.get("choices") or [{}])[0].get("message") or {}
    items = message.get("tool_calls") or body.get("output") or body.get("content") or []
    kinds = ("function", "function_call", "tool_use")
    calls = [each for each in items if each.get("type") in kinds]
    return json.dumps(calls, ensure_ascii=False) if calls else text


_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "/v1/embeddings": lambda body: body["data"][0]["embedding"],
    **dict.fromkeys(GENERATING_URLS, _text_or_calls),
}
