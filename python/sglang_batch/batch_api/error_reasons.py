"""Error lines grouped by reason, so that thousands of them are a few rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NamedTuple

import msgspec

# The most reasons that are told apart by their messages, and the most that are stored.
MAX_REASONS = 1000
MAX_STORED = 50
MAX_CODE_CHARS = 64
MAX_MESSAGE_CHARS = 200

# The parts of a message that differ from line to line: quoted text and numbers.
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|[\w.+-]*\d[\w.,+-]*")


class Reason(NamedTuple):
    """One reason, and the lines that failed for it.

    The messages of others differ from that of the first in numbers and quoted text
    only. It is empty if too many messages are unlike.
    """

    code: str
    message: str
    lines: int


def without_details(message: str) -> str:
    """A message without quoted text and numbers: equal messages are one reason."""
    return _VARIABLE.sub("*", message)


class ErrorReasons:
    """Counts the bodies of error answers."""

    def __init__(self) -> None:
        self._lines: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}

    def add(self, body: bytes) -> None:
        """Count a line with this answer."""
        code, message = _code_and_message(body)
        key = (code, without_details(message))
        if key not in self._lines:
            if len(self._lines) >= MAX_REASONS:
                key, message = (code, ""), ""
            self._first.setdefault(key, message)
        self._lines[key] += 1

    def by_code(self) -> dict[str, int]:
        """Number of lines by code, of the ``MAX_STORED`` most frequent codes."""
        lines: Counter[str] = Counter()
        for (code, _), count in self._lines.items():
            lines[code] += count
        return dict(lines.most_common(MAX_STORED))

    def reasons(self) -> list[Reason]:
        """The ``MAX_STORED`` most frequent reasons, most frequent first."""
        return [
            Reason(key[0], self._first[key], lines)
            for key, lines in self._lines.most_common(MAX_STORED)
        ]

    def as_json(self) -> str | None:
        """The reasons as a JSON list of objects, or None without any."""
        reasons = [reason._asdict() for reason in self.reasons()]
        return json.dumps(reasons) if reasons else None


def _code_and_message(body: bytes) -> tuple[str, str]:
    """The code of an error answer, or else its type, and its message."""
    try:
        error: Any = msgspec.json.decode(body)["error"]
        code = error.get("code") or error.get("type")
        message = error.get("message")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        code, message = None, None
    return (
        str(code or "unknown")[:MAX_CODE_CHARS],
        str(message or "")[:MAX_MESSAGE_CHARS],
    )


def line_error(entry: dict[str, Any]) -> str:
    """The message of an error line, parsed from JSON, whatever its shape."""
    response = entry.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    in_body = body.get("error") if isinstance(body, dict) else body
    error = in_body or entry.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("code")
    return str(error or "unknown error")
