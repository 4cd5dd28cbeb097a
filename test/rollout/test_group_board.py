"""Which samples run, which are aborted, and when a group is over: without an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.rollout.rollout_call import GroupBoard, GroupEnd, SampleEnd

FINISHED, ABORTED, FAILED = SampleEnd


def test_a_group_ends_with_its_kth_finished_sample() -> None:
    board = GroupBoard([4, 4], [2, 2], enough=2)
    assert board.ended(0, FINISHED) == []
    assert board.ended(3, FINISHED) == [1, 2]
    assert [board.is_wanted(number) for number in (1, 2, 4)] == [False, False, True]
    assert board.pop_over() == []
    assert board.ended(1, ABORTED) == []  # as we asked: nothing else stops
    assert board.ended(2, FINISHED) == []  # it was faster than its abort
    assert board.pop_over() == [0]
    assert board.end_of(0) is GroupEnd.COMPLETE
    assert board.is_wanted(4)


def test_all_else_stops_once_enough_groups_are_complete() -> None:
    board = GroupBoard([2, 2, 2], [1, 1, 1], enough=2)
    assert board.ended(5, FINISHED) == [4]
    assert board.ended(0, FINISHED) == [1, 2, 3]
    assert board.is_stopped and not board.is_wanted(2)
    for number in (1, 2, 3, 4):
        assert board.ended(number, ABORTED) == []
    assert board.pop_over() == [0, 1, 2]
    assert [board.end_of(i) for i in range(3)] == ["complete", "aborted", "complete"]


def test_an_abort_of_somebody_else_stops_the_call() -> None:
    board = GroupBoard([2, 1], [2, 1], enough=2)
    assert board.ended(1, ABORTED) == [0, 2]
    assert board.stop() == []


def test_a_failed_sample_stops_nothing() -> None:
    board = GroupBoard([3, 1], [2, 1], enough=2)
    assert board.ended(0, FAILED) == board.ended(1, FAILED) == []
    assert board.is_wanted(2)
    assert board.ended(2, FINISHED) == []
    assert (board.pop_over(), board.end_of(0)) == ([0], GroupEnd.FAILED)
    assert board.is_wanted(3)


@given(st.data())
def test_whatever_happens_every_group_is_over_once_and_nothing_is_aborted_twice(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    finished = [data.draw(st.integers(1, n)) for n in sizes]
    enough = data.draw(st.integers(1, len(sizes)))
    board = GroupBoard(sizes, finished, enough)
    running, aborting = set(range(sum(sizes))), set[int]()
    over: list[int] = []
    num_finished = [0] * len(sizes)
    while running:
        number = data.draw(st.sampled_from(sorted(running)))
        how = data.draw(st.sampled_from(SampleEnd))
        wanted = board.is_wanted(number)
        assert wanted == (number not in aborting)
        running.remove(number)
        unwanted = board.ended(number, how)
        assert len(set(unwanted)) == len(unwanted)
        assert not set(unwanted) & aborting and set(unwanted) <= running
        aborting |= set(unwanted)
        num_finished[board.place(number)[0]] += how is FINISHED
        over += board.pop_over()
    assert sorted(over) == list(range(len(sizes)))
    for group, (count, k) in enumerate(zip(num_finished, finished, strict=True)):
        assert (board.end_of(group) is GroupEnd.COMPLETE) == (count >= k)
