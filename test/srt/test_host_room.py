"""Pages of the host pool: who gets them, and who is computed again when they are gone."""

from __future__ import annotations

from random import Random

import pytest

from sglang_batch.scheduling.job_plan import StepCost
from sglang_batch.srt.scheduler.kv.host_pool import HostRoom, recompute_time_s


def test_there_is_room_until_the_pool_is_full() -> None:
    room = HostRoom(4)
    assert room.to_recompute(4, 1.0) == []
    assert room.take("a", 3, 1.0) == [(0, 3)]
    assert room.num_free == 1
    assert room.to_recompute(1, 0.0) == []


def test_the_cheapest_are_computed_again() -> None:
    room = HostRoom(6)
    for rid, pages, cost in (("a", 2, 5.0), ("b", 2, 1.0), ("c", 2, 2.0)):
        room.take(rid, pages, cost)
    assert room.to_recompute(1, 9.0) == ["b"]
    assert room.to_recompute(3, 9.0) == ["b", "c"]
    assert room.num_free == 0
    room.give_back("b")
    assert room.take("d", 2, 9.0) == [(2, 2)]


def test_the_new_one_is_computed_again_if_that_costs_no_more() -> None:
    room = HostRoom(4)
    room.take("a", 2, 3.0)
    room.take("b", 2, 4.0)
    assert room.to_recompute(2, 3.0) is None
    assert room.to_recompute(2, 3.1) == ["a"]
    # Both would have to go, which costs 7 seconds in all.
    assert room.to_recompute(3, 6.9) is None
    assert room.to_recompute(3, 7.1) == ["a", "b"]


def test_a_request_larger_than_the_pool_is_computed_again() -> None:
    room = HostRoom(4)
    room.take("a", 2, 0.1)
    assert room.to_recompute(5, 99.0) is None
    assert HostRoom(0).to_recompute(1, 99.0) is None
    assert room.to_recompute(4, 99.0) == ["a"]


def test_among_equals_the_last_one_goes_first() -> None:
    room = HostRoom(3)
    for rid in ("a", "b", "c"):
        room.take(rid, 1, 1.0)
    room.give_back("a")
    room.take("a", 1, 1.0)
    assert room.to_recompute(1, 5.0) == ["a"]
    assert room.to_recompute(2, 5.0) == ["a", "c"]


def test_pages_are_in_one_run_where_one_is_long_enough() -> None:
    room = HostRoom(10)
    for rid, pages in (("a", 2), ("b", 1), ("c", 4), ("d", 3)):
        room.take(rid, pages, 1.0)
    room.give_back("a")
    room.give_back("c")
    assert room.take("e", 2, 1.0) == [(0, 2)]  # the tightest fit
    room.give_back("e")
    assert room.take("f", 5, 1.0) == [(3, 4), (0, 1)]
    assert room.num_free == 1
    with pytest.raises(ValueError, match="1 of 10 are free"):
        room.take("g", 2, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_every_page_has_one_owner_and_all_come_back(seed: int) -> None:
    rng = Random(seed)
    room, held = HostRoom(50), dict[str, tuple[set[int], float]]()
    for number in range(600):
        if held and rng.random() < 0.4:
            rid = rng.choice(sorted(held))
            room.give_back(rid)
            del held[rid]
        rid, pages, cost = str(number), rng.randint(1, 20), rng.randint(1, 9) / 4
        out = room.to_recompute(pages, cost)
        if out is None:
            continue
        # Those that go are the cheapest, and none of them goes in vain.
        left = [held[each][1] for each in held if each not in out]
        assert max((held[each][1] for each in out), default=0) <= min(left, default=9)
        freed = [len(held[each][0]) for each in out]
        assert not out or room.num_free + sum(freed[:-1]) < pages
        assert not out or sum(held[each][1] for each in out) < cost
        for each in out:
            room.give_back(each)
            del held[each]
        runs = room.take(rid, pages, cost)
        owned = {
            page for first, length in runs for page in range(first, first + length)
        }
        assert len(owned) == pages
        assert owned <= set(range(50))
        assert not any(owned & others for others, _ in held.values())
        held[rid] = (owned, cost)
        assert room.num_free == 50 - sum(len(each) for each, _ in held.values())
    for rid in held:
        room.give_back(rid)
    assert room.take("all", 50, 1.0) == [(0, 50)]


def test_attention_makes_tokens_behind_a_long_prefix_dearer() -> None:
    cost = StepCost(2.0, 0.5, 0.0, 0.0)
    assert recompute_time_s(cost, 3, 0) == 3 * 2.0 + 9 * 0.5
    whole = recompute_time_s(cost, 10, 0)
    assert recompute_time_s(cost, 7, 0) + recompute_time_s(cost, 3, 7) == whole
