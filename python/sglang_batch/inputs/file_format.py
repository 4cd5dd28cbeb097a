"""Guesses what a file is that should have had JSON lines."""

from __future__ import annotations

from pathlib import Path

_HEAD_BYTES = 4096
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# By the first bytes of a file. gzip and zstd are read, but not one inside the other.
_FORMATS = {
    b"\x1f\x8b": "compressed twice: decompress it once",
    b"\x28\xb5\x2f\xfd": "compressed twice: decompress it once",
    b"BZh": "compressed by bzip2: decompress it, or use gzip or zstd",
    b"\xfd7zXZ\0": "compressed by xz: decompress it, or use gzip or zstd",
    b"PK\x03\x04": "a zip archive: name the files in it",
    b"%PDF": "a PDF",
}


def format_hint(path: Path) -> str | None:
    """A sentence on the format of a file whose lines are not JSON, if it is known."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    for start, description in _FORMATS.items():
        if head.startswith(start):
            return f"The file seems to be {description}."
    if head.startswith(_UTF_16) or head.count(0) > len(head) // 3:
        return "The file seems to be UTF-16: save it as UTF-8."
    first = head.lstrip().partition(b"\n")[0]
    if first.startswith(b"["):
        return (
            "The file seems to be one JSON array: write one object per line, as "
            "`jq -c '.[]'` does."
        )
    if first.strip() == b"{":
        return (
            "The file seems to have objects over several lines: write one object per "
            "line, as `jq -c .` does."
        )
    if b"}\r{" in first:
        return "The lines seem to end with a carriage return alone: use \\n."
    return None
