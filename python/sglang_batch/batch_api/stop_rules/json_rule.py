"""Ends an answer whose first JSON value is complete."""

from __future__ import annotations

import json
import re

_FENCE = re.compile(r"```\w{0,16}[ \t]*\r?\n\s*")
# What may become a fence.
_FENCE_BEGUN = re.compile(r"`{1,3}|```\w{1,16}[ \t]*\r?|```[ \t]*\r?")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
# A number or a word ends before any other character.
_AFTER_SCALAR = re.compile(r"[^-+.0-9A-Za-z]")
_SPACE = " \t\r\n"


class JsonRule:
    """Reads the value an answer begins with, after white space or the line of a code fence.

    An answer that begins otherwise, or whose value turns out not to be JSON, is not cut. A number
    or a word is complete with the first character behind it.
    """

    def __init__(self) -> None:
        self._head = ""
        self._value: list[str] | None = None
        self._depth = 0
        self._in_string = self._is_escaped = self._is_scalar = False
        self._is_over = False

    def feed(self, text: str) -> int | None:
        """Add text to the answer.

        Returns:
            Where in ``text`` the value ends, in characters, or None if it does not.
        """
        if self._is_over:
            return None
        start = 0
        if self._value is None:
            rest = self._begin(text)
            if not rest:
                return None
            start = len(text) - len(rest)
        assert self._value is not None
        end = self._end(text, start)
        self._value.append(text[start:end])
        if end is None:
            return None
        self._is_over = True
        return end if _is_json("".join(self._value)) else None

    def _begin(self, text: str) -> str:
        """The part of ``text`` from the value's first character on, empty if there is none."""
        head = (self._head + text).lstrip(_SPACE)
        if head.startswith("`"):
            fence = _FENCE.match(head)
            if fence is None or fence.end() == len(head):
                self._head = head
                self._is_over = fence is None and not _FENCE_BEGUN.fullmatch(head)
                return ""
            head = head[fence.end() :]
        if not head:
            return ""
        self._value = []
        self._is_scalar = head[0] not in '"{['
        self._is_over = self._is_scalar and head[0] not in "-0123456789tfn"
        return "" if self._is_over else head

    def _end(self, text: str, start: int) -> int | None:
        if self._is_scalar:
            found = _AFTER_SCALAR.search(text, start)
            return None if found is None else found.start()
        place = start
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                return None
            place = found.end()
            mark = found[0]
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return place
        return None


def _is_json(text: str) -> bool:
    try:
        # Numbers as text: one of a million digits takes minutes to become an int.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
