"""Requests made from the rows of a table.

A template is a JSON object with placeholders such as ``{{question}}`` in its strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from .cell_values import NotJson, json_value, text_of

_PLACEHOLDER = re.compile(r"\{\{\s*(.+?)\s*\}\}")


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a column in a template.

    whole: the column becomes a JSON value of its own, not part of a string.
    """

    column: str
    whole: bool


class Template:
    """A request body with placeholders, parsed once and filled for every row.

    A string that is a single placeholder takes the column's value with its JSON type.
    Inside a longer string the value is written as text. Values of columns are never
    searched for placeholders.

    Attributes:
        body: as it was given.
        columns: names of the columns that it uses.

    Raises:
        ConfigError: the body uses no column, or has a placeholder in a key.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self._parts = _joined(_parts_of_value(body))
        self.columns = frozenset(
            part.column for part in self._parts if isinstance(part, _Slot)
        )
        if not self.columns:
            raise ConfigError(
                "the template uses no column: write one as {{name}}, such as "
                '{"messages": [{"role": "user", "content": "{{question}}"}]}.'
            )

    @classmethod
    def parse(cls, text: str) -> Template:
        """A template from JSON text, or from ``@FILE``.

        Raises:
            ConfigError: it cannot be read, is not a JSON object, or uses no column.
        """
        where = "--template"
        if text.startswith("@"):
            where = text[1:]
            try:
                text = Path(where).read_text(encoding="utf-8-sig")
            except OSError as error:
                raise ConfigError(
                    f"the template {where} cannot be read: {error.strerror}."
                ) from None
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"the template {where} is not UTF-8: {error}"
                ) from None
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ConfigError(
                f"{where} must be a JSON object, the body of a request; it is a "
                f"{type(body).__name__}."
            )
        return cls(body)

    def fill(self, row: Mapping[str, Any]) -> str:
        """The body for one row: JSON, ASCII only.

        Raises:
            InputError: a value of the row cannot be written as JSON.
        """
        return "".join(
            part if isinstance(part, str) else _written(part, row)
            for part in self._parts
        )


@dataclass(frozen=True)
class RowRequests:
    """Makes a batch line from each row of a table.

    id_column: the column with the custom_id. None: the number of the row.
    """

    template: Template
    endpoint: str
    id_column: str | None

    @cached_property
    def columns(self) -> frozenset[str]:
        """The columns that a row must have."""
        ids = set() if self.id_column is None else {self.id_column}
        return self.template.columns | ids

    def line(self, row: Mapping[str, Any], number: int) -> bytes:
        """The batch line for a row, with its newline.

        Args:
            number: of the row over all inputs, from 0.

        Raises:
            InputError: the row has no id, or a value that JSON cannot hold.
        """
        custom_id = json.dumps(self._custom_id(row, number))
        body = self.template.fill(row)
        return f'{self._start}{custom_id}, "body": {body}}}\n'.encode()

    @cached_property
    def _start(self) -> str:
        return f'{{"method": "POST", "url": {json.dumps(self.endpoint)}, "custom_id": '

    def _custom_id(self, row: Mapping[str, Any], number: int) -> str:
        if self.id_column is None:
            return str(number)
        try:
            found = text_of(row[self.id_column])
        except NotJson as error:
            raise InputError(f"column {self.id_column!r} holds {error}") from None
        if not found:
            raise InputError(
                f"column {self.id_column!r} is empty; --id-column needs a value."
            )
        return found


def _written(slot: _Slot, row: Mapping[str, Any]) -> str:
    value = row[slot.column]
    try:
        if slot.whole:
            return json.dumps(json_value(value))
        return json.dumps(text_of(value))[1:-1]
    except NotJson as error:
        raise InputError(f"column {slot.column!r} holds {error}") from None


def _parts_of_value(value: Any) -> Iterator[str | _Slot]:
    """The JSON of ``value``, cut at its placeholders."""
    if isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            if _PLACEHOLDER.search(key):
                raise ConfigError(f"the template's key {key!r} cannot be a column.")
            yield f"{', ' if i else ''}{json.dumps(key)}: "
            yield from _parts_of_value(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for i, item in enumerate(value):
            if i:
                yield ", "
            yield from _parts_of_value(item)
        yield "]"
    elif isinstance(value, str):
        yield from _parts_of_text(value)
    else:
        yield json.dumps(value)


def _parts_of_text(text: str) -> Iterator[str | _Slot]:
    pieces = _PLACEHOLDER.split(text)  # text, column, text, column, ..., text
    if len(pieces) == 3 and not pieces[0] and not pieces[2]:
        yield _Slot(pieces[1], whole=True)
        return
    yield '"'
    for i, piece in enumerate(pieces):
        yield _Slot(piece, whole=False) if i % 2 else json.dumps(piece)[1:-1]
    yield '"'


def _joined(parts: Iterator[str | _Slot]) -> list[str | _Slot]:
    """The parts with neighbouring strings joined."""
    joined: list[str | _Slot] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined
