"""What the scheduler did, step by step: a record for each step, and a file of them.

The file is CSV: a line of column names, then a line for each step.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

logger = logging.getLogger(__name__)

Steps = dict[str, NDArray[Any]]


class StepRecord(NamedTuple):
    """One step of the engine. Policies without sides count everything as left.

    step: its number, from 1.
    prefill_*: prompt tokens computed in this step, by side.
    decode_*: decode rows, one token each, by side.
    kv_left, kv_right, kv_online: tokens of KV that the running requests of a side
        hold, without shared prefixes.
    kv_shared: tokens of the shared prefixes in the tree that running requests use.
    kv_cached: tokens that no running request uses, kept for later.
    cached_tokens: prompt tokens that requests admitted in this step found in the cache.
    evicted_tokens: tokens of KV dropped from the cache in this step.
    parked, resumed, retracted: requests, in this step.
    waiting: requests in the backlog.
    kv_saved_bytes: of KV, in all layers, that the step before did not have to read
        again because requests share it; 0 where attention is SGLang's own.
    compute_s, memory_s: estimated seconds at the device's full rates.
    """

    step: int
    prefill_left: int
    prefill_right: int
    prefill_online: int
    decode_left: int
    decode_right: int
    decode_online: int
    kv_left: int
    kv_right: int
    kv_online: int
    kv_shared: int
    kv_cached: int
    cached_tokens: int
    evicted_tokens: int
    parked: int
    resumed: int
    retracted: int
    waiting: int
    kv_saved_bytes: int
    compute_s: float
    memory_s: float


COLUMNS = StepRecord._fields
SECONDS = ("compute_s", "memory_s")
_HEADER = ",".join(COLUMNS) + "\n"


class StepLog:
    """Appends steps to a CSV file. Whatever happens to the file, nothing is raised.

    A file that cannot be opened or written is given up with one warning, and later
    records are dropped; what was written before stays readable.
    """

    def __init__(self, path: Path, flush_every: int = 64) -> None:
        """Nothing is opened yet.

        Args:
            path: created if it is not there; a log that is there is continued.
            flush_every: records that are written at a time.
        """
        self.path = path
        self.flush_every = flush_every
        self._lines: list[str] = []
        self._fd: int | None = None
        self._end = 0
        self._given_up = False

    def append(self, record: StepRecord) -> None:
        """Take a record; it is in the file after the next flush."""
        if self._given_up:
            return
        self._lines.append(",".join(map(str, record)))
        if len(self._lines) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Write what was appended."""
        if self._given_up or not self._lines:
            return
        try:
            if self._fd is None:
                self._open()
            self._write("\n".join(self._lines) + "\n")
        except (OSError, ValueError) as error:
            self._give_up(error)
        self._lines.clear()

    def close(self) -> None:
        """Write what is left. A record appended later opens the file again."""
        self.flush()
        self._close_file()

    def _open(self) -> None:
        # O_NONBLOCK: a pipe that nobody reads is to fail, not to wait.
        fd = self._fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644
        )
        size = os.fstat(fd).st_size
        start = os.pread(fd, len(_HEADER), 0) if size else b""
        if start and start != _HEADER.encode():
            raise ValueError("it is there, and is not a log of steps")
        self._end = _end_of_lines(fd, size)
        os.ftruncate(fd, self._end)
        if not start:
            self._write(_HEADER)

    def _write(self, text: str) -> None:
        """Append whole lines, or none: a reader never finds half a line for long."""
        assert self._fd is not None
        data = text.encode()
        written = os.pwrite(self._fd, data, self._end)
        if written != len(data):
            os.ftruncate(self._fd, self._end)
            raise OSError(f"wrote {written} of {len(data)} bytes; is the disk full?")
        self._end += len(data)

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self._close_file()
        logger.warning("No more steps are logged to %s: %s", self.path, error)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            os.close(fd)
        except OSError as error:
            logger.warning("Closing %s: %s", self.path, error)


def _end_of_lines(fd: int, size: int) -> int:
    """Where the last whole line ends; a crash may have torn the one after it."""
    longest = 4096
    start = max(0, size - longest)
    return start + os.pread(fd, longest, start).rfind(b"\n") + 1


