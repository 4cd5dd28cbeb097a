"""Requests made from the rows of a table.

A template is a prompt, or a JSON object that is the body of a request, with placeholders
such as ``{{question}}`` in its strings, or with strings in Jinja2.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ..batch_api.protocol import ENDPOINTS
from ..errors import ConfigError, InputError
from .cells import text_of, value_in

if TYPE_CHECKING:
    from .jinja_text import JinjaText


class Template:
    """A request body with placeholders, parsed once and filled for every row.

    A string that is a single placeholder takes the column's value with its JSON
    type, but a number that is a prompt becomes text. Inside a longer string the value is
    written as text. Values of columns are never searched for placeholders. Lines between ``{{#fields}}`` and
    ``{{/fields}}`` in a string are a block of fields, whose order carries no
    meaning. A string with a tag of Jinja2, such as ``{% if name %}``, or the comment
    ``{# jinja #}`` is rendered by Jinja2 instead. Raises ConfigError if the body uses no
    column, has a placeholder in a key, or a block or Jinja2 that is not one.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the template cannot be JSON: {error}.") from None
        self._parts = parts_of(body)
        self.columns = frozenset(columns_of(self._parts))
        at = block_at(self._parts)
        found = None if at is None else self._parts[at]
        self.block = found if isinstance(found, FieldBlock) else None
        self._before, self._after = self._parts[:at], self._parts[at or 0 :][1:]
        if not self.columns:
            raise ConfigError(
                "the template uses no column: write one as {{name}}, such as 'Answer in "
                "one word: {{question}}', or in JSON "
                '{"messages": [{"role": "user", "content": "{{question}}"}]}.'
            )

    @classmethod
    def of(cls, template: Mapping[str, Any] | str, endpoint: str) -> Template:
        """A template from the body of a request, or from text as :meth:`parse`."""
        if isinstance(template, str):
            return cls.parse(template, endpoint)
        if not isinstance(template, Mapping):
            raise ConfigError(
                f"the template is a {type(template).__name__}: give the body of a request "
                "as a dictionary, or a prompt as text."
            )
        return cls(dict(template))

    @classmethod
    def parse(cls, text: str, endpoint: str = "/v1/chat/completions") -> Template:
        """A template from text, or from the text in ``@FILE``.

        A JSON object is the body of a request. Any other text is the prompt
        itself, whose place depends on the endpoint. Raises ConfigError if it
        cannot be read, is JSON but not an object, or uses no column.
        """
        where = "--template"
        if text.startswith("@"):
            where = text[1:]
            text = _text_of_file(where).removesuffix("\n")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            begin = text.lstrip()
            # A body with a mistake, and no prompt.
            if begin.startswith("{") and not begin.startswith(("{{", "{%", "{#")):
                found = _MARKER.search(text) or _JINJA.search(text)
                outside = f"; {found[0]} must be inside of a string" if found else ""
                raise ConfigError(
                    f"{where} is not JSON: {error}{outside}; to begin a prompt with a "
                    "brace, write {# jinja #} before it, and columns as {{name}}."
                ) from None
            body = _prompt_body(text, endpoint, where)
        if not isinstance(body, dict):
            raise ConfigError(
                f"{where} must be a JSON object, the body of a request, or a prompt as "
                f"text; it is a {type(body).__name__}."
            )
        return cls(body)

    def fill(self, row: Mapping[str, Any]) -> str:
        """The body for one row in ASCII. Raises InputError if it cannot be JSON."""
        return filled(self._parts, row)

    def fill_around(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """The JSON text before and after the fields of a row, as :meth:`fill`."""
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


def _text_of_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"the template {name} cannot be read: {error.strerror}."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the template {name} is not UTF-8: {error}") from None


def _prompt_body(prompt: str, endpoint: str, where: str) -> dict[str, Any]:
    key, *others = ENDPOINTS[endpoint].required
    if others or key not in ("messages", "prompt", "input"):
        raise ConfigError(
            f"the template must be an object, the body of a request: {endpoint} takes more "
            "than a prompt."
        )
    if not _PLACEHOLDER.search(prompt) and os.path.isfile(prompt):
        raise ConfigError(f"{where} {prompt} is a file; name it as @{prompt}.")
    return {key: [{"role": "user", "content": prompt}] if key == "messages" else prompt}


class SplitLine(msgspec.Struct, array_like=True):
    """A batch line whose fields have no order yet.

    Its JSON text is before and after the block of fields, which are JSON without
    quotes. ``head`` is what its prompt has before the block, if a column is in
    that.
    """

    before: str
    head: str
    fields: list[str]
    after: str


@dataclass(frozen=True)
class RowRequests:
    """Makes batch lines from rows, with their numbers as ids if no column has any."""

    template: Template
    endpoint: str
    id_column: str | None

    @cached_property
    def columns(self) -> frozenset[str]:
        ids = set() if self.id_column is None else {self.id_column}
        return self.template.columns | ids

    def line(self, row: Mapping[str, Any], number: int) -> bytes:
        """The batch line for a row by its number over all inputs, with its newline.

        Raises InputError if the row has no id, or a value that JSON cannot
        hold.
        """
        custom_id = json.dumps(self._custom_id(row, number))
        body = self.template.fill(row)
        return f'{self._start}{custom_id}, "body": {body}}}\n'.encode()

    def split_line(self, row: Mapping[str, Any], number: int) -> SplitLine:
        """The batch line for a row, cut around its block. Raises as :meth:`line`."""
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
        found = text_of(value_in(row, self.id_column))
        if not found:
            raise InputError(
                f"column {self.id_column!r} is empty; --id-column needs a value."
            )
        return found


# Fields of a body or a message in which the engine refuses a number.
_PROMPT_KEYS = ("content", "prompt", "input", "text")
_PLACEHOLDER = re.compile(r"\{\{\s*(.+?)\s*\}\}")
# A tag by its word: other text in {% %} is text, and {{...}} may be a column of any name.
_WORDS = (
    "for|if|elif|else|set|with|macro|call|filter|raw|print|block|autoescape|extends|"
    "include|import|from|end[a-z]+"
)
_JINJA = re.compile(
    rf"\{{%[-+]?\s*(?:{_WORDS})\b.*?%\}}|\{{#-? *jinja *-?#\}}", re.DOTALL
)
_MARKER = re.compile(r"\{\{\s*([#/])fields\s*\}\}")
BEGIN, END = "{{#fields}}", "{{/fields}}"
_LINE_BREAK = r"\n"  # as JSON writes it


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a column: a whole JSON value, or part of a string.

    prompt: whether it is a prompt, in which a number is text.
    """

    column: str
    whole: bool
    prompt: bool = False


@dataclass(frozen=True)
class FieldBlock:
    """The lines between ``{{#fields}}`` and ``{{/fields}}``, without line breaks.

    A line with columns is a field. Fields may change places. Other lines stay.
    """

    lines: tuple[tuple[str | Slot | JinjaText, ...], ...]

    @cached_property
    def fields(self) -> tuple[int, ...]:
        return tuple(
            number
            for number, line in enumerate(self.lines)
            if not all(isinstance(part, str) for part in line)
        )

    @property
    def columns(self) -> Iterator[str]:
        for line in self.lines:
            yield from columns_of(line)

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        """The fields of a row as JSON without quotes. Raises as :meth:`Template.fill`."""
        return [filled(self.lines[number], row) for number in self.fields]

    def joined(self, texts: Iterable[str]) -> str:
        """The block with these texts as its fields, one after the other."""
        lines = ["".join(map(str, line)) for line in self.lines]
        for number, text in zip(self.fields, texts, strict=True):
            lines[number] = text
        return _LINE_BREAK.join(lines)


TemplatePart: TypeAlias = "str | Slot | FieldBlock | JinjaText"


def filled(parts: Iterable[TemplatePart], row: Mapping[str, Any]) -> str:
    """The JSON text of parts for one row. Raises as :meth:`Template.fill`."""
    return "".join(
        part if isinstance(part, str) else _written(part, row) for part in parts
    )


def columns_of(parts: Iterable[TemplatePart]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Slot):
            yield part.column
        elif not isinstance(part, str):
            yield from part.columns


def _written(part: Slot | FieldBlock | JinjaText, row: Mapping[str, Any]) -> str:
    if isinstance(part, FieldBlock):
        return part.joined(part.texts(row))
    if not isinstance(part, Slot):
        return json.dumps(part.text(row))[1:-1]
    found = value_in(row, part.column)
    if part.whole:
        is_text = part.prompt and isinstance(found, int | float)
        return json.dumps(text_of(found) if is_text else found)
    return json.dumps(text_of(found))[1:-1]


def parts_of(value: Any) -> list[TemplatePart]:
    """The JSON text of a template, or of a value in it, cut into parts.

    Raises ConfigError if a key has a placeholder, or a block is not one.
    """
    joined: list[TemplatePart] = []
    for part in _parts_of_value(value):
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def has_marker(text: str) -> bool:
    return _MARKER.search(text) is not None


def jinja_hint(column: str) -> str:
    """What to do about a missing column whose name looks like an expression of Jinja2."""
    if not re.search(r"[|.(\[]", column):
        return ""
    return "; for an expression of Jinja2, begin the text with {# jinja #}"


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
            for part in _parts_of_value(item):
                if isinstance(part, Slot) and isinstance(item, str):
                    part = replace(part, prompt=key in _PROMPT_KEYS)
                yield part
        yield "}"
    elif isinstance(value, list | tuple):
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


def _parts_in_text(text: str) -> list[str | Slot | JinjaText]:
    if _JINJA.search(text):
        from .jinja_text import JinjaText

        return [JinjaText(text)]
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
    """The position of the block among the parts. Raises ConfigError for several."""
    found = [i for i, part in enumerate(parts) if isinstance(part, FieldBlock)]
    if len(found) > 1:
        raise ConfigError(_ONE_BLOCK)
    return found[0] if found else None
