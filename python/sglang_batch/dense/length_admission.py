"""Rows of a dense batch that join by their length, so that little of it is padding.

The rules are those of ``planner.kv_lengths.batch_switch``, which is told of each request
that comes or goes. Rows without a rule join in their order, as :class:`.Admission` has it.
Where both wait with one priority, the kind with fewer rows in the batch is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..planner.kv_lengths import batch_state, batch_switch
from ..planner.kv_lengths.batch_state import (
    CHECK_TICKS,
    TREE,
    LengthBatches,
    RunningRows,
    make_batches,
)
from ..planner.kv_lengths.length_groups import BatchLaw
from ..planner.kv_lengths.length_tree import NONE
from .admission import Admission, BatchChange, Offer, Row, RowChanges

_Number = TypeVar("_Number", bound=np.generic)

# Steps after which a waiting request joins before all others, by default. It is longer
# than most jobs take with a few thousand requests in the engine: those that have waited
# so long are many, and no longer join by their length.
MAX_TICKS = 1 << 16
# Requests of a priority for which there is room at first.
_FIRST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class ByLength:
    """How a row is put into a batch of rows of similar length.

    rule: TREE or GROUPS of ``planner.kv_lengths.batch_state``.
    key: the length by which it joins, or a longer one of its family. A row that has run
        joins by its own, if that is more.
    family: rows of one family share a prefix and join one after the other. NONE for a row
        without.
    max_ticks: steps after which a waiting row joins before others of its priority. The
        first row of a priority decides.
    """

    rule: int
    key: int
    family: int = NONE
    max_ticks: int = MAX_TICKS


@dataclass(frozen=True, slots=True)
class LengthChanges(RowChanges):
    """What changes before the next step, besides :class:`.RowChanges`.

    chosen: numbers of rows that join by length, in the order in which they join.
    chosen_too_long: numbers of those that cannot make a step even alone. They no longer wait.
    """

    chosen: Sequence[int]
    chosen_too_long: Sequence[int]


class _Level:
    """The rows of one priority that join by length: those that wait, and numbers of those that
    run.
    """

    def __init__(self, rule: int, max_ticks: int) -> None:
        self.rule = rule
        self.batches = make_batches(_FIRST_SLOTS, rule, max_ticks)
        self.waiting: dict[int, Row] = {}
        self.running: set[int] = set()
        self._slot: dict[int, int] = {}
        self._numbers: list[int] = []  # by slot, whether it is in use or not
        self._free: list[int] = []
        self._place: dict[int, ByLength] = {}

    def add(self, row: Row, place: ByLength) -> None:
        """A row waits from now on: a new one, or one that has run."""
        number = row.number
        known = self.waiting.get(number)
        if known and (known.length, self._place[number]) == (row.length, place):
            self.waiting[number] = row
            return
        if number not in self._slot:
            self._slot[number] = self._new_slot(number)
        self._stop(number)
        self.waiting[number], self._place[number] = row, place
        slot, length = self._slot[number], max(place.key, row.length)
        batch_state.add(self.batches, slot, length, length, place.family)

    def add_again(self, row: Row) -> None:
        """A row that runs gives its place up for a while."""
        self.add(row, self._place[row.number])

    def remove(self, number: int) -> None:
        """A row has ended, whether it waits or runs."""
        self._stop(number)
        del self._place[number]
        self._free.append(self._slot.pop(number))

    def join(self, number: int) -> None:
        """A waiting row runs."""
        batch_state.join(self.batches, self._slot[number])
        del self.waiting[number]
        self.running.add(number)

    def propose(self, law: BatchLaw, batch: Iterable[Row]) -> Row | None:
        """The row that is to join next, or None."""
        slot = batch_switch.propose(self.batches, law, self._now(batch))
        return None if slot == NONE else self.waiting[self._numbers[slot]]

    def parked(self, law: BatchLaw, batch: Iterable[Row]) -> list[Row]:
        """The rows that leave because the batch is switched."""
        own = [row for row in batch if row.number in self.running]
        if not batch_switch.wants_switch(self.batches, law, self._now(own)):
            return []
        return [
            row
            for row in own
            if batch_switch.is_parked(self.batches, self._slot[row.number])
        ]

    def old(self, batch: Iterable[Row]) -> list[Row]:
        """The rows of the batch that is being replaced."""
        return [
            row
            for row in batch
            if row.number in self.running
            and batch_state.is_of_old_batch(self.batches, self._slot[row.number])
        ]

    @property
    def wants_cut(self) -> bool:
        """Whether rows are to be parked at the next question."""
        return bool(self.batches.state[0]["cuts"])

    def _now(self, batch: Iterable[Row]) -> RunningRows:
        lengths = [row.length for row in batch if row.number in self.running]
        return RunningRows(len(lengths), float(sum(lengths)), max(lengths, default=0))

    def _stop(self, number: int) -> None:
        """End its present state, to wait or to run."""
        if self.waiting.pop(number, None) is not None:
            batch_state.remove(self.batches, self._slot[number])
        elif number in self.running:
            self.running.remove(number)
            batch_state.leave(self.batches, self._slot[number])

    def _new_slot(self, number: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._numbers[slot] = number
            return slot
        self._numbers.append(number)
        if len(self._numbers) > len(self.batches.family):
            self.batches = _doubled(self.batches)
        return len(self._numbers) - 1


def _doubled(batches: LengthBatches) -> LengthBatches:
    """The same batches with room for twice as many requests."""

    def longer(values: NDArray[_Number], fill: int) -> NDArray[_Number]:
        return np.concatenate([values, np.full_like(values, fill)])

    tree = batches.tree
    return batches._replace(
        tree=tree._replace(
            before=longer(tree.before, NONE),
            after=longer(tree.after, NONE),
            length=longer(tree.length, 0),
            tokens=longer(tree.tokens, 0),
            since=longer(tree.since, 0),
        ),
        key=longer(batches.key, 0),
        family=longer(batches.family, NONE),
        batch_of=longer(batches.batch_of, 0),
        is_next=longer(batches.is_next, 0),
        ring=longer(batches.ring, 0),
    )


@dataclass(slots=True)
class _Round:
    """One answer in the making: see :class:`LengthChanges`."""

    running: Sequence[Row]
    waiting: Sequence[Row]
    change: BatchChange
    law: BatchLaw
    joining: list[int] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    chosen_too_long: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LengthAdmission(Admission):
    """Chooses who runs, of rows that join by length and of others.

    It is told of the former by :meth:`add` and :meth:`remove`.

    step_cells: KV cells that are read in the time of a decode step without rows.
    most_cells: of a batch where ``max_cells`` is no limit.
    """

    step_cells: float = field(kw_only=True)
    most_cells: int = field(kw_only=True)
    _levels: dict[int, _Level] = field(default_factory=dict, init=False, repr=False)
    _priority: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _ticks: int = field(default=0, init=False, repr=False)

    def add(self, row: Row, place: ByLength) -> None:
        """A row waits to join by its length: a new one, or one that has run."""
        if self._priority.get(row.number, row.priority) != row.priority:
            self.remove(row.number)
        level = self._levels.get(row.priority)
        if level is None:
            level = self._levels[row.priority] = _Level(place.rule, place.max_ticks)
        self._priority[row.number] = row.priority
        level.add(row, place)

    def runs(self, row: Row, place: ByLength | None) -> None:
        """A row that runs may have another priority, or another way to join."""
        if place is None:
            self.remove(row.number)
        elif self._priority.get(row.number) != row.priority:
            self.add(row, place)
            self._levels[row.priority].join(row.number)

    def remove(self, number: int) -> None:
        """A row has ended, or waits for something else. Unknown ones are ignored."""
        priority = self._priority.pop(number, None)
        if priority is None:
            return
        level = self._levels[priority]
        level.remove(number)
        if not (level.waiting or level.running):
            del self._levels[priority]

    def tick(self) -> None:
        """A decode step was taken."""
        self._ticks += 1
        for level in self._levels.values():
            batch_state.tick(level.batches)

    @property
    def is_due(self) -> bool:
        """Whether :meth:`changes` should be asked though nobody has come or gone."""
        return any(
            level.waiting and (self._ticks >= CHECK_TICKS or level.wants_cut)
            for level in self._levels.values()
        )

    def changes(
        self,
        running: Sequence[Row],
        waiting: Sequence[Row],
        host_room: int | None = None,
    ) -> LengthChanges:
        """Who leaves and who joins before the next step.

        Args:
            waiting: rows without a rule, as of :meth:`.Admission.changes`.
            host_room: KV cells for which there is room in host memory. None: no limit.
        """
        self._ticks = 0
        law = self._law(running, host_room)
        if law.parks:
            running = [
                _soon_parked(row) if row.number in self._priority else row
                for row in running
            ]
        change = self.begin(running)
        self._forget_except([*waiting, *self._passed_by_length()])
        found = _Round(running, waiting, change, law)
        self._let_wait(found)
        for level in self._levels.values():
            for row in level.parked(law, change.batch):
                change.take_out(row)
                level.add_again(row)
        priorities = {row.priority for row in waiting} | self._levels.keys()
        for priority in sorted(priorities, reverse=True):
            self._fill(found, priority)
            level_left = self._levels.get(priority)
            if level_left is not None and level_left.waiting:
                break  # nobody of lower priority passes them
        # A row that was chosen may have left again, or was only asked to leave.
        new = {row.number for row in change.batch} - {row.number for row in running}
        return LengthChanges(
            change.leaving(running),
            found.joining,
            found.too_long,
            [number for number in dict.fromkeys(found.chosen) if number in new],
            found.chosen_too_long,
        )

    def _law(self, running: Sequence[Row], host_room: int | None) -> BatchLaw:
        held = sum(row.length for row in running)
        return BatchLaw(
            weight_s=self.step_cells,  # the unit of time is that of a cell
            read_s=1.0,
            row_share=0.0,
            padded=True,
            capacity=float(min(self.max_cells, self.most_cells)),
            max_rows=self.max_rows,
            parks=host_room is None or held <= host_room,
        )

    def _fill(self, found: _Round, priority: int) -> None:
        """Let rows of one priority join."""
        waiting = found.waiting
        others = deque(i for i, row in enumerate(waiting) if row.priority == priority)
        level = self._levels.get(priority)
        while others or level is not None:
            if level is not None and (not others or _has_fewer(level, found, priority)):
                if not self._offer_chosen(found, level):
                    level = None
            elif not self._offer_first(found, others):
                others.clear()

    def _offer_first(self, found: _Round, others: deque[int]) -> bool:
        """Offer the first row of those without a rule. Whether to continue with them."""
        i = others.popleft()
        outcome = self.offer(found.change, found.waiting[i])
        if outcome is Offer.JOINS:
            found.joining.append(i)
            self._let_wait(found)
        elif outcome is Offer.TOO_LONG:
            found.too_long.append(i)
        in_vain = found.change.in_vain > self.max_passes
        return outcome is not Offer.STAYS_BEHIND and not in_vain

    def _offer_chosen(self, found: _Round, level: _Level) -> bool:
        """Offer the row that joins next by its length. Whether to continue with them."""
        change = found.change
        row = level.propose(found.law, change.batch) if level.waiting else None
        if row is None:
            return False
        change.passed = [each for each in change.passed if each.number != row.number]
        outcome = self.offer(change, _soon_parked(row) if found.law.parks else row)
        if outcome is Offer.JOINS:
            level.join(row.number)
            found.chosen.append(row.number)
            self._let_wait(found)
            return True
        if outcome is Offer.TOO_LONG:
            self.remove(row.number)
            found.chosen_too_long.append(row.number)
            return True
        change.in_vain -= outcome is Offer.IN_VAIN
        old = level.old(change.batch) if level.rule == TREE and found.law.parks else []
        if outcome is Offer.STAYS_BEHIND or not old:
            return False
        longest = max(old, key=lambda each: (each.length, each.number))
        change.take_out(longest)
        level.add_again(longest)
        return True

    def _let_wait(self, found: _Round) -> None:
        """Note the rows that have left for others."""
        if self._levels:
            kept = {row.number for row in found.change.batch}
            for row in found.running:
                level = self._levels.get(self._priority.get(row.number, row.priority))
                if level and row.number in level.running and row.number not in kept:
                    level.add_again(row)

    def _passed_by_length(self) -> list[Row]:
        """Rows that wait to join by length and that others have passed."""
        levels = self._levels.values()
        return [
            level.waiting[number]
            for level in levels
            for number in self._passes
            if number in level.waiting
        ]


def _soon_parked(row: Row) -> Row:
    """A row as if it ended at the next question: it leaves when the batch grows too large, so it
    need not fit to its end.
    """
    return replace(row, left=min(row.left, CHECK_TICKS))


def _has_fewer(level: _Level, found: _Round, priority: int) -> bool:
    """Whether fewer rows of the batch joined by length than others of their priority."""
    here = [row for row in found.change.batch if row.priority == priority]
    own = sum(row.number in level.running for row in here)
    return 2 * own < len(here)
