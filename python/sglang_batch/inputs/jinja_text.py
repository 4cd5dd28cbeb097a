"""Strings of a template that are written in Jinja2."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ConfigError, InputError
from .cells import NotJson, text_of, value_in

# What one row may take: a mistake in a loop would else never end, or fill the memory.
MAX_CHARS, MAX_STEPS, MAX_TIMES = 16 << 20, 1_000_000, 100_000
_MARK = re.compile(r"(\{#-?) *jinja *(-?#\})(\n?)")
_OTHERS = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_WAYS: dict[Any, str] = {
    SecurityError: "a template can use the values of its row alone",
    NotJson: "end a chain of filters with join or list",
    (OverflowError, MemoryError, RecursionError): "shorten its loops",
    UndefinedError: "ask `is defined` first, or use default()",
    Exception: "correct the template or the row",
}


class JinjaText:
    """A string that Jinja2 renders for each row, with values as ``{{column}}`` has them.

    Raises ConfigError with the line if it cannot be used.
    """

    def __init__(self, source: str) -> None:
        self._title = f"the template {source[:60]!r}{'...' * (len(source) > 60)}"
        self._jinja = _Environment()
        try:
            # The mark is no part of the prompt. Lines keep their numbers.
            parsed = self._jinja.parse(_MARK.sub(r"\1\3\2", source))
            for other in parsed.find_all(_OTHERS):
                raise TemplateSyntaxError(
                    "it cannot name other templates", other.lineno
                )
            self.columns = frozenset(meta.find_undeclared_variables(parsed))
            self._template = self._jinja.from_string(parsed)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{self._title}, line {error.lineno}: {str(error.message).rstrip('.')}; to "
                "keep it as text, put it between {% raw %} and {% endraw %}."
            ) from None

    def text(self, row: Mapping[str, Any]) -> str:
        """The text for one row. Raises InputError with the line and the reason."""
        values = {name: value_in(row, name) for name in self.columns}
        self._jinja.steps, text = MAX_STEPS, ""
        try:
            for piece in self._template.generate(values):
                text += piece
                if len(text) > MAX_CHARS:
                    raise OverflowError(f"it makes more than {MAX_CHARS:,} characters")
        except Exception as error:  # a template may raise any
            tb = traceback.walk_tb(error.__traceback__)
            at = [n for frame, n in tb if frame.f_code.co_filename == "<template>"]
            way = next(way for kinds, way in _WAYS.items() if isinstance(error, kinds))
            said = str(error).rstrip(".") or type(error).__name__
            raise InputError(
                f"{self._title}, line {at[-1] if at else 1}: {said:.200}; {way}"
            ) from None
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2 without chance, files and endless loops.

    steps: calls, and passes of their loops, that the row has left.
    """

    steps = MAX_STEPS
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            undefined=StrictUndefined, finalize=_cell, keep_trailing_newline=True
        )
        # Equal rows make equal requests. Jinja2's tojson writes < and & for a web page.
        del self.globals["lipsum"], self.filters["random"]
        self.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = super().call(context, called, *args, **kwargs)
        self.steps -= len(found) if isinstance(found, range) else 1
        if self.steps < 0:
            raise OverflowError(f"it takes more than {MAX_STEPS:,} passes and calls")
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        each, times = (left, right) if isinstance(right, int) else (right, left)
        grows = operator == "**" or isinstance(each, str | list)
        if grows and isinstance(times, int) and times > MAX_TIMES:
            raise OverflowError(f"{operator} {times} is too much")
        return super().call_binop(context, operator, left, right)


def _cell(value: Any) -> str:
    return (
        str(value) if isinstance(value, Undefined) else text_of(value)
    )  # str() raises
