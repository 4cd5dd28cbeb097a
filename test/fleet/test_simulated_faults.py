"""Whole jobs on a simulated fleet, with faults: each line has one answer in the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fleet_parts.simulated_fleet import Outcome, SimulatedPlace, World
from fleet_parts.virtual_time import run_virtually

from sglang_batch.fleet.head_state import MOST_DEATHS

POLICIES = ("dfs", "dual-scan", "auto", "lpt", "fcfs")
LINES = 120


def run(world: World, most_s: float = 3600.0) -> Outcome:
    outcome = run_virtually(world.run(), most_s)
    assert sorted(outcome.answered) == list(range(LINES))
    assert set(outcome.answered.values()) == {1}
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_whatever_dies_each_line_has_one_answer(seed: int) -> None:
    world = World(
        seed,
        faults=seed % 14,
        loss=(0.0, 0.01, 0.05, 0.2)[seed % 4],
        num_workers=1 + seed % 5,
        policy=POLICIES[seed % 5],
        releases=seed % 2 == 1,
    )
    assert not run(world).failed


@pytest.mark.parametrize("seed", range(10))
def test_lines_that_kill_engines_are_found_and_no_others_blamed(seed: int) -> None:
    poison = frozenset({3 * seed, 119 - seed})
    world = World(
        seed, faults=0, poison=poison, policy=POLICIES[seed % 5], heads_die=False
    )
    outcome = run(world)
    assert outcome.failed == poison
    assert outcome.losses <= MOST_DEATHS * len(poison)


def test_without_faults_nothing_is_computed_twice() -> None:
    outcome = run(World(0, faults=0, loss=0.0))
    assert set(outcome.computed.values()) == {1}
    assert outcome.losses == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_workers_end_when_nothing_is_left_for_them(seed: int) -> None:
    kept, released = (
        run(World(seed, faults=0, loss=0.0, num_workers=6, releases=releases))
        for releases in (False, True)
    )
    assert kept.released == 0 and 1 <= released.released <= 5
    assert released.seconds == pytest.approx(kept.seconds, abs=0.5)
    assert released.engine_s < kept.engine_s
    for each in (kept, released):
        assert each.attached_s == pytest.approx(each.engine_s, abs=6 * 0.2)
    assert set(released.computed.values()) == {1} and released.losses == 0


@pytest.mark.slow
def test_between_buckets_all_workers_stay() -> None:
    world = World(
        0, faults=0, loss=0.0, num_workers=6, releases=True, bucket_requests=30
    )
    outcome = run(world)
    assert outcome.released == 0 and world.num_starts == 6


def test_the_last_workers_that_fail_are_replaced_by_released_ones() -> None:
    seconds = [2.5] * (LINES - 1) + [300.0]
    world = World(2, faults=0, loss=0.0, num_workers=3, releases=True, seconds=seconds)

    def fail_for_good(place: SimulatedPlace) -> None:
        if place.is_busy:
            place.broken = True
            place.kill()

    for worker in range(3):
        at(world, 200.0, fail_for_good, worker)
    outcome = run(world)
    assert outcome.heads == 1 and outcome.released == 1
    assert outcome.computed[LINES - 1] == 1


def test_a_network_that_loses_and_doubles_calls_changes_nothing() -> None:
    outcome = run(World(1, faults=0, loss=0.1))
    assert set(outcome.computed.values()) == {1}
    assert outcome.losses == 0


def at(
    world: World, seconds: float, act: Callable[[SimulatedPlace], None], worker: int = 0
) -> None:
    """Do something to a worker, so many seconds after the start."""
    run_as_before = world.run

    async def with_fault() -> Outcome:
        import asyncio

        async def later() -> None:
            await asyncio.sleep(seconds)
            act(world.places[worker])

        world.spawn(later())
        return await run_as_before()

    world.run = with_fault  # type: ignore[method-assign]


def test_a_dead_workers_lines_go_to_those_that_live() -> None:
    world = World(2, faults=0, loss=0.0, num_workers=3)
    world.load_s = 5.0
    at(world, 15.0, lambda place: place.kill())
    outcome = run(world)
    assert outcome.losses == 1
    # What ran in it runs again; what had ended, and was told, does not.
    again = sum(outcome.computed.values()) - LINES
    assert again <= world.rows


def test_a_worker_that_leaves_ends_what_runs_and_gives_back_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(3, faults=0, loss=0.0, num_workers=2)
    at(world, 15.0, lambda place: place.leave())
    outcome = run(world)
    assert "worker 0 leaves: SIGTERM" in caplog.text
    assert "worker 0 is lost: SIGTERM" in caplog.text
    assert set(outcome.computed.values()) == {1}
    assert outcome.losses == 1


@pytest.mark.parametrize("cut_s", [3.0, 10.0, 90.0])
def test_a_cut_network_within_and_beyond_the_lease(cut_s: float) -> None:
    world = World(4, faults=0, loss=0.0, num_workers=2, num_lines=LINES)

    def cut(place: SimulatedPlace) -> None:
        place.cut_until = 15.0 + cut_s

    at(world, 15.0, cut)
    outcome = run(world)
    assert outcome.losses == (0 if cut_s < 8.0 else 1)
    assert outcome.heads == 1


def test_a_new_head_takes_over_engines_that_have_loaded() -> None:
    world = World(5, faults=0, loss=0.0, num_workers=2)
    at(world, 15.0, lambda _: world.kill_head())
    outcome = run(world)
    assert outcome.heads == 2
    # In-flight lines run again, and no model is loaded again.
    assert world.num_starts == 2
    assert sum(outcome.computed.values()) - LINES <= 2 * world.rows


def test_without_an_engine_that_can_start_the_job_fails_with_reasons() -> None:
    world = World(6, faults=0, loss=0.0, num_workers=2, poison=frozenset())
    for place in world.places:
        place.broken = True
    with pytest.raises(AssertionError, match="no engine of the fleet is left"):
        run(world)
