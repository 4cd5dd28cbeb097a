"""gzip and zstd: detected by the first bytes of a file, written by its suffix."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

SUFFIXES = (".gz", ".zst")
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 20
# Small, since the decompressed block is held in memory: up to 1,000 times this.
_COMPRESSED_BYTES = 1 << 14

# Raised by reads of a damaged file.
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)


def plain_name(name: str) -> str:
    """A file name without its compression suffix."""
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def is_compressed(path: Path) -> bool:
    """Whether a file has the first bytes, or the suffix, of gzip or zstd."""
    with open(path, "rb") as file:
        start = file.read(4)
    named = path.name.lower().endswith(SUFFIXES)
    return start.startswith(_GZIP_MAGIC) or start == _ZSTD_MAGIC or named


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed as they are read.

    Reads raise one of ``DAMAGED`` if the file is truncated, or is not in the format
    of its suffix.
    """
    with open(path, "rb") as file:
        start = file.read(4)
        file.seek(0)
        name = path.name.lower()
        if start.startswith(_GZIP_MAGIC) or (
            name.endswith(".gz") and start != _ZSTD_MAGIC
        ):
            with gzip.GzipFile(fileobj=file) as opened:
                yield cast(BinaryIO, opened)
        elif start == _ZSTD_MAGIC or name.endswith(".zst"):
            with io.BufferedReader(_ZstdFile(file), _READ_BYTES) as opened_zstd:
                yield opened_zstd
        else:
            yield file


class _ZstdFile(io.RawIOBase):
    """The content of a zstd file. Detects a truncated frame; zstandard's reader does not."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._frame_begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._next_input()
            if not data:
                if self._frame_begun:
                    raise EOFError("the zstd data is truncated")
                return 0
            self._frame_begun = True
            self._ready = memoryview(self._frame.decompress(data))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _next_input(self) -> bytes:
        """More compressed bytes of this frame, or of the next one after its end."""
        left = b""
        if self._frame.eof:
            left = self._frame.unused_data
            self._frame = self._decompressor.decompressobj()
            self._frame_begun = False
        return left or self._file.read(_COMPRESSED_BYTES)


@contextmanager
def compressing(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """A writer into ``file``, compressed by the suffix of ``name``. Leaves it open."""
    if name.lower().endswith(".gz"):
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as gzipped:
            yield cast(BinaryIO, gzipped)
    elif name.lower().endswith(".zst"):
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as zstd:
            yield cast(BinaryIO, zstd)
    else:
        yield file
