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

from ..errors import InputError

SUFFIXES = (".gz", ".zst")
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 20


@contextmanager
def undamaged(title: str) -> Iterator[None]:
    """Turn what reads of a damaged file raise into InputError."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{title} is damaged: {error}.") from None


def plain_name(name: str) -> str:
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

    Reads raise what :func:`undamaged` turns into InputError if the file is truncated, or
    is not in the format of its suffix.
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
    """The content of a zstd file. Detects truncated frames, unlike zstandard's reader."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(file, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._stream.readinto(buffer))
        except OSError as error:
            raise EOFError(error) from None


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
