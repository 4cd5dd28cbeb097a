"""The rows of a stream as lines of a batch file, and their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ..batch_api.lines import is_custom_id, loads_lenient
from ..batch_api.protocol import ENDPOINTS, MAX_CUSTOM_ID_LEN, canonical_url, error_body
from ..errors import ConfigError, InputError
from ..inputs.template import NotJson, Template, json_value, text_of

# A window is one call, whose bytes a server limits.
MAX_ROW_BYTES = 32 << 20


@dataclass(frozen=True)
class StreamAnswer:
    """The answer to one row.

    index: number of the row, from 0.
    row: the row as it was given.
    custom_id: that of the row, or its number.
    status_code: HTTP status, 200 for an answer, 4xx and 5xx for an error.
    body: JSON of the answer as the endpoint gives it, or ``{"error": {...}}``.
    """

    index: int
    row: Any
    custom_id: str
    status_code: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status_code < 400

    @property
    def error(self) -> str | None:
        """The message of an error, or None for an answer."""
        return None if self.ok else str(self.body["error"]["message"])

    @cached_property
    def text(self) -> str | None:
        """What the model wrote: the first choice. None for errors and other endpoints."""
        choices = self.body.get("choices") if isinstance(self.body, dict) else None
        if not choices:
            return None
        message = choices[0].get("message")
        text = choices[0].get("text") if message is None else message.get("content")
        return text if isinstance(text, str) else None


@dataclass(frozen=True, slots=True)
class StreamLine:
    """A row on its way.

    line: of a batch file, without a newline. Empty for a row that cannot be sent.
    refused: why not, else empty.
    """

    index: int
    row: Any
    custom_id: str
    line: bytes
    refused: str = ""

    def answered(self, status_code: int, body: bytes) -> StreamAnswer:
        """The row with its answer."""
        return StreamAnswer(
            self.index, self.row, self.custom_id, status_code, _parsed(body)
        )

    def refusal(self) -> StreamAnswer:
        """The answer to a row that cannot be sent."""
        body = error_body(self.refused, code="invalid_request")
        return StreamAnswer(self.index, self.row, self.custom_id, 400, body)


class RowLines:
    """Makes a line from each row.

    Args:
        url: endpoint of rows that name none.
        template: the body of each request, with ``"{{column}}"`` for values of the row. None:
            rows are bodies, or lines of a batch file.
        id_column: with a template, the column with the ``custom_id``.

    Raises:
        ConfigError: the endpoint is unknown, or the template uses no column.
    """

    def __init__(
        self,
        url: str,
        template: Mapping[str, Any] | str | None = None,
        id_column: str | None = None,
    ) -> None:
        self._url = canonical_url(url)
        if self._url not in ENDPOINTS:
            raise ConfigError(f"url={url!r} must be one of {', '.join(ENDPOINTS)}.")
        if id_column is not None and template is None:
            raise ConfigError(f"id_column={id_column!r} needs a template.")
        self._template = None
        if isinstance(template, str):
            self._template = Template.parse(template, self._url)
        elif template is not None:
            self._template = Template(dict(template))
        self._id_column = id_column

    def line(self, row: Any, index: int) -> StreamLine:
        """The line of a row. One that cannot be sent says why."""
        custom_id = str(index)
        try:
            fields = _mapping(row)
            custom_id = self._custom_id(fields, custom_id)
            line = self._written(fields, custom_id)
        except NotJson as error:
            return StreamLine(index, row, custom_id, b"", f"row {index} holds {error}.")
        except InputError as error:
            return StreamLine(index, row, custom_id, b"", f"row {index}: {error}.")
        if len(line) > MAX_ROW_BYTES:
            why = (
                f"row {index}: the request has more than the {MAX_ROW_BYTES:,} bytes that a "
                "stream takes; run a batch, whose lines may be larger."
            )
            return StreamLine(index, row, custom_id, b"", why)
        return StreamLine(index, row, custom_id, line)

    def _custom_id(self, row: Mapping[str, Any], number: str) -> str:
        if self._template is None:
            found = row["custom_id"] if _is_line(row) and "custom_id" in row else number
        elif self._id_column is None:
            return number
        else:
            found = text_of(self._column(row, self._id_column))
        if not is_custom_id(found):
            raise InputError(
                f"its custom_id {found!r:.100} must be a string of 1 to "
                f"{MAX_CUSTOM_ID_LEN} characters"
            )
        return str(found)

    def _written(self, row: Mapping[str, Any], custom_id: str) -> bytes:
        url, method = self._url, "POST"
        if self._template is not None:
            for column in self._template.columns:
                self._column(row, column)
            body = self._template.fill(row)
        elif _is_line(row):
            url, method = row.get("url", url), row.get("method", method)
            body = json.dumps(json_value(row["body"]))
        else:
            body = json.dumps(json_value(row))
        found = {"custom_id": custom_id, "method": method, "url": url}
        start = json.dumps(json_value(found))
        return f'{start[:-1]}, "body": {body}}}'.encode()

    def _column(self, row: Mapping[str, Any], name: str) -> Any:
        if name not in row:
            raise InputError(
                f"it has no column {name!r}; its columns are "
                f"{', '.join(map(str, row)):.200}"
            )
        return row[name]


def _is_line(row: Mapping[str, Any]) -> bool:
    """Whether a row is a line of a batch file. No endpoint's body has a ``body``."""
    return "body" in row


def _mapping(row: Any) -> Mapping[str, Any]:
    if isinstance(row, str | bytes):
        try:
            row = loads_lenient(row.encode() if isinstance(row, str) else row)
        except ValueError as error:
            raise InputError(f"it is not JSON: {error}") from None
    if not isinstance(row, Mapping):
        raise InputError(
            f"it must be a mapping or a JSON object; it is a {type(row).__name__}"
        )
    return row


def _parsed(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:  # numbers that only Python reads
        return json.loads(body)