def read_steps(path: Path) -> Steps:
    """The columns of a log by their names: int64 ``[n]``, float64 of the seconds.

    A last line without its newline is still being written, and left out.

    Raises:
        InputError: the file cannot be read, or a line is not that of a step.
    """
    columns: list[array[Any]] = [
        array("d" if name in SECONDS else "q") for name in COLUMNS
    ]
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, values in _rows(path, file):
                try:
                    for column, value in zip(columns, values, strict=True):
                        column.append(value)
                except OverflowError as error:
                    raise InputError(f"{path}, line {number}: {error}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    steps: Steps = {
        name: np.frombuffer(column, dtype=column.typecode) if column else _empty(column)
        for name, column in zip(COLUMNS, columns, strict=True)
    }
    _check_values(path, steps)
    return steps


def _empty(column: array[Any]) -> NDArray[Any]:
    return np.zeros(0, dtype=column.typecode)


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, list[int | float]]]:
    """The numbers of each line of a step, and which line of the file it is."""
    # A file of another kind may be one endless line.
    if file.readline(len(_HEADER)) != _HEADER:
        raise InputError(
            f"{path}, line 1: this is not a log of steps, which starts with "
            f"{','.join(COLUMNS[:3])},..."
        )
    first_float = COLUMNS.index(SECONDS[0])
    for number, line in enumerate(file, start=2):
        if not line.endswith("\n"):
            return
        fields = line.split(",")
        if len(fields) != len(COLUMNS):
            raise InputError(
                f"{path}, line {number}: {len(fields)} values instead of "
                f"{len(COLUMNS)}."
            )
        try:
            values: list[int | float] = [int(each) for each in fields[:first_float]]
            values += [float(each) for each in fields[first_float:]]
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}.") from error
        yield number, values


def _check_values(path: Path, steps: Steps) -> None:
    for name, values in steps.items():
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(wrong):
            raise InputError(
                f"{path}, line {wrong[0] + 2}: {name}={values[wrong[0]]} must be a "
                "number of 0 or more."
            )


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Many steps in a few figures.

    prefill_tokens, decode_tokens: of all sides. max_kv_tokens: most KV that running
    requests held at once, shared prefixes once. ratio_spread: see :func:`summarize`.
    """

    num_steps: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    evicted_tokens: int
    parked: int
    resumed: int
    retracted: int
    max_kv_tokens: int
    compute_s: float
    memory_s: float
    ratio_spread: float


def summarize(steps: Steps) -> StepSummary:
    """Totals over the steps, and how even their ratio of compute to memory time is.

    ``ratio_spread`` is the interquartile range of ``log(compute_s / memory_s)`` over
    the steps that have both, each weighted by its ``compute_s + memory_s``: 0 if all
    steps have the same ratio, log 2 = 0.69 if the ratio's upper quartile is twice its
    lower one. A weighted quantile q is the smallest value such that it and those below
    it have at least the share q of the weight. NaN where no step has both.
    """

    def total(*names: str) -> int:
        return int(sum(steps[name].sum() for name in names))

    sides = ("left", "right", "online")
    running = [steps[f"kv_{name}"] for name in (*sides, "shared")]
    return StepSummary(
        num_steps=len(steps["step"]),
        prefill_tokens=total(*(f"prefill_{side}" for side in sides)),
        decode_tokens=total(*(f"decode_{side}" for side in sides)),
        cached_tokens=total("cached_tokens"),
        evicted_tokens=total("evicted_tokens"),
        parked=total("parked"),
        resumed=total("resumed"),
        retracted=total("retracted"),
        max_kv_tokens=int(np.sum(running, axis=0).max(initial=0)),
        compute_s=float(steps["compute_s"].sum()),
        memory_s=float(steps["memory_s"].sum()),
        ratio_spread=_ratio_spread(steps["compute_s"], steps["memory_s"]),
    )


def _ratio_spread(compute: NDArray[np.float64], memory: NDArray[np.float64]) -> float:
    both = (compute > 0) & (memory > 0)
    compute, memory = compute[both], memory[both]
    if not len(compute):
        return float("nan")
    ratio = np.log(compute / memory)
    order = np.argsort(ratio)
    below = np.cumsum((compute + memory)[order])
    lower, upper = np.searchsorted(below, [0.25 * below[-1], 0.75 * below[-1]])
    return float(ratio[order[upper]] - ratio[order[lower]])
