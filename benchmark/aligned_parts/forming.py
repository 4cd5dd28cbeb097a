"""Time to form a batch, and of a whole step, with 100,000 requests that wait.

Lengths are uniform over all that the tree knows, or lognormal with a mean of about 1,100.
The KV is that of Llama-3-8B on an H100, and ten times as much. Counted is the processor
time of calls from Python, after some that do not count.

A batch is formed by the ``propose`` that finds no row running: the paper's search, after
which the requests move into the candidate batch, or the search for the first group of
lengths, which only padded rows need. Before each, one in a hundred of the waiting
requests is exchanged. A step is all that the state machine is asked and told in it: who
leaves, whether batches are switched, who joins, the tick. For each request that joins
another one comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from report import Figure

from sglang_batch.planner.kv_lengths.batch_state import (
    GROUPS,
    TREE,
    LengthBatches,
    RunningRows,
    add,
    is_of_old_batch,
    is_parked,
    join,
    leave,
    make_batches,
    num_waiting,
    propose,
    remove,
    tick,
    wants_switch,
)
from sglang_batch.planner.kv_lengths.length_groups import BatchLaw
from sglang_batch.planner.kv_lengths.length_tree import MAX_LENGTH, NONE

WAITING, ROUNDS, STEPS = 100_000, 300, 2000
KV = (480_000, 4_800_000)
MAX_ROWS = 1024
MEAN_STEPS = 200  # in which a row runs
MEAN_MS, P99_MS = 1.0, 5.0
SEED = 7
# Rule, and whether rows are padded.
RULES = {
    "tree": (TREE, False),
    "groups": (GROUPS, False),
    "groups, padded": (GROUPS, True),
}
_WARM_UP = 30
_NOBODY = RunningRows(0, 0.0, 0)
_T = TypeVar("_T")


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer requests, and no targets."""
    waiting, rounds, steps = (2000, 20, 60) if quick else (WAITING, ROUNDS, STEPS)
    rng = np.random.default_rng(SEED)
    lengths = {
        "uniform": rng.integers(1, MAX_LENGTH + 1, 2 * waiting),
        "lognormal": np.minimum(1 + rng.lognormal(6.5, 1.0, 2 * waiting), MAX_LENGTH),
    }
    figures = []
    for name, drawn in lengths.items():
        for capacity in KV:
            for how, (rule, padded) in RULES.items():
                law = BatchLaw(5e-3, 4e-8, 0.0, padded, float(capacity), MAX_ROWS, True)
                job = _Job(rule, law, drawn.astype(int).tolist(), waiting)
                label = f"{name}, {capacity // 1000:,}k KV, {how}"
                figures += _times(f"{label}: batch", job.form(rounds), quick)
                figures += _times(f"{label}: step", job.steps(steps), quick)
    return figures


def _times(name: str, seconds: Sequence[float], quick: bool) -> list[Figure]:
    milliseconds = 1e3 * np.array(seconds)
    values = {
        "mean": (float(milliseconds.mean()), MEAN_MS),
        "p99": (float(np.quantile(milliseconds, 0.99)), P99_MS),
    }
    return [
        Figure(f"{name}, {which}", value, "ms", None if quick else ("<=", bound))
        for which, (value, bound) in values.items()
    ]


class _Job:
    """Requests that wait, those that run, and those that have not come or have ended."""

    def __init__(
        self, rule: int, law: BatchLaw, lengths: list[int], waiting: int
    ) -> None:
        self.rule, self.law = rule, law
        self.lengths, self.waiting = lengths, waiting
        self.batches: LengthBatches = make_batches(len(lengths), rule)
        self.outside = [*range(waiting, len(lengths))]
        self.rows: dict[int, int] = {}
        self.ends: dict[int, list[int]] = {}
        self.rng = np.random.default_rng(SEED)
        self.now = 0
        self.spent = 0.0
        self._compile()
        for i in range(waiting):
            self._add(i, lengths[i])

    def _compile(self) -> None:
        """Call once the functions that are seldom called."""
        self._add(0, 1)
        join(self.batches, 0)
        is_parked(self.batches, 0)
        is_of_old_batch(self.batches, 0)
        leave(self.batches, 0)

    def form(self, rounds: int) -> list[float]:
        """Seconds to form batches, none of which runs."""
        seconds = []
        for _ in range(rounds + _WARM_UP):
            self._exchange()
            tick(self.batches)
            before = int(self.batches.state[0]["num_batches"])
            self.spent = 0.0
            i = self._timed(propose, self.batches, self.law, _NOBODY)
            seconds.append(self.spent)
            formed = int(self.batches.state[0]["num_batches"]) - before
            if i == NONE or formed != (self.rule == TREE):
                raise RuntimeError("No batch was formed")
            for each in np.flatnonzero(self.batches.is_next).tolist():
                remove(self.batches, each)
                self._add(each, self.lengths[each])
        return seconds[_WARM_UP:]

    def steps(self, number: int) -> list[float]:
        """Seconds of steps, one after the other."""
        seconds = []
        for _ in range(number + _WARM_UP):
            self.spent = 0.0
            self._leave()
            now = self._running()
            if self._timed(wants_switch, self.batches, self.law, now):
                for i in [i for i in self.rows if is_parked(self.batches, i)]:
                    self._wait_again(i)
            self._join()
            self._timed(tick, self.batches)
            while num_waiting(self.batches) < self.waiting:
                i = self.outside.pop(0)
                self._timed(add, self.batches, i, *2 * [self.lengths[i]], NONE)
            seconds.append(self.spent)
            self.rows = {i: length + 1 for i, length in self.rows.items()}
            self.now += 1
        return seconds[_WARM_UP:]

    def _timed(self, call: Callable[..., _T], *args: object) -> _T:
        begin = time.thread_time()
        result = call(*args)
        self.spent += time.thread_time() - begin
        return result

    def _add(self, i: int, length: int) -> None:
        add(self.batches, i, length, length, NONE)

    def _exchange(self) -> None:
        """Other requests wait: one in a hundred."""
        waiting = np.flatnonzero(self.batches.tree.length)
        for i in self.rng.choice(waiting, len(waiting) // 100, replace=False).tolist():
            remove(self.batches, i)
            self.outside.append(i)
            other = self.outside.pop(0)
            self._add(other, self.lengths[other])

    def _running(self) -> RunningRows:
        lengths = self.rows.values()
        return RunningRows(len(lengths), float(sum(lengths)), max(lengths, default=0))

    def _leave(self) -> None:
        """Rows end, and those for which KV is short wait again."""
        for i in self.ends.pop(self.now, ()):
            if i in self.rows:
                self._timed(leave, self.batches, i)
                del self.rows[i]
                self.outside.append(i)
        while len(self.rows) > 1:
            rows, total, longest = self._running()
            cells = rows * (longest + 1) if self.law.padded else total + rows
            if cells <= self.law.capacity:
                return
            old = [i for i in self.rows if is_of_old_batch(self.batches, i)]
            self._wait_again(max(old or self.rows, key=self.rows.__getitem__))

    def _wait_again(self, i: int) -> None:
        length = self.rows.pop(i)
        self._timed(leave, self.batches, i)
        self._timed(add, self.batches, i, length, length, NONE)

    def _join(self) -> None:
        now = self._running()
        while True:
            i = self._timed(propose, self.batches, self.law, now)
            if i == NONE:
                return
            length = int(self.batches.key[i])
            now = RunningRows(
                now.rows + 1, now.total + length, max(now.longest, length)
            )
            cells = now.rows * now.longest if self.law.padded else now.total
            is_full = now.rows > self.law.max_rows or cells > self.law.capacity
            if now.rows > 1 and is_full:
                return
            self._timed(join, self.batches, i)
            self.rows[i] = length
            end = self.now + 1 + int(self.rng.exponential(MEAN_STEPS))
            self.ends.setdefault(end, []).append(i)
