"""A record of each step of the scheduler, a CSV file of these records, and timed steps.

A machine's costs are learnt from the last steps of each kind. They decide nothing here: costs
reach the schedulers with a job's plan, so that all ranks decide alike.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..planner.costs.step_costs import StepSample
from ..planner.requests import SIDES

logger = logging.getLogger(__name__)

Steps = dict[str, NDArray[Any]]


class Admission(IntEnum):
    """Whether a waiting request joins a step, or the reason why it does not.

    JOINED: it joins.
    NONE_WAITS: no request waits.
    STEP_FULL: the step has all the prompt tokens that it takes.
    NO_ROW: the running batch has no row left.
    NO_KV: there is no KV for its prompt now, or for all answers as they grow.
    NO_WINDOW: the pool of sliding windows has no room.
    PROMPT_CUT: another prompt ends in this step before it is complete, and SGLang keeps
        only one such prompt.
    ON_HOST: its KV is still on its way from the host.
    OFFLOADED_FIRST: requests on the host resume before any new one joins.
    ONLINE_FIRST: an online request needs the room.
    DECODES_FIRST: the last step computed prompts alone, so this one decodes.
    AWAITS_LEADER: another request is computing a prefix that it needs.
    AWAITS_FOLLOWERS: requests that wait for such a prefix need the KV.
    AWAITS_ADAPTER: its LoRA adapter has no slot.
    AWAITS_SIBLINGS: it would evict a prefix whose further requests are still to come.
    """

    JOINED = 0
    NONE_WAITS = 1
    STEP_FULL = 2
    NO_ROW = 3
    NO_KV = 4
    NO_WINDOW = 5
    PROMPT_CUT = 6
    ON_HOST = 7
    OFFLOADED_FIRST = 8
    ONLINE_FIRST = 9
    DECODES_FIRST = 10
    AWAITS_LEADER = 11
    AWAITS_FOLLOWERS = 12
    AWAITS_ADAPTER = 13
    AWAITS_SIBLINGS = 14


class StepRecord(NamedTuple):
    """One step of the engine. Policies without sides count everything as left.

    step: its number, from 1.
    prefill_*: prompt tokens computed in this step, by side.
    decode_*: decode rows, one token each, or with speculation one or more, by side.
    kv_left, kv_right, kv_online: tokens of KV that the running requests of a side
        hold, without shared prefixes.
    kv_shared: tokens of the shared prefixes in the tree that running requests use.
    kv_cached: tokens of prefixes that are pinned for later requests only.
    cached_tokens: prompt tokens that requests admitted in this step found in the cache.
    evicted_tokens: tokens of KV dropped from the cache in this step.
    offloaded, resumed, retracted: requests, in this step.
    prefetched: of those that resumed, the ones whose KV was on the device already.
    kv_waits: copies of KV from the host that this step waited for.
    admission: why the next request in line did not join, as the number of an
        :class:`Admission`.
    waiting: requests in the backlog.
    kv_saved_bytes: bytes of KV, in all layers, that the step before read once for
        several requests and not again; 0 with SGLang's own attention.
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
    offloaded: int
    resumed: int
    prefetched: int
    kv_waits: int
    admission: int
    retracted: int
    waiting: int
    kv_saved_bytes: int
    compute_s: float
    memory_s: float


COLUMNS = StepRecord._fields
SECONDS = ("compute_s", "memory_s")
_KINDS = [float if name in SECONDS else int for name in COLUMNS]
_HEADER = ",".join(COLUMNS) + "\n"
# Logs of the last release have another name for a column and lack three others; they
# can be read for one release.
_OLD_NAME, _NEW_NAME, _ADDED = "parked", "offloaded", "prefetched,kv_waits,admission,"
_ADDED_AT = COLUMNS.index("prefetched")
_OLD_HEADER = _HEADER.replace(_NEW_NAME, _OLD_NAME).replace(_ADDED, "")


