"""Prompts of jobs that are larger than memory, on disk, with what a plan needs besides.

A run is a folder with one plain file for each array, and is read a range at a time. The
file of tokens is one of :class:`~.token_spool.TokenSpool`. The runs of a job whose prompts
were dealt to buckets have one folder for all, in which each process writes its own. So
they may be made by many machines on a shared disk. They can be made again, so they are not
synced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, StoreError, StoreWriteError
from .files import atomic_write

_DTYPES: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "offsets": np.int64,
    "max_new_tokens": np.int32,
    "known_output_len": np.int32,
    "numbers": np.int64,
    "begin": np.int64,
}


class RunArrays(NamedTuple):
    """``n`` requests of a run.

    tokens: int32, all prompts one after the other.
    offsets: int64 ``[n + 1]``, where they begin. ``offsets[0]`` is 0.
    max_new_tokens, known_output_len: int32 ``[n]``.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    max_new_tokens: NDArray[np.int32]
    known_output_len: NDArray[np.int32]


class RunWriter:
    """Append requests to a new run.

    Raises:
        InputError: the folder exists.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise InputError(f"{folder} exists; give the run another folder.") from None
        names = RunArrays._fields
        self._files = {name: open(folder / name, "wb") for name in names}  # noqa: SIM115
        self._num_tokens = 0
        self._files["offsets"].write(np.zeros(1, np.int64).tobytes())

    def append(self, arrays: RunArrays) -> None:
        """Add requests behind those that are there."""
        offsets = arrays.offsets[1:] + self._num_tokens
        self._num_tokens += int(arrays.offsets[-1])
        for name, values in arrays._replace(offsets=offsets)._asdict().items():
            _write(self._files[name], values)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()


class TokenRun:
    """Read a run, a range at a time.

    Raises:
        StoreError: there is no run in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        offsets = folder / "offsets"
        if not offsets.exists():
            raise StoreError(f"{folder} has no run: {offsets.name} is missing.")
        self._len = offsets.stat().st_size // 8 - 1

    def __len__(self) -> int:
        return self._len

    def read(self, begin: int, end: int) -> RunArrays:
        """The requests ``begin`` to ``end``, in memory."""
        offsets = self._read("offsets", begin, end + 1)
        return RunArrays(
            tokens=self._read("tokens", int(offsets[0]), int(offsets[-1])),
            offsets=offsets - offsets[0],
            max_new_tokens=self._read("max_new_tokens", begin, end),
            known_output_len=self._read("known_output_len", begin, end),
        )

    def prompts(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Some of the prompts, in the order of ``numbers``, and where they begin."""
        whole = self._map("offsets")
        begin, end = whole[numbers], whole[numbers + 1]
        with open(self._folder / "tokens", "rb") as file:
            parts = [
                os.pread(file.fileno(), 4 * (b - a), 4 * a)
                for a, b in zip(begin.tolist(), end.tolist(), strict=True)
            ]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(end - begin)])
        return np.frombuffer(bytearray().join(parts), np.int32), offsets

    def ranges(
        self, begin: int, end: int, most_tokens: int
    ) -> Iterator[tuple[int, int]]:
        """The requests ``begin`` to ``end`` in ranges of at most so many tokens.

        A longer prompt is a range by itself.
        """
        offsets = self._map("offsets")
        while begin < end:
            limit = offsets[begin] + most_tokens
            last = int(np.searchsorted(offsets, limit, side="right")) - 1
            last = min(max(last, begin + 1), end)
            yield begin, last
            begin = last

    def _map(self, name: str) -> NDArray[Any]:
        return np.memmap(self._folder / name, _DTYPES[name], mode="r")

    def _read(self, name: str, begin: int, end: int) -> NDArray[Any]:
        return _read(self._folder / name, begin, end)


class BucketRuns:
    """The parts of a job's buckets, in one folder.

    The parts of all buckets that were made from one range of the job are a run of their
    own, named by the number of its first request.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(
        self,
        first: int,
        arrays: RunArrays,
        numbers: NDArray[np.int64],
        begin: NDArray[np.int64],
    ) -> None:
        """Write the requests of a range, bucket by bucket. Replaces the same range.

        Args:
            first: number in the job of the range's first request.
            numbers: int64 ``[n]``, of each request in the job.
            begin: int64 ``[b + 1]``, where each bucket begins.

        Raises:
            StoreWriteError: there is no space, or no permission.
        """
        path = self._folder / f"{first:015d}"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        every = {**arrays._asdict(), "numbers": numbers, "begin": begin}
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            for name, values in every.items():
                with open(temporary / name, "wb") as file:
                    _write(file, values)
            shutil.rmtree(path, ignore_errors=True)
            os.replace(temporary, path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StoreWriteError(f"{path} cannot be written: {error}.") from error

    def check(self, num_requests: int) -> None:
        """Check that the ranges are those of a whole job, once each.

        Raises:
            StoreError: requests are missing, or are there twice.
        """
        end = 0
        for path in self._parts():
            if (first := int(path.name)) != end:
                raise StoreError(
                    f"{path} begins with request {first}, the range before it ends with"
                    f" {end - 1}; deal the whole job into an empty folder."
                )
            end = first + len(TokenRun(path))
        if end != num_requests:
            raise StoreError(
                f"{self._folder} has {end} of the job's {num_requests} requests; deal the"
                " other ranges, too."
            )

    def read(self, bucket: int) -> tuple[RunArrays, NDArray[np.int64]]:
        """A bucket's requests in the order of the job, and the number of each."""
        found, numbers = [], []
        for path in self._parts():
            first, last = _read(path / "begin", bucket, bucket + 2)
            found.append(TokenRun(path).read(first, last))
            numbers.append(_read(path / "numbers", first, last))
        return _joined(found), np.concatenate([np.zeros(0, np.int64), *numbers])

    def save_order(self, bucket: int, order: NDArray[np.int64]) -> None:
        """Write the numbers of a bucket's requests in the order in which they run."""
        with atomic_write(self._order_path(bucket)) as file:
            _write(file, order)

    def order(self, bucket: int) -> NDArray[np.int64]:
        """What :meth:`save_order` wrote, memory-mapped."""
        path = self._order_path(bucket)
        if path.stat().st_size == 0:
            return np.zeros(0, np.int64)
        return np.memmap(path, np.int64, mode="r")

    def _order_path(self, bucket: int) -> Path:
        return self._folder / f"order-{bucket:06d}"

    def _parts(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.name.isdigit())


def _joined(parts: Sequence[RunArrays]) -> RunArrays:
    lengths = [np.diff(part.offsets) for part in parts]
    offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
    none = np.zeros(0, np.int32)
    return RunArrays(
        tokens=np.concatenate([none, *(part.tokens for part in parts)]),
        offsets=offsets,
        max_new_tokens=np.concatenate([none, *(x.max_new_tokens for x in parts)]),
        known_output_len=np.concatenate([none, *(x.known_output_len for x in parts)]),
    )


def _write(file: Any, values: NDArray[Any]) -> None:
    file.write(np.ascontiguousarray(values).data)


def _read(path: Path, begin: int, end: int) -> NDArray[Any]:
    dtype = np.dtype(_DTYPES[path.name])
    return np.fromfile(path, dtype, end - begin, offset=begin * dtype.itemsize)
