"""Which rows of a dense batch join, and which leave for a while.

A dense batch takes rows x width cells of KV, where width is the length of the longest row:
all rows end at one column, and shorter ones have dead cells in front. Each step makes every
row one cell longer. Rows may be preempted, and the batch may change its size from step to
step, as in Baton, section 4.3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto


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

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(
                f"a row has a length of 1 or more, not {self.length}: prefill it first"
            )
        if self.left < 1:
            raise ValueError(
                f"a row has 1 or more steps left, not {self.left}; see expected_left()"
            )


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What changes before the next step.

    leaving: indices of running rows whose KV goes to the host.
    joining: indices of waiting rows, in the order in which they join.
    too_long: indices of waiting rows that cannot make a step even alone, up to the last one
        that was considered. They wait until the limit is higher, or can be refused.
    """

    leaving: Sequence[int]
    joining: Sequence[int]
    too_long: Sequence[int]


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
    choice = _least_moved(
        running,
        range(len(running)),
        lambda kept: cells(kept, steps) <= max_cells,
    )
    if choice is None:
        raise ValueError(
            f"the limit is {max_cells} cells, and must be 0 or more: even with no row "
            "it is exceeded"
        )
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


@dataclass(slots=True)
class BatchChange:
    """The batch while it is decided who leaves and who joins.

    batch: the rows so far.
    passed: rows that wait, which later ones would pass.
    in_vain: rows that were offered and did not fit.
    """

    batch: list[Row]
    passed: list[Row] = field(default_factory=list)
    in_vain: int = 0

    def take_out(self, row: Row) -> None:
        """A row leaves the batch."""
        self.batch = [other for other in self.batch if other.number != row.number]

    def leaving(self, running: Sequence[Row]) -> list[int]:
        """Indices of running rows that are not in the batch any more."""
        kept = {row.number for row in self.batch}
        return [i for i, row in enumerate(running) if row.number not in kept]


@dataclass(slots=True)
class Admission:
    """Chooses who runs. The limits may be changed between any two calls.

    max_rows: most rows of the batch, at least 1. If it is lowered, none joins until enough
        have ended.
    max_cells: most cells of the batch.
    max_passes: rows of its own priority behind a waiting row that may pass it. 0 keeps to the
        order. Rows of lower priority never pass, and those of higher ones are not counted.
    """

    max_rows: int
    max_cells: int
    max_passes: int = 16
    _passes: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"max_rows is {self.max_rows}, and must be 1 or more")
        if self.max_cells < 0:
            raise ValueError(f"max_cells is {self.max_cells}, and must be 0 or more")
        if self.max_passes < 0:
            raise ValueError(f"max_passes is {self.max_passes}, and must be 0 or more")

    def changes(self, running: Sequence[Row], waiting: Sequence[Row]) -> RowChanges:
        """Who leaves and who joins before the next step.

        Rows leave if the next step would exceed ``max_cells``, or for a waiting row of higher
        priority. A row joins if the batch is not expected to exceed ``max_cells`` later. If none
        runs, the first that can make a step joins without regard to expectations. At most
        ``max_passes`` + 1 rows are tried in vain.

        Args:
            waiting: in their order, rows that have left before first. Rows of higher priority
                are considered first, whatever their place.
        """
        change = self.begin(running)
        self._forget_except(waiting)
        joining: list[int] = []
        too_long: list[int] = []
        for i in sorted(range(len(waiting)), key=lambda i: -waiting[i].priority):
            outcome = self.offer(change, waiting[i])
            if outcome is Offer.JOINS:
                joining.append(i)
            elif outcome is Offer.TOO_LONG:
                too_long.append(i)
            if outcome is Offer.STAYS_BEHIND or change.in_vain > self.max_passes:
                break
        return RowChanges(change.leaving(running), joining, too_long)

    def begin(self, running: Sequence[Row]) -> BatchChange:
        """The batch without the rows that must leave before the next step."""
        change = BatchChange(list(running))
        for i in preempted(running, self.max_cells, steps=1):
            change.take_out(running[i])
            if not self._is_too_long(running[i]):
                change.passed.append(running[i])
        return change

    def offer(self, change: BatchChange, row: Row) -> Offer:
        """Let a waiting row join if it can. Others may leave for it."""
        if self._must_stay_behind(row, change.passed):
            return Offer.STAYS_BEHIND
        if self._is_too_long(row):
            return Offer.TOO_LONG
        displaced = displaced_by(change.batch, row, self.max_rows, self.max_cells)
        if displaced is None:
            change.passed.append(row)
            change.in_vain += 1
            return Offer.IN_VAIN
        self._count_pass(row, change.passed)
        gone = [change.batch[j] for j in displaced]
        for other in gone:
            change.take_out(other)
        change.passed += gone
        change.batch.append(row)
        return Offer.JOINS

    def _is_too_long(self, row: Row) -> bool:
        return row.length + 1 > self.max_cells

    def _must_stay_behind(self, row: Row, passed: Sequence[Row]) -> bool:
        return any(
            other.priority > row.priority
            or (
                other.priority == row.priority
                and self._passes.get(other.number, 0) >= self.max_passes
            )
            for other in passed
        )

    def _count_pass(self, row: Row, passed: Sequence[Row]) -> None:
        for other in passed:
            if other.priority == row.priority:
                self._passes[other.number] = self._passes.get(other.number, 0) + 1

    def _forget_except(self, waiting: Sequence[Row]) -> None:
        if self._passes:
            numbers = {row.number for row in waiting}
            for number in self._passes.keys() - numbers:
                del self._passes[number]


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
    rows: Sequence[Row],
    movable: Sequence[int],
    fits: Callable[[list[Row]], bool],
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
    return _none_in_vain(rows, best, fits)


def _none_in_vain(
    rows: Sequence[Row], moved: Sequence[int], fits: Callable[[list[Row]], bool]
) -> list[int]:
    """``moved`` without those that could as well stay, the dearest first."""
    gone = set(moved)
    for i in sorted(moved, key=lambda i: (-rows[i].priority, -rows[i].length)):
        if fits(_without(rows, gone - {i})):
            gone.remove(i)
    return sorted(gone)