class StepLog:
    """Appends steps to a CSV file, and never raises.

    After a failure to open or write the file, one warning is logged and later records
    are dropped. Records written before stay readable.

    Args:
        path: created with the first record if missing. An existing log is continued.
        flush_every: number of records written at a time.
    """

    def __init__(self, path: Path, flush_every: int = 64) -> None:
        self.path = path
        self.flush_every = flush_every
        self._lines: list[str] = []
        self._fd: int | None = None
        self._end = 0
        self._given_up = False

    def append(self, record: StepRecord) -> None:
        """Take a record, which the next flush writes."""
        if self._given_up:
            return
        self._lines.append(",".join(map(str, record)))
        if len(self._lines) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Write the records taken since the last flush."""
        if self._given_up or not self._lines:
            return
        try:
            if self._fd is None:
                self._open()
            self._write("\n".join(self._lines) + "\n")
        except (OSError, ValueError) as error:
            self._given_up = True
            if self._fd is not None:
                with suppress(OSError):
                    os.close(self._fd)
            logger.warning("No more steps are logged to %s: %s", self.path, error)
        self._lines.clear()

    def _open(self) -> None:
        # O_NONBLOCK: opening a pipe that nobody reads must fail, not wait.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = self._fd = os.open(self.path, flags, 0o644)
        size = os.fstat(fd).st_size
        start = os.pread(fd, len(_HEADER), 0) if size else b""
        if start.startswith(_OLD_HEADER.encode()):
            raise ValueError("it is a log of an earlier release; name another file")
        if start and not start.startswith(_HEADER.encode()):
            raise ValueError("the file exists and is not a log of steps")
        # The end of the last whole line. A crash may have torn the one after it.
        tail = max(0, size - 4096)
        self._end = tail + os.pread(fd, 4096, tail).rfind(b"\n") + 1
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


def read_steps(path: Path) -> Steps:
    """The columns of a log by name, ``[n]``: int64, and float64 for seconds.

    A last line without its newline is still being written and is left out. A log with
    an earlier column name is read with a FutureWarning.

    Raises:
        InputError: the file cannot be read, or a line is not the record of a step.
    """
    columns: list[array[Any]] = [
        array("d" if kind is float else "q") for kind in _KINDS
    ]
    number = 1
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            # Any other file may be one endless line.
            is_old = _is_old(path, file.readline(len(_HEADER)))
            for line in file:
                number += 1
                if not line.endswith("\n"):
                    break
                fields = line.split(",")
                if is_old:
                    fields[_ADDED_AT:_ADDED_AT] = ["0"] * _ADDED.count(",")
                if len(fields) != len(COLUMNS):
                    raise ValueError(f"{len(fields)} values instead of {len(COLUMNS)}")
                for i, text in enumerate(fields):
                    value = _KINDS[i](text)
                    if not 0 <= value < math.inf:
                        raise ValueError(
                            f"{COLUMNS[i]}={value} must be a number of 0 or more"
                        )
                    columns[i].append(value)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}, line {number}: {error}.") from error
    return {
        name: np.array(column, dtype=column.typecode)
        for name, column in zip(COLUMNS, columns, strict=True)
    }


def _is_old(path: Path, header: str) -> bool:
    """Whether this is the header of a log of the last release.

    Raises:
        ValueError: it is that of no log of steps.
    """
    if header == _HEADER:
        return False
    if header != _OLD_HEADER:
        start = ",".join(COLUMNS[:3])
        raise ValueError(f"this is not a log of steps, which starts with {start},...")
    warnings.warn(
        f"{path}: the column {_OLD_NAME} of step logs is now called {_NEW_NAME}; the "
        "old name works for one release.",
        FutureWarning,
        stacklevel=3,
    )
    return True


def summarize(steps: Steps) -> dict[str, Any]:
    """Totals over the steps, of all sides, and the spread of their ratio of compute to memory
    time.

    ``max_kv_tokens`` is the most KV that running requests held at once, with shared prefixes
    counted once, and ``admissions`` the steps by the reason for which the next request in line
    did not join.

    ``ratio_spread`` is the interquartile range of ``log(compute_s / memory_s)`` over the
    steps that have both, each weighted by its ``compute_s + memory_s``. It is 0 if all
    steps have the same ratio, and log 2 = 0.69 if the ratio's upper quartile is twice its
    lower one. The weighted quantile q is the smallest value such that it and the smaller
    ones have at least the share q of the weight. NaN if no step has both times.
    """

    def total(*names: str) -> int:
        return int(sum(steps[name].sum() for name in names))

    running = [steps[f"kv_{name}"] for name in (*SIDES, "shared")]
    return {
        "num_steps": len(steps["step"]),
        "prefill_tokens": total(*(f"prefill_{side}" for side in SIDES)),
        "decode_tokens": total(*(f"decode_{side}" for side in SIDES)),
        "cached_tokens": total("cached_tokens"),
        "evicted_tokens": total("evicted_tokens"),
        "offloaded": total("offloaded"),
        "resumed": total("resumed"),
        "retracted": total("retracted"),
        "max_kv_tokens": int(np.sum(running, axis=0).max(initial=0)),
        "compute_s": float(steps["compute_s"].sum()),
        "memory_s": float(steps["memory_s"].sum()),
        "ratio_spread": _ratio_spread(steps["compute_s"], steps["memory_s"]),
        "admissions": {
            reason.name.lower(): count
            for reason in Admission
            if (count := int(np.count_nonzero(steps["admission"] == reason)))
        },
    }


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


# Steps of one kind that are kept.
PER_KIND = 6


class KeptSamples:
    """The last :data:`PER_KIND` steps of each kind: of about as many tokens, rows and KV,
    with and without requests that arrive or end, after prompts and not."""

    def __init__(self, samples: Iterable[StepSample] = ()) -> None:
        self._kinds: dict[tuple[int, ...], deque[StepSample]] = {}
        for sample in samples:
            self.add(sample)

    def add(self, sample: StepSample) -> None:
        """Keep a step, in place of the oldest of its kind if there are too many."""
        kind = (
            int(sample.prompt_tokens).bit_length(),
            int(sample.prompts).bit_length(),
            int(sample.decodes).bit_length(),
            int(sample.kv_tokens).bit_length() // 2,
            int(sample.requests > 0),
            int(sample.after_prompts),
        )
        self._kinds.setdefault(kind, deque(maxlen=PER_KIND)).append(sample)

    @property
    def samples(self) -> list[StepSample]:
        """All of them, by kind, oldest first."""
        return [sample for _, kept in sorted(self._kinds.items()) for sample in kept]


class StepSamples:
    """Times steps from one to the next.

    Args:
        late: whether a step is scheduled while the one before it runs, so that the time up
            to the next one is that of the step before.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._kept = KeptSamples()
        self._begun = 0.0
        # The steps whose time runs: the last one, and with ``late`` the one before.
        self._steps: list[StepSample | None] = []

    def begin(self, now: float, step: StepSample | None, requests: float = 0.0) -> None:
        """A step begins, and the time of one before it ends.

        Args:
            now: a clock's seconds.
            step: its work, with 0 seconds. None for a step that is not like others, and
                times around it are not kept.
            requests: half of those that arrived or ended in that time.
        """
        self._steps.append(step)
        if len(self._steps) <= 1 + self._late:
            self._begun = now
            return
        timed, *self._steps = self._steps
        if timed is not None and None not in self._steps:
            seconds = now - self._begun
            self._kept.add(timed._replace(seconds=seconds, requests=requests))
        self._begun = now

    def idle(self) -> None:
        """Nothing runs: the time up to the next step is nobody's."""
        self._steps.clear()

    def take(self) -> list[StepSample]:
        """All that were kept since the last call."""
        kept, self._kept = self._kept, KeptSamples()
        return kept.samples
