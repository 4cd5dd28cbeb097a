"""Rows of a dense batch that join by their length: who runs, who waits, and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.dense.admission import (
    MAX_TICKS,
    Admission,
    ByLength,
    Row,
    expected_left,
)
from sglang_batch.planner.kv_lengths.batch_state import CHECK_TICKS, GROUPS, TREE

RULES = pytest.mark.parametrize("rule", [TREE, GROUPS], ids=["tree", "groups"])


def admission(max_rows: int = 8, max_cells: int = 1000) -> Admission:
    return Admission(max_rows, max_cells, step_cells=100.0, most_cells=1000)


@dataclass(eq=False)
class Request:
    """tokens: of its answer, not known to those who decide."""

    number: int
    rule: int
    prompt: int
    tokens: int
    expected: int
    priority: int = 0
    arrives: int = 0
    family: int = -1
    aborted: int | None = None
    max_ticks: int = MAX_TICKS
    so_far: int = 0
    ended: int | None = None

    @property
    def row(self) -> Row:
        left = expected_left(self.expected, self.so_far, 10**9)
        return Row(self.prompt + self.so_far, left, self.priority, self.number)

    @property
    def place(self) -> ByLength | None:
        if not self.rule:
            return None
        return ByLength(self.rule, self.prompt, self.family, self.max_ticks)


@dataclass
class Simulation:
    """Runs requests step by step and checks what must hold at each one."""

    admission: Admission
    requests: list[Request]
    host_room: int | None = None
    step: int = 0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)
    moves: int = 0

    def run(self) -> None:
        """Until all have ended or were refused."""
        most = 50 + 20 * sum(each.tokens + each.arrives for each in self.requests)
        while any(each.ended is None for each in self.requests):
            self.one_step()
            assert self.step < most, "somebody waits forever"

    def one_step(self) -> None:
        for each in self.requests:
            if each.arrives == self.step:
                self.waiting.append(each)
                self.tell(each)
            if each.aborted == self.step:
                self.end(each)
        self.change()
        # Rows that have grown too long while they ran are refused by the next question.
        most = self.admission.max_cells
        fitting = [each for each in self.waiting if each.row.length < most]
        assert self.running or not fitting, "nobody runs"
        self.check_limits()
        self.admission.tick()
        self.step += 1
        for each in list(self.running):
            each.so_far += 1
            if each.so_far == each.tokens:
                self.end(each)

    def tell(self, request: Request) -> None:
        if request.place is not None:
            self.admission.add(request.row, request.place)

    def end(self, request: Request) -> None:
        request.ended = self.step
        self.admission.remove(request.number)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def change(self) -> None:
        plain = [each for each in self.waiting if each.place is None]
        plain.sort(key=lambda each: (not each.so_far, each.number))
        rows = [each.row for each in plain]
        changes = self.admission.changes(
            [each.row for each in self.running], rows, self.host_room
        )
        by_number = {each.number: each for each in self.waiting}
        chosen = [by_number[number] for number in changes.chosen]
        joining = chosen + [plain[i] for i in changes.joining]
        leaving = [self.running[i] for i in changes.leaving]
        by_number |= {each.number: each for each in leaving}  # some are too long by now
        too_long = [by_number[number] for number in changes.too_long]
        assert all(each.place is not None for each in chosen)
        assert not {*joining} & {*too_long}
        assert len({*joining}) == len(joining)
        self.check_priorities(joining, too_long)
        self.running = [each for each in self.running if each not in leaving]
        self.running += joining
        self.waiting = [each for each in self.waiting if each not in joining]
        self.waiting += leaving
        self.moves += len(leaving)
        for each in leaving:
            self.tell(each)
        for each in too_long:
            assert each.row.length + 1 > self.admission.max_cells
            self.refused.append(each)
            self.end(each)

    def check_priorities(
        self, joining: Sequence[Request], refused: Sequence[Request]
    ) -> None:
        """Nobody joins while one of higher priority has to wait."""
        others = [
            each for each in self.waiting if each not in joining and each not in refused
        ]
        for each in joining:
            assert all(other.priority <= each.priority for other in others)

    def check_limits(self) -> None:
        rows = [each.row.length for each in self.running]
        assert len(rows) <= self.admission.max_rows
        assert len(rows) * (max(rows, default=0) + 1) <= self.admission.max_cells


@st.composite
def jobs(draw: st.DrawFn) -> list[Request]:
    """Requests of both rules and of none, of three priorities."""
    shapes = st.tuples(
        st.sampled_from([0, TREE, GROUPS, GROUPS]),  # rule
        st.integers(1, 60),  # prompt
        st.integers(1, 40),  # answer
        st.integers(1, 40),  # as expected
        st.sampled_from([0, 0, 0, 1, 2]),  # priority
        st.integers(0, 30),  # arrives
    )
    drawn = draw(st.lists(shapes, min_size=1, max_size=40))
    found = [Request(number, *shape) for number, shape in enumerate(drawn)]
    for each in found:
        if draw(st.integers(0, 9)) == 0:
            each.aborted = each.arrives + draw(st.integers(1, 20))
        if draw(st.integers(0, 3)) == 0:
            each.family = draw(st.integers(0, 2))
    return found


class TestSimulated:
    @settings(max_examples=examples(500), deadline=None)
    @given(jobs(), st.integers(1, 8), st.integers(20, 400), st.sampled_from([None, 90]))
    def test_limits_hold_priorities_come_first_and_all_end(
        self,
        requests: list[Request],
        max_rows: int,
        max_cells: int,
        host_room: int | None,
    ) -> None:
        run = Simulation(admission(max_rows, max_cells), requests, host_room)
        run.run()
        for each in requests:
            long = each.prompt + each.tokens > max_cells
            assert each.so_far == each.tokens or long or each.aborted is not None
        # Nothing of them is left.
        assert not run.admission._levels
        assert not run.admission._priority
        assert not run.admission.is_due

    @pytest.mark.slow
    @RULES
    def test_a_wave_of_others_holds_nobody_up_for_ever(self, rule: int) -> None:
        # A request that no batch would take, and new ones in every step.
        lonely = Request(0, rule, 300, 5, 5, max_ticks=60)
        others = [
            Request(number, rule, 5, 6, 6, arrives=number // 3, max_ticks=60)
            for number in range(1, 900)
        ]
        run = Simulation(admission(4, 400), [lonely, *others])
        run.run()
        assert lonely.ended is not None
        assert lonely.ended < 130

    def test_many_more_than_there_were_slots_for(self) -> None:
        requests = [
            Request(n, GROUPS, 1 + n * 7 % 90, 1 + n % 5, 3, arrives=n // 50)
            for n in range(500)
        ]
        run = Simulation(admission(16, 1000), requests)
        run.run()
        assert all(each.so_far == each.tokens for each in requests)


class TestTogether:
    @RULES
    def test_rows_of_similar_length_join(self, rule: int) -> None:
        found = admission(4, 400)
        lengths = [10, 80, 11, 82, 12, 81, 13, 83]
        for number, length in enumerate(lengths):
            found.add(Row(length, 5, 0, number), ByLength(rule, length))
        chosen = found.changes([], []).chosen
        assert {lengths[number] for number in chosen} == {10, 11, 12, 13}

    def test_a_family_joins_together(self) -> None:
        found = admission(4, 400)
        for number in range(8):
            family = number % 2
            found.add(Row(20, 5, 0, number), ByLength(GROUPS, 20 + family, family))
        assert {number % 2 for number in found.changes([], []).chosen} == {0}

    def test_those_with_a_rule_and_those_without_have_half_of_the_rows(self) -> None:
        found = admission(6, 1000)
        for number in range(8):
            found.add(Row(10, 5, 0, number), ByLength(GROUPS, 10))
        others = [Row(10, 5, 0, number) for number in range(8, 16)]
        changes = found.changes([], others)
        assert len(changes.chosen) == len(changes.joining) == 3

    @RULES
    def test_rows_of_a_higher_priority_displace_them(self, rule: int) -> None:
        found = admission(2, 1000)
        rows = [Row(10, 5, 0, number) for number in range(2)]
        for row in rows:
            found.add(row, ByLength(rule, 10))
        assert len(found.changes([], []).chosen) == 2
        changes = found.changes(rows, [Row(50, 5, 1, 9)])
        assert changes.joining == [0]
        assert len(changes.leaving) == 1
        (left,) = (rows[i] for i in changes.leaving)
        stays = next(row for row in rows if row is not left)
        # It comes back when there is room.
        assert not found.changes([stays, Row(50, 5, 1, 9)], []).chosen
        found.remove(stays.number)
        assert found.changes([Row(50, 5, 1, 9)], []).chosen == [left.number]

    def test_a_row_that_runs_may_get_another_priority(self) -> None:
        found = admission(1, 1000)
        place = ByLength(GROUPS, 10)
        for number in range(2):
            found.add(Row(10, 5, 1, number), place)
        (first,) = found.changes([], []).chosen
        lower = Row(10, 5, 0, first)
        found.runs(lower, place)
        changes = found.changes([lower], [])
        assert changes.leaving == [0]
        assert changes.chosen == [1 - first]


class TestParking:
    def long_beside_short(self) -> tuple[Admission, list[Row]]:
        """A long row and a short one run, and 40 short ones wait."""
        found = admission(8, 1000)
        rows = [Row(400, 500, 0, 0), Row(10, 50, 0, 1)]
        for row in rows:
            found.runs(row, ByLength(GROUPS, row.length))
        for number in range(2, 42):
            found.add(Row(26, 5, 0, number), ByLength(GROUPS, 26))
        for _ in range(CHECK_TICKS):
            found.tick()
        grown = [Row(r.length + CHECK_TICKS, 30, 0, r.number) for r in rows]
        return found, grown

    def test_a_long_row_makes_room_for_many_short_ones(self) -> None:
        found, rows = self.long_beside_short()
        assert found.is_due
        changes = found.changes(rows, [])
        assert changes.leaving == [0]
        assert len(changes.chosen) == 7
        assert not {0, 1} & {*changes.chosen}

    def test_not_if_the_host_has_no_room_for_it(self) -> None:
        found, rows = self.long_beside_short()
        changes = found.changes(rows, [], 441)
        assert changes.leaving == []

    def test_rows_of_the_old_batch_leave_for_those_of_the_next(self) -> None:
        found = admission(40, 1000)
        old = [Row(30, 500, 0, number) for number in range(3)]
        for row in old:
            found.add(row, ByLength(TREE, row.length))
        assert len(found.changes([], []).chosen) == 3
        for number in range(3, 40):
            found.add(Row(70, 9, 0, number), ByLength(TREE, 70))
        found.tick()
        changes = found.changes(old, [])
        assert changes.leaving
        assert len(changes.chosen) > len(changes.leaving)

    def test_who_is_chosen_again_stays(self) -> None:
        """No KV moves to the host and back in one step."""
        found = admission(4, 1000)
        rows = [Row(10 + number, 50, 0, number) for number in range(2)]
        for row in rows:
            found.add(row, ByLength(GROUPS, row.length))
        assert len(found.changes([], []).chosen) == 2
        grown = [Row(row.length + 20, 30, 0, row.number) for row in rows]
        for number in range(2, 8):
            found.add(Row(28, 9, 0, number), ByLength(GROUPS, 28))
        for _ in range(CHECK_TICKS):
            found.tick()
        changes = found.changes(grown, [])
        assert not {*changes.chosen} & {0, 1}
        running = 2 - len(changes.leaving) + len(changes.chosen)
        assert running == 4


class TestTold:
    def test_unknown_rows_may_be_removed(self) -> None:
        found = admission()
        found.remove(5)
        assert not found.is_due

    def test_it_is_due_after_some_steps_and_only_while_rows_wait(self) -> None:
        found = admission(1)
        for number in range(2):
            found.add(Row(10, 5, 0, number), ByLength(GROUPS, 10))
        (first,) = found.changes([], []).chosen
        assert not found.is_due
        for _ in range(CHECK_TICKS):
            found.tick()
        assert found.is_due
        found.changes([Row(26, 5, 0, first)], [])
        assert not found.is_due
        found.remove(1 - first)
        for _ in range(CHECK_TICKS):
            found.tick()
        assert not found.is_due

    def test_a_row_that_is_too_long_no_longer_waits(self) -> None:
        found = admission(4, 50)
        found.add(Row(50, 5, 0, 0), ByLength(GROUPS, 50))
        found.add(Row(49, 5, 0, 1), ByLength(GROUPS, 49))
        # Nobody has looked at it while others join.
        assert found.changes([], []).chosen == [1]
        found.remove(1)
        assert found.changes([], []).too_long == [0]
        assert not found.changes([], []).too_long

    def test_the_rows_that_outlive_their_estimate_are_told_again(self) -> None:
        found = admission(4, 100)
        place = ByLength(GROUPS, 10)
        found.add(Row(10, 5, 0, 0), place)
        found.add(Row(10, 5, 0, 0), place)
        found.add(Row(10, 50, 0, 0), place)
        assert found.changes([], []).chosen == [0]
