"""Request bodies made of the columns of a table.

A template is a JSON object with placeholders such as ``{{question}}`` in its texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from .values import NotJson, json_value, text_of

_PLACEHOLDER = re.compile(r"\{\{\s*(.+?)\s*\}\}")


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a column goes: as a JSON value of its own, or as part of a text."""

    column: str
    whole: bool


class Template:
    """A body with placeholders, taken apart once and filled for every row.

    A text that is one placeholder and nothing else takes the column's value with its
    JSON type; inside a longer text the value is written as text. What a column holds
    is never searched for placeholders.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self._parts = _joined(_take_apart(body))
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
        """A template from JSON, or from the file that ``@FILE`` names.

        Raises:
            ConfigError: it cannot be read, or is no JSON object, or uses no column.
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
                raise ConfigError(f"the template {where} is no text: {error}") from None
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
        """The body, in JSON, for one row; ASCII only.

        Raises:
            InputError: a value of the row cannot be written as JSON.
        """
        return "".join(
            part if isinstance(part, str) else _written(part, row)
            for part in self._parts
        )


def _written(slot: _Slot, row: Mapping[str, Any]) -> str:
    value = row[slot.column]
    try:
        if slot.whole:
            return json.dumps(json_value(value))
        return json.dumps(text_of(value))[1:-1]
    except NotJson as error:
        raise InputError(f"column {slot.column!r} holds {error}") from None


def _take_apart(value: Any) -> Iterator[str | _Slot]:
    """The JSON of ``value`` in pieces."""
    if isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            if _PLACEHOLDER.search(key):
                raise ConfigError(f"the template's key {key!r} cannot be a column.")
            yield f"{', ' if i else ''}{json.dumps(key)}: "
            yield from _take_apart(item)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for i, item in enumerate(value):
            if i:
                yield ", "
            yield from _take_apart(item)
        yield "]"
    elif isinstance(value, str):
        yield from _text_apart(value)
    else:
        yield json.dumps(value)


def _text_apart(text: str) -> Iterator[str | _Slot]:
    pieces = _PLACEHOLDER.split(text)  # text, column, text, column, ..., text
    if len(pieces) == 3 and not pieces[0] and not pieces[2]:
        yield _Slot(pieces[1], whole=True)
        return
    yield '"'
    for i, piece in enumerate(pieces):
        yield _Slot(piece, whole=False) if i % 2 else json.dumps(piece)[1:-1]
    yield '"'


def _joined(parts: Iterator[str | _Slot]) -> list[str | _Slot]:
    """The same with neighbouring texts as one."""
    joined: list[str | _Slot] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined
