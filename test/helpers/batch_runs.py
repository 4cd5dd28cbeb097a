"""Random jobs through ``batch_state``, beside a model of who waits and who runs.

An engine without a model: rows grow by a token in each step, end, are parked when KV is
short or batches are switched, and are aborted. All that the state machine counts is
counted here again, from lists.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from random import Random

import numpy as np

from sglang_batch.planner.kv_lengths.batch_state import (
    GROUPS,
    STATE,
    TREE,
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
from sglang_batch.planner.kv_lengths.length_tree import COUNT, NONE


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One request of a job.

    comes: the step in which it arrives.
    length: of its KV when it first joins.
    steps: decode steps until it ends.
    aborted: the step in which it is aborted, wherever it is then. -1: never.
    """

    comes: int
    length: int
    steps: int
    family: int = NONE
    aborted: int = -1


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Requests, and the engine that runs them.

    limit: ticks after which a request that waits is due. None: never.
    """

    requests: list[JobRequest]
    rule: int
    law: BatchLaw
    limit: int | None = None


@dataclass(slots=True)
class Waits:
    """A request that waits: since which tick, with which length.

    blocked: steps in which it was due, and the request that was to join next did not fit.
    """

    since: int
    length: int
    blocked: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """A request that joined, in which step, and whether no other one ran then."""

    step: int
    request: int
    alone: bool


class BatchRun:
    """A job while it runs, and what was seen.

    waiting, running: requests, the latter with their lengths.
    joined: in the order in which they did. Parked ones join again.
    parked, switches: rows that were parked, and how often because batches were switched.
    worst_mixed: largest share of mixed steps since the 500th one.
    num_due: how often a request was proposed while one was due.
    early: requests that were proposed although another one was due and had waited longer,
        without being in a candidate batch of which a request had waited as long.
    late: requests that waited longer than the limit and the steps in which they were due
        and nobody could join.
    """

    def __init__(self, job: BatchJob) -> None:
        self.job = job
        self.batches = make_batches(len(job.requests), job.rule, job.limit)
        self.waiting: dict[int, Waits] = {}
        self.running: dict[int, int] = {}
        self.ended: set[int] = set()
        self.aborted: set[int] = set()
        self.joined: list[Joined] = []
        self.steps = self.clock = self.mixed = self.parked = self.switches = 0
        self.worst_mixed = 0.0
        self.num_due = 0
        self.early: list[int] = []
        self.late: list[int] = []
        self._num_come = 0
        self._generated = [0] * len(job.requests)
        self._batch: dict[int, int] = {}  # of each row
        self._formed = 0
        self._next_since: dict[int, int] = {}  # of those in the candidate batch
        self._comes: dict[int, list[int]] = defaultdict(list)
        self._goes: dict[int, list[int]] = defaultdict(list)
        for i, request in enumerate(job.requests):
            self._comes[request.comes].append(i)
            self._goes[request.aborted].append(i)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits, runs or is still to come."""
        return len(self.ended) + len(self.aborted) == len(self.job.requests)

    def run(self, most_steps: int = 100_000) -> BatchRun:
        """Run the job to its end.

        Raises:
            AssertionError: it does not end, or something was counted wrongly.
        """
        while not self.is_over:
            assert self.steps < most_steps, "the job does not end"
            self.step()
        assert not self.waiting and not self.running
        return self

    # The engine

    def step(self) -> None:
        """Take one step."""
        self._come_and_go()
        self._make_room()
        self._switch()
        self._admit()
        self._decode()
        self._check()
        self.steps += 1

    def _come_and_go(self) -> None:
        self._num_come += len(self._comes[self.steps])
        for i in self._comes[self.steps]:
            self._wait(i, self.job.requests[i].length)
        for i in self._goes[self.steps]:
            if i in self.waiting:
                del self.waiting[i]
                if self.batches.is_next[i]:
                    del self._next_since[i]
                remove(self.batches, i)
            elif i in self.running:
                self._leave(i)
            else:
                continue
            self.aborted.add(i)
            self._check()

    def _wait(self, i: int, length: int) -> None:
        assert i not in self.waiting and i not in self.running
        self.waiting[i] = Waits(self.clock, length)
        add(self.batches, i, length, length, self.job.requests[i].family)

    def _leave(self, i: int) -> int:
        leave(self.batches, i)
        del self._batch[i]
        return self.running.pop(i)

    def _park(self, i: int) -> None:
        self.parked += 1
        self._wait(i, self._leave(i))

    def _make_room(self) -> None:
        while len(self.running) > 1:
            lengths = [length + 1 for length in self.running.values()]
            if self._cells(lengths) <= self.job.law.capacity:
                return
            old = [i for i in self.running if is_of_old_batch(self.batches, i)]
            self._park(max(old or self.running, key=lambda i: (self.running[i], i)))

    def _cells(self, lengths: list[int]) -> int:
        """KV that rows of these lengths take."""
        return len(lengths) * max(lengths) if self.job.law.padded else sum(lengths)

    def _now(self) -> RunningRows:
        lengths = self.running.values()
        return RunningRows(len(lengths), float(sum(lengths)), max(lengths, default=0))

    def _switch(self) -> None:
        if not wants_switch(self.batches, self.job.law, self._now()):
            return
        self.switches += 1
        assert self.job.law.parks and self.running
        leaving = [i for i in self.running if is_parked(self.batches, i)]
        if self._is_mixed():
            batch = self._running_batch()
            assert leaving == [i for i in self.running if self._batch[i] != batch]
        else:
            assert self.waiting and leaving
            if self.job.rule == GROUPS:
                high = int(self.batches.state[0]["high"])
                assert leaving == [i for i, n in self.running.items() if n > high]
            else:
                assert leaving == [*self.running]
        for i in leaving:
            self._park(i)

    def _admit(self) -> None:
        is_blocked = False
        while True:
            i = propose(self.batches, self.job.law, self._now())
            self._see_candidates()
            if i == NONE:
                assert self.running or not self.waiting, "nobody runs and nobody joins"
                break
            assert i in self.waiting, "somebody is proposed who does not wait"
            self._see_due(i)
            if not self._fits(i):
                is_blocked = True
                break
            self._join(i)
        if is_blocked:
            for each in self.waiting.values():
                each.blocked += self._is_due(each)

    def _fits(self, i: int) -> bool:
        lengths = [*self.running.values(), self.waiting[i].length]
        enough = len(lengths) <= self.job.law.max_rows
        return len(lengths) == 1 or (
            enough and self._cells(lengths) <= self.job.law.capacity
        )

    def _join(self, i: int) -> None:
        each = self.waiting.pop(i)
        if self.job.limit is not None:
            wait = self.clock - each.since
            if wait > self.job.limit + 1 + each.blocked:
                self.late.append(i)
        self.joined.append(Joined(self.steps, i, not self.running))
        is_next, before = bool(self.batches.is_next[i]), self._running_batch()
        join(self.batches, i)
        self._batch[i] = self._running_batch()
        self.running[i] = each.length
        assert is_next or self._batch[i] == before, "a switch without the candidates"

    def _decode(self) -> None:
        if not self.running:
            return
        self.mixed += self._is_mixed()
        self.clock += 1
        tick(self.batches)
        if self.clock >= 500:
            self.worst_mixed = max(self.worst_mixed, self.mixed / self.clock)
        for i in [*self.running]:
            self.running[i] += 1
            self._generated[i] += 1
            if self._generated[i] == self.job.requests[i].steps:
                self._leave(i)
                self.ended.add(i)

    # The counts

    def _running_batch(self) -> int:
        return int(self.batches.state[0]["batch"])

    def _is_mixed(self) -> bool:
        batches = {*self._batch.values()}
        return len(batches) > 1 and self._running_batch() in batches

    def _is_next(self) -> set[int]:
        return {*np.flatnonzero(self.batches.is_next).tolist()}

    def _check(self) -> None:
        state = dict(zip(STATE.names or (), self.batches.state[0].item(), strict=True))
        new = sum(batch == state["batch"] for batch in self._batch.values())
        assert state["rows_new"] == new
        assert state["rows_old"] == len(self._batch) - new
        assert state["clock"] == self.clock
        assert state["mixed_ticks"] == self.mixed
        is_next = self._is_next()
        assert is_next <= self.waiting.keys()
        assert state["num_next"] == len(is_next)
        in_tree = int(self.batches.tree.nodes[0, COUNT])
        assert in_tree == len(self.waiting) - len(is_next)
        assert num_waiting(self.batches) == len(self.waiting)
        gone = len(self.ended) + len(self.aborted)
        known = len(self.waiting) + len(self.running) + gone
        assert known == self._num_come, "somebody is lost"

    # Who is due

    def _is_due(self, each: Waits) -> bool:
        return self.job.limit is not None and self.clock - each.since > self.job.limit

    def _see_candidates(self) -> None:
        formed = int(self.batches.state[0]["num_batches"])
        if formed != self._formed:
            self._formed = formed
            self._next_since = {i: self.waiting[i].since for i in self._is_next()}

    def _see_due(self, i: int) -> None:
        due = [each.since for each in self.waiting.values() if self._is_due(each)]
        if not due:
            return
        self.num_due += 1
        since = self.waiting[i].since
        if self.batches.is_next[i]:  # aborted ones do not count
            since = min(self._next_since.values())
        if since > min(due):
            self.early.append(i)


# Random jobs


def random_job(seed: int, rule: int | None = None, due: bool = False) -> BatchJob:
    """Few requests and many, at once or over time, on engines of all kinds.

    Args:
        rule: any if None.
        due: whether there is a limit. Otherwise there is one in some jobs.
    """
    rng = Random(seed)
    top = rng.choice([10, 100, 1000, 3000, 60_000])
    spread = rng.choice([0, 0, 30, 200])
    longest_answer = rng.choice([3, 30, 100])
    aborts = rng.choice([0.0, 0.0, 0.1, 0.4])
    siblings = rng.choice([0.0, 0.0, 0.6])
    requests: list[JobRequest] = []
    for i in range(rng.choice([5, 20, 60] if due else [5, 20, 60, 120])):
        comes = rng.randint(0, spread)
        length = rng.randint(1, top)
        if rng.random() < 0.5:
            length = min(2 * top, 1 + int(rng.lognormvariate(4, 1.5)))
        family = i if siblings else NONE
        if requests and rng.random() < siblings:
            last = requests[-1]
            comes, length, family = last.comes, last.length, last.family
        steps = rng.randint(1, longest_answer)
        aborted = comes + rng.randint(0, 60) if rng.random() < aborts else -1
        requests.append(JobRequest(comes, length, steps, family, aborted))
    padded = rng.random() < 0.5
    law = BatchLaw(
        weight_s=rng.choice([1.0, 100.0, 1000.0]),
        read_s=rng.choice([0.01, 0.1, 1.0]),
        row_share=0.0 if padded else rng.choice([0.0, 33.0]),
        padded=padded,
        capacity=float(top * rng.choice([1, 3, 10, 30])),
        max_rows=rng.choice([2, 8, 32, 100]),
        parks=rng.random() < 0.8,
    )
    limits = [0, 3, 20, 100] if due else [None, None, 0, 5, 30, 200]
    return BatchJob(
        requests, rule or rng.choice([TREE, GROUPS]), law, rng.choice(limits)
    )


def long_job(seed: int) -> BatchJob:
    """A job of more than 500 steps by the tree, on an engine that parks rows."""
    rng = Random(seed)
    top = rng.choice([100, 1000, 4000])
    spread = rng.choice([0, 300, 1000])
    requests = [
        JobRequest(
            rng.randint(0, spread),
            rng.randint(1, top)
            if rng.random() < 0.5
            else min(top, 1 + int(rng.lognormvariate(4, 1.5))),
            rng.randint(1, 300),
        )
        for _ in range(rng.choice([100, 200]))
    ]
    law = BatchLaw(
        weight_s=1.0,
        read_s=0.01,
        row_share=0.0,
        padded=rng.random() < 0.5,
        capacity=float(top * rng.choice([20, 60])),
        max_rows=rng.choice([20, 100]),
        parks=True,
    )
    return BatchJob(requests, TREE, law, rng.choice([None, None, None, 3, 500]))
