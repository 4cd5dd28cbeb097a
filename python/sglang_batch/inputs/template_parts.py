"""The parts of a template: its JSON text, cut at the places of columns and of its block."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ConfigError, InputError
from .cell_values import NotJson, json_value, text_of

_PLACEHOLDER = re.compile(r"\{\{\s*(.+?)\s*\}\}")
_MARKER = re.compile(r"\{\{\s*([#/])fields\s*\}\}")
BEGIN, END = "{{#fields}}", "{{/fields}}"
_LINE_BREAK = r"\n"  # as JSON writes it


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a column in a template.

    whole: the column becomes a JSON value of its own, not part of a string.
    """

    column: str
    whole: bool


@dataclass(frozen=True)
class FieldBlock:
    """The lines between ``{{#fields}}`` and ``{{/fields}}`` in a string of a template.

    A line with columns is a field. Fields may change places. Other lines stay.

    lines: the parts of each line, without its line break.
    """

    lines: tuple[tuple[str | Slot, ...], ...]

    @cached_property
    def fields(self) -> tuple[int, ...]:
        """The numbers of the lines that are fields."""
        return tuple(
            number
            for number, line in enumerate(self.lines)
            if any(isinstance(part, Slot) for part in line)
        )

    @property
    def columns(self) -> Iterator[str]:
        for line in self.lines:
            yield from columns_of(line)

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        """The fields of a row in the template's order, as JSON text without quotes.

        Raises:
            InputError: a value of the row cannot be written as JSON.
        """
        return [filled(self.lines[number], row) for number in self.fields]

    def joined(self, texts: Iterable[str]) -> str:
        """The block with these texts as its fields, one after the other."""
        lines = ["".join(map(str, line)) for line in self.lines]
        for number, text in zip(self.fields, texts, strict=True):
            lines[number] = text
        return _LINE_BREAK.join(lines)


TemplatePart = str | Slot | FieldBlock


def filled(parts: Iterable[TemplatePart], row: Mapping[str, Any]) -> str:
    """The JSON text of parts for one row, fields in their own order.

    Raises:
        InputError: a value of the row cannot be written as JSON.
    """
    return "".join(
        part if isinstance(part, str) else _written(part, row) for part in parts
    )


def columns_of(parts: Iterable[TemplatePart]) -> Iterator[str]:
    """The columns that parts use."""
    for part in parts:
        if isinstance(part, Slot):
            yield part.column
        elif isinstance(part, FieldBlock):
            yield from part.columns


def _written(part: Slot | FieldBlock, row: Mapping[str, Any]) -> str:
    if isinstance(part, FieldBlock):
        return part.joined(part.texts(row))
    value = row[part.column]
    try:
        if part.whole:
            return json.dumps(json_value(value))
        return json.dumps(text_of(value))[1:-1]
    except NotJson as error:
        raise InputError(f"column {part.column!r} holds {error}") from None


def parts_of(value: Any) -> list[TemplatePart]:
    """The JSON text of a template, or of a value in it, cut into parts.

    Raises:
        ConfigError: a key has a placeholder, or a block is not one.
    """
    joined: list[TemplatePart] = []
    for part in _parts_of_value(value):
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def has_marker(text: str) -> bool:
    """Whether a text has a beginning or an end of a block."""
    return _MARKER.search(text) is not None


def _parts_of_value(value: Any) -> Iterator[TemplatePart]:
    if isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            if has_marker(key):
                raise ConfigError(
                    f"the template's key {key!r} has a block: write {BEGIN} inside of a "
                    "value that is a string."
                )
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


def _parts_of_text(text: str) -> Iterator[TemplatePart]:
    if has_marker(text):
        before, block, after = _cut_block(text)
        yield '"'
        yield from _parts_in_text(before)
        yield block
        yield from _parts_in_text(after)
        yield '"'
        return
    parts = _parts_in_text(text)
    if len(parts) == 1 and isinstance(parts[0], Slot):
        yield Slot(parts[0].column, whole=True)
        return
    yield '"'
    yield from parts
    yield '"'


def _parts_in_text(text: str) -> list[str | Slot]:
    pieces = _PLACEHOLDER.split(text)  # text, column, text, column, ..., text
    return [
        Slot(piece, whole=False) if i % 2 else json.dumps(piece)[1:-1]
        for i, piece in enumerate(pieces)
        if piece
    ]


def _cut_block(text: str) -> tuple[str, FieldBlock, str]:
    """The text before the block, the block, and the text after it."""
    marks = list(_MARKER.finditer(text))
    kinds: Sequence[str] = [mark[1] for mark in marks]
    if kinds[0] == "/":
        raise ConfigError(f"the template has {END} without {BEGIN} before it.")
    if kinds[:2] == ["#", "#"]:
        raise ConfigError(
            f"the template has {BEGIN} inside of a block: end the first with {END}."
        )
    if len(kinds) == 1:
        raise ConfigError(
            f"the template's {BEGIN} has no end: write {END} in the same string."
        )
    if len(kinds) > 2:
        raise ConfigError(_ONE_BLOCK)
    begin, end = marks
    inside = text[begin.end() : end.start()]
    lines = tuple(tuple(_parts_in_text(line)) for line in inside.split("\n"))
    block = FieldBlock(lines)
    if not block.fields:
        raise ConfigError(
            f"the template's block {BEGIN} has no column: write one as {{{{name}}}}."
        )
    return text[: begin.start()], block, text[end.end() :]


_ONE_BLOCK = f"the template has several blocks {BEGIN}: only one can be reordered."


def block_at(parts: Sequence[TemplatePart]) -> int | None:
    """The position of the block among the parts. None: there is none.

    Raises:
        ConfigError: there are several.
    """
    found = [i for i, part in enumerate(parts) if isinstance(part, FieldBlock)]
    if len(found) > 1:
        raise ConfigError(_ONE_BLOCK)
    return found[0] if found else None
