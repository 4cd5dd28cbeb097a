"""Requests made from the rows of a table.

A template is a JSON object with placeholders such as ``{{question}}`` in its strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, InputError
from .cell_values import NotJson, text_of
from .template_parts import (
    BEGIN,
    FieldBlock,
    TemplatePart,
    block_at,
    columns_of,
    filled,
    has_marker,
    parts_of,
)


class Template:
    """A request body with placeholders, parsed once and filled for every row.

    A string that is a single placeholder takes the column's value with its JSON type.
    Inside a longer string the value is written as text. Values of columns are never
    searched for placeholders.

    Lines between ``{{#fields}}`` and ``{{/fields}}`` in a string are a block of fields,
    whose order carries no meaning. The markers themselves are not written.

    Attributes:
        body: as it was given.
        columns: names of the columns that it uses.
        block: its block of fields. None: it has none.

    Raises:
        ConfigError: the body uses no column, has a placeholder in a key, or a block that
            is not one.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self._parts = parts_of(body)
        self.columns = frozenset(columns_of(self._parts))
        at = block_at(self._parts)
        found = None if at is None else self._parts[at]
        self.block = found if isinstance(found, FieldBlock) else None
        self._before, self._after = self._parts[:at], self._parts[at or 0 :][1:]
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
            outside = f"; {BEGIN} must be inside of a string" * has_marker(text)
            raise ConfigError(f"{where} is not JSON: {error}{outside}") from None
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
        return filled(self._parts, row)

    def fill_around(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """The JSON text before the fields of a row, and that after them.

        Raises:
            InputError: a value of the row cannot be written as JSON.
        """
        return filled(self._before, row), filled(self._after, row)

    @cached_property
    def _head(self) -> list[TemplatePart]:
        """The parts of the prompt before its block, if columns are among them."""
        for value in self.body.values():
            parts = parts_of(value)
            if (at := block_at(parts)) is not None:
                return parts[:at] if any(columns_of(parts[:at])) else []
        return []

    @property
    def has_head(self) -> bool:
        """Whether columns are in the prompt before the block."""
        return bool(self._head)

    def head(self, row: Mapping[str, Any]) -> str:
        """What the prompt of a row has before its block, if columns are in it."""
        return filled(self._head, row)


class SplitLine(msgspec.Struct, array_like=True):
    """A batch line whose fields have no order yet.

    before, after: its JSON text around the block of fields.
    head: what its prompt has before the block, empty if no column is in that.
    fields: the text of each field, as JSON without quotes.
    """

    before: str
    head: str
    fields: list[str]
    after: str


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

    def split_line(self, row: Mapping[str, Any], number: int) -> SplitLine:
        """The batch line for a row, cut around its fields. The template has a block.

        Raises:
            InputError: as :meth:`line`.
        """
        assert self.template.block is not None
        custom_id = json.dumps(self._custom_id(row, number))
        before, after = self.template.fill_around(row)
        return SplitLine(
            f'{self._start}{custom_id}, "body": {before}',
            self.template.head(row),
            self.template.block.texts(row),
            f"{after}}}\n",
        )

    def joined(self, line: SplitLine, order: Iterable[int]) -> bytes:
        """The batch line with its fields in an order, by their numbers."""
        assert self.template.block is not None
        block = self.template.block.joined(line.fields[field] for field in order)
        return f"{line.before}{block}{line.after}".encode()

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
