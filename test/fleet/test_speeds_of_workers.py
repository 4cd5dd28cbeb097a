"""Workers are compared by costs of one kind: all by timed steps, or all by datasheets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from builders import make_machine
from fake_engine import FakeEngine
from local_workers import LocalPlace

from sglang_batch.fleet.fleet_engine import FleetEngine
from sglang_batch.fleet.fleet_worker import SentLine
from sglang_batch.planner.machine_model import Machine

DATASHEET = make_machine()


def times(slower: float) -> Machine:
    """A machine whose datasheet says so many times the seconds of the usual one."""
    cost = DATASHEET.cost
    return replace(
        DATASHEET,
        cost=replace(
            cost,
            token_time_s=cost.token_time_s * slower,
            kv_read_time_s=cost.kv_read_time_s * slower,
        ),
    )


def timed(slower: float, of: Machine = DATASHEET) -> Machine:
    """That machine after it has timed its steps."""
    return replace(times(slower), datasheet=of.cost)


async def fleet_of(*machines: Machine) -> FleetEngine:
    engines = [FakeEngine() for _ in machines]
    for engine, machine in zip(engines, machines, strict=True):
        engine.machine = machine
    places = [LocalPlace(f"{i}", engine) for i, engine in enumerate(engines)]
    fleet = FleetEngine(places, epoch=1, min_workers=len(places))
    await fleet.connect()
    return fleet


@pytest.mark.parametrize(
    ("machines", "slowness"),
    [
        # The datasheet of a CPU says a fiftieth of what a small model takes there.
        ((DATASHEET, timed(50.0)), (1.0, 1.0)),
        ((timed(50.0), DATASHEET, timed(40.0)), (1.0, 1.0, 1.0)),
        ((timed(50.0), timed(100.0)), (1.0, 2.0)),
        ((times(3.0), timed(50.0)), (3.0, 1.0)),
        ((times(3.0), timed(50.0, of=times(3.0))), (1.0, 1.0)),
    ],
)
def test_what_was_timed_is_not_compared_with_a_datasheet(
    machines: tuple[Machine, ...], slowness: tuple[float, ...]
) -> None:
    async def run() -> None:
        engine = await fleet_of(*machines)
        try:
            found = engine.speeds.slowness()
            by_name = {
                worker.name: number for number, (worker, _) in enumerate(engine.slots)
            }
            for name, expected in enumerate(slowness):
                slot = by_name[str(name)]
                assert found[:, slot] == pytest.approx(expected)
        finally:
            await engine.close()

    asyncio.run(run())


def test_timed_costs_count_again_once_the_others_have_left() -> None:
    async def run() -> None:
        engine = await fleet_of(DATASHEET, timed(50.0), timed(100.0))
        try:
            untimed, *others = engine
            assert all(worker.by_datasheet for worker in engine)
            for number, worker in enumerate(others):
                worker.lines[f"{number}"] = SentLine("job", number, asyncio.Future())
            assert not untimed.lines
            engine.release_idle()
            assert not any(worker.by_datasheet for worker in engine)
            assert sorted(engine.speeds.slowness()[0])[:2] == [1.0, 2.0]
        finally:
            await engine.close()

    asyncio.run(run())


def test_jobs_are_planned_with_timed_costs_where_one_has_them() -> None:
    async def run() -> None:
        engine = await fleet_of(DATASHEET, timed(50.0))
        try:
            assert engine.machine.cost == timed(50.0).cost
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_measured_rate_in_seconds_of_other_costs_is_forgotten() -> None:
    async def run() -> None:
        engine = await fleet_of(timed(50.0))
        (worker,) = engine
        worker.meter.rate = 1.0
        worker.compare(by_datasheet=False)
        assert worker.meter.rate == 1.0
        worker.compare(by_datasheet=True)
        assert worker.meter.rate is None
        assert worker.cost == DATASHEET.cost
        await engine.close()

    asyncio.run(run())
