"""gzip and zstd: read by what a file begins with, written by how its name ends."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

SUFFIXES = (".gz", ".zst")
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 20
# Little: what it decompresses to is held in memory, a thousand times as much at worst.
_COMPRESSED_BYTES = 1 << 14

# What reading a damaged file raises.
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)


def plain_name(name: str) -> str:
    """A file's name without the suffix of its compression."""
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def is_compressed(path: Path) -> bool:
    """Whether a file begins like gzip or zstd; an empty one does if so named."""
    with open(path, "rb") as file:
        start = file.read(4)
    named = path.name.lower().endswith(SUFFIXES)
    return start.startswith(_GZIP_MAGIC) or start == _ZSTD_MAGIC or named


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed while they are read.

    Reading raises one of ``DAMAGED`` where the file is cut off or is not what its
    name says.
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
    """A zstd file's content; unlike zstandard's reader it notices a cut-off frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._frame_begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            data = self._next_input()
            if not data:
                if self._frame_begun:
                    raise EOFError("the zstd data is cut off")
                return 0
            self._frame_begun = True
            self._ready = memoryview(self._frame.decompress(data))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _next_input(self) -> bytes:
        """Compressed bytes for the present frame, or for the next after its end."""
        left = b""
        if self._frame.eof:
            left = self._frame.unused_data
            self._frame = self._decompressor.decompressobj()
            self._frame_begun = False
        return left or self._file.read(_COMPRESSED_BYTES)


@contextmanager
def compressing(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """What writes into ``file`` as the suffix of ``name`` asks; the file stays open."""
    if name.lower().endswith(".gz"):
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as gzipped:
            yield cast(BinaryIO, gzipped)
    elif name.lower().endswith(".zst"):
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as zstd:
            yield cast(BinaryIO, zstd)
    else:
        yield file
