"""Which rows of a dense batch join, and which leave for a while.

A dense batch takes rows x width cells of KV, where width is the length of the longest row:
all rows end at one column, and shorter ones have dead cells in front. Each step makes every
row one cell longer. Rows may be preempted, and the batch may change its size from step to
step, as in Baton, section 4.3.

Rows join in their order, or by their length, so that little of the batch is padding: by the
rules of ``planner.kv_lengths.batch_state``, which is told of each request that comes or goes.
Where both wait with one priority, the kind with fewer rows in the batch is next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from ..planner.kv_lengths import batch_state
from ..planner.kv_lengths.batch_state import (
    CHECK_TICKS,
    TREE,
    RunningRows,
    doubled,
    make_batches,
)
from ..planner.kv_lengths.length_groups import BatchLaw
from ..planner.kv_lengths.length_tree import NONE

# Steps after which a waiting request joins before all others, by default. It is longer
# than most jobs take with a few thousand requests in the engine: those that have waited
# so long are many, and no longer join by their length.
MAX_TICKS = 1 << 16
# Requests of a priority for which there is room at first.
_FIRST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """A row that runs, or that waits to.

    length: tokens with keys and values, now or once it has joined, at least 1.
    left: steps until it is expected to end, at least 1.
    priority: higher ones join first, and leave last.
    number: unique; smaller for those that came earlier. A row that leaves keeps it.
    """

    length: int
    left: int
    priority: int
    number: int


def expected_left(expected: int, so_far: int, most: int) -> int:
    """Steps until an answer of ``so_far`` tokens is expected to end, at least 1.

    One that is longer than the ``expected`` tokens is expected to become longer by half, so
    that it does not look as if it ended at every next step. ``most``: the limit on its tokens.
    """
    left = expected - so_far if so_far < expected else so_far // 2
    return max(1, min(left, most - so_far))


def cells(rows: Sequence[Row], steps: int = 0) -> int:
    """Cells that the rows take after so many steps, if none of them ends before."""
    return len(rows) * (max(row.length for row in rows) + steps) if rows else 0


def peak_cells(rows: Sequence[Row]) -> int:
    """The most cells at any step from now on, if rows end as expected and none joins.

    Between two ends only the width grows, so the peak is at the last step of some row. The
    rows that still run there are those with no fewer steps left.
    """
    peak = longest = 0
    by_end = sorted(rows, key=lambda row: row.left, reverse=True)
    for count, row in enumerate(by_end, 1):
        longest = max(longest, row.length)
        peak = max(peak, count * (longest + row.left))
    return peak


def preempted(running: Sequence[Row], max_cells: int, steps: int = 0) -> list[int]:
    """Indices of rows that must leave so that the others fit for so many steps.

    The choice is the one that moves the fewest tokens of the highest priority, then of the
    next one, and so on, then the fewest rows.
    """
    everyone = range(len(running))
    choice = _least_moved(
        running, everyone, lambda kept: cells(kept, steps) <= max_cells
    )
    assert choice is not None, "no row takes no cells"
    return choice


def displaced_by(
    running: Sequence[Row], newcomer: Row, max_rows: int, max_cells: int
) -> list[int] | None:
    """Indices of rows of lower priority that must leave so that ``newcomer`` can join.

    The lowest leave first, and none that could as well stay. None: it cannot join anyway.
    """
    return _least_moved(
        running,
        [i for i, row in enumerate(running) if row.priority < newcomer.priority],
        lambda kept: _can_join(kept, newcomer, max_rows, max_cells),
    )


class Offer(Enum):
    """What becomes of a waiting row that could join.

    IN_VAIN: it does not fit now. STAYS_BEHIND: it may not pass another one that waits.
    TOO_LONG: it cannot make a step even alone.
    """

    JOINS = auto()
    IN_VAIN = auto()
    STAYS_BEHIND = auto()
    TOO_LONG = auto()


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
        batch_state.join(self.batches, self._slot[number])
        del self.waiting[number]
        self.running.add(number)

    def propose(self, law: BatchLaw, batch: Iterable[Row]) -> Row | None:
        slot = batch_state.propose(self.batches, law, self._now(batch))
        return None if slot == NONE else self.waiting[self._numbers[slot]]

    def parked(self, law: BatchLaw, batch: Iterable[Row]) -> list[Row]:
        """The rows that leave because the batch is switched."""
        own = [row for row in batch if row.number in self.running]
        if not batch_state.wants_switch(self.batches, law, self._now(own)):
            return []
        return [
            row
            for row in own
            if batch_state.is_parked(self.batches, self._slot[row.number])
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
            self.batches = doubled(self.batches)
        return len(self._numbers) - 1


@dataclass(slots=True)
class RowChanges:
    """What changes before the next step.

    batch: the rows so far.
    passed: rows that wait, which later ones would pass.
    in_vain: rows that were offered and did not fit.
    joining: indices of waiting rows, in the order in which they join.
    chosen: numbers of rows that join by length, in the order in which they join.
    too_long: numbers of rows that cannot make a step even alone, up to the last one that was
        considered. They no longer wait.
    """

    running: Sequence[Row]
    waiting: Sequence[Row]
    law: BatchLaw
    batch: list[Row]
    passed: list[Row] = field(default_factory=list)
    in_vain: int = 0
    joining: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)

    def take_out(self, row: Row) -> None:
        self.batch = [other for other in self.batch if other.number != row.number]

    @property
    def leaving(self) -> list[int]:
        """Indices of running rows whose KV goes to the host."""
        kept = {row.number for row in self.batch}
        return [i for i, row in enumerate(self.running) if row.number not in kept]


@dataclass(slots=True)
class Admission:
    """Chooses who runs. ``max_rows`` may be changed between any two calls.

    It is told by :meth:`add` and :meth:`remove` of rows that join by length.

    max_rows: most rows of the batch, at least 1. If it is lowered, none joins until enough
        have ended.
    max_cells: most cells of the batch.
    max_passes: rows of its own priority behind a waiting row that may pass it. 0 keeps to
        the order. Rows of lower priority never pass, and those of higher ones are not
        counted.
    step_cells: KV cells that are read in the time of a decode step without rows.
    most_cells: of a batch where ``max_cells`` is no limit.
    """

    max_rows: int
    max_cells: int
    max_passes: int = 16
    step_cells: float = field(default=8000.0, kw_only=True)
    most_cells: int = field(default=1 << 60, kw_only=True)
    _passes: dict[int, int] = field(default_factory=dict, init=False, repr=False)
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
    ) -> RowChanges:
        """Who leaves and who joins before the next step.

        Rows leave if the next step would exceed ``max_cells``, or for a waiting row of higher
        priority. A row joins if the batch is not expected to exceed ``max_cells`` later. If
        none runs, the first that can make a step joins without regard to expectations. At
        most ``max_passes`` + 1 rows are tried in vain.

        Args:
            waiting: rows that join in their order, those that have left before first. Rows
                of higher priority are considered first, whatever their place.
            host_room: KV cells for which there is room in host memory. None: no limit.
        """
        self._ticks = 0
        law = BatchLaw(
            weight_s=self.step_cells,  # the unit of time is that of a cell
            read_s=1.0,
            row_share=0.0,
            padded=True,
            capacity=float(min(self.max_cells, self.most_cells)),
            max_rows=self.max_rows,
            parks=host_room is None or sum(row.length for row in running) <= host_room,
        )
        if law.parks:
            running = [
                _soon_parked(row) if row.number in self._priority else row
                for row in running
            ]
        change = self._begin(running, waiting, law)
        if self._passes:
            # Of rows that wait no more, in their order or by length.
            numbers = {row.number for row in waiting}
            numbers.update(*(level.waiting for level in self._levels.values()))
            for number in self._passes.keys() - numbers:
                del self._passes[number]
        self._let_wait(change)
        for level in self._levels.values():
            for row in level.parked(law, change.batch):
                change.take_out(row)
                level.add_again(row)
        priorities = {row.priority for row in waiting} | self._levels.keys()
        for priority in sorted(priorities, reverse=True):
            self._fill(change, priority)
            level_left = self._levels.get(priority)
            if level_left is not None and level_left.waiting:
                break  # nobody of lower priority passes them
        # A row that was chosen may have left again, or was only asked to leave.
        new = {row.number for row in change.batch} - {row.number for row in running}
        change.chosen = [n for n in dict.fromkeys(change.chosen) if n in new]
        return change

    def _fill(self, found: RowChanges, priority: int) -> None:
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

    def _offer_first(self, found: RowChanges, others: deque[int]) -> bool:
        """Offer the first row of those without a rule. Whether to continue with them."""
        i = others.popleft()
        outcome = self._offer(found, found.waiting[i])
        if outcome is Offer.JOINS:
            found.joining.append(i)
            self._let_wait(found)
        elif outcome is Offer.TOO_LONG:
            found.too_long.append(found.waiting[i].number)
        in_vain = found.in_vain > self.max_passes
        return outcome is not Offer.STAYS_BEHIND and not in_vain

    def _offer_chosen(self, found: RowChanges, level: _Level) -> bool:
        """Offer the row that joins next by its length. Whether to continue with them."""
        row = level.propose(found.law, found.batch) if level.waiting else None
        if row is None:
            return False
        found.passed = [each for each in found.passed if each.number != row.number]
        outcome = self._offer(found, _soon_parked(row) if found.law.parks else row)
        if outcome is Offer.JOINS:
            level.join(row.number)
            found.chosen.append(row.number)
            self._let_wait(found)
            return True
        if outcome is Offer.TOO_LONG:
            self.remove(row.number)
            found.too_long.append(row.number)
            return True
        found.in_vain -= outcome is Offer.IN_VAIN
        old = level.old(found.batch) if level.rule == TREE and found.law.parks else []
        if outcome is Offer.STAYS_BEHIND or not old:
            return False
        longest = max(old, key=lambda each: (each.length, each.number))
        found.take_out(longest)
        level.add_again(longest)
        return True

    def _let_wait(self, found: RowChanges) -> None:
        """Note the rows that have left for others."""
        if self._levels:
            kept = {row.number for row in found.batch}
            for row in found.running:
                level = self._levels.get(self._priority.get(row.number, row.priority))
                if level and row.number in level.running and row.number not in kept:
                    level.add_again(row)

    def _begin(
        self, running: Sequence[Row], waiting: Sequence[Row], law: BatchLaw
    ) -> RowChanges:
        """The batch without the rows that must leave before the next step."""
        change = RowChanges(running, waiting, law, list(running))
        for i in preempted(running, self.max_cells, steps=1):
            change.take_out(running[i])
            if not self._is_too_long(running[i]):
                change.passed.append(running[i])
        return change

    def _offer(self, change: RowChanges, row: Row) -> Offer:
        """Let a waiting row join if it can. Others may leave for it."""
        if any(
            other.priority > row.priority
            or (
                other.priority == row.priority
                and self._passes.get(other.number, 0) >= self.max_passes
            )
            for other in change.passed
        ):
            return Offer.STAYS_BEHIND
        if self._is_too_long(row):
            return Offer.TOO_LONG
        displaced = displaced_by(change.batch, row, self.max_rows, self.max_cells)
        if displaced is None:
            change.passed.append(row)
            change.in_vain += 1
            return Offer.IN_VAIN
        for other in change.passed:
            if other.priority == row.priority:
                self._passes[other.number] = self._passes.get(other.number, 0) + 1
        gone = [change.batch[j] for j in displaced]
        for other in gone:
            change.take_out(other)
        change.passed += gone
        change.batch.append(row)
        return Offer.JOINS

    def _is_too_long(self, row: Row) -> bool:
        return row.length + 1 > self.max_cells


def _soon_parked(row: Row) -> Row:
    """A row as if it ended at the next question: it leaves when the batch grows too large, so it
    need not fit to its end.
    """
    return replace(row, left=min(row.left, CHECK_TICKS))


def _has_fewer(level: _Level, found: RowChanges, priority: int) -> bool:
    """Whether fewer rows of the batch joined by length than others of their priority."""
    here = [row for row in found.batch if row.priority == priority]
    own = sum(row.number in level.running for row in here)
    return 2 * own < len(here)


def _can_join(
    batch: Sequence[Row], newcomer: Row, max_rows: int, max_cells: int
) -> bool:
    if not batch:
        return newcomer.length + 1 <= max_cells
    return len(batch) < max_rows and peak_cells([*batch, newcomer]) <= max_cells


def _without(rows: Sequence[Row], indices: Collection[int]) -> list[Row]:
    gone = set(indices)
    return [row for i, row in enumerate(rows) if i not in gone]


def _least_moved(
    rows: Sequence[Row], movable: Sequence[int], fits: Callable[[list[Row]], bool]
) -> list[int] | None:
    """Indices of ``movable`` rows without which the others fit, or None.

    ``fits`` holds for fewer rows wherever it holds for more. For each width, all longer rows
    leave, and then as many others as necessary: of the lowest priority first, of these the
    shortest. If ``fits`` depends on the number and the width only, one of these is the best.
    """
    if fits(list(rows)):
        return []
    if not fits(_without(rows, movable)):
        return None
    order = sorted(
        movable, key=lambda i: (rows[i].priority, rows[i].length, -rows[i].number)
    )
    priorities = sorted({rows[i].priority for i in movable}, reverse=True)

    def cost(moved: Sequence[int]) -> tuple[int, ...]:
        tokens = dict.fromkeys(priorities, 0)
        for i in moved:
            tokens[rows[i].priority] += rows[i].length
        return (*tokens.values(), len(moved))

    def leaving_at(longer: Sequence[int], others: Sequence[int]) -> list[int]:
        def enough(count: int) -> bool:
            return fits(_without(rows, [*longer, *others[:count]]))

        needed = bisect_left(range(len(others)), True, key=enough)
        return [*longer, *others[:needed]]

    best = order
    for width in sorted({rows[i].length for i in movable}, reverse=True):
        longer = [i for i in order if rows[i].length > width]
        if cost(longer) >= cost(best):
            break
        others = [i for i in order if rows[i].length <= width]
        best = min(best, leaving_at(longer, others), key=cost)
    gone = set(best)
    # Those that could as well stay do, the dearest first.
    for i in sorted(best, key=lambda i: (-rows[i].priority, -rows[i].length)):
        if fits(_without(rows, gone - {i})):
            gone.remove(i)
    return sorted(gone)
