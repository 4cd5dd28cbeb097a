"""Lines of JSON: how every line is written, and how lines are told apart."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()
# Line ends to str.splitlines and to clients such as httpx, but not to JSON, which has to
# escape only the others. Raw, they are in strings only: no other part of JSON has them.
_LINE_ENDS = {chr(code).encode(): b"\\u%04x" % code for code in (0x85, 0x2028, 0x2029)}


def json_line(value: Any) -> bytes:
    """A value as one line of JSON, ended by a newline.

    No reader finds another line end in it, whatever it takes for one.
    """
    return as_one_line(_encoder.encode(value)) + b"\n"


def as_one_line(encoded: bytes) -> bytes:
    """JSON in which U+0085, U+2028 and U+2029 are escaped."""
    for raw, escaped in _LINE_ENDS.items():
        encoded = encoded.replace(raw, escaped)
    return encoded


class LineSplitter:
    """The lines of a body that arrives in blocks. They end at ``\\n`` only."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, block: bytes) -> list[bytes]:
        """The lines that this block ends, without their ends."""
        self._parts.append(block)
        if b"\n" not in block:
            return []
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        return lines
