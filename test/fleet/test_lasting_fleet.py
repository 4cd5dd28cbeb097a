"""A fleet that does not give up looks for its workers as long as it is there."""

from __future__ import annotations

import asyncio

import pytest

from sglang_batch.errors import EngineError
from sglang_batch.fleet import fleet_workers
from sglang_batch.fleet.fleet_engine import FleetEngine
from sglang_batch.fleet.fleet_workers import MOST_FAILURES
from sglang_batch.fleet.places import WorkerLost, WorkerPort


class CrashingPlace:
    """A place whose worker never starts."""

    def __init__(self, enough: int) -> None:
        self.name = "crashing"
        self.num_tries = 0
        self.tried = asyncio.Event()
        self._enough = enough

    async def find(self) -> WorkerPort:
        self.num_tries += 1
        if self.num_tries == self._enough:
            self.tried.set()
        raise WorkerLost("it crashed", crashed=True)

    async def free(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_workers, "_MOST_BACK_OFF_S", 0.0)


async def _keep_trying(num_tries: int) -> None:
    place = CrashingPlace(num_tries)
    engine = FleetEngine([place], epoch=1, gives_up=False)
    connecting = asyncio.create_task(engine.connect())
    async with asyncio.timeout(20):
        await place.tried.wait()
    (state,) = engine.states()
    assert not connecting.done() and engine.failure is None
    assert state.status in ("starting", "lost")
    assert state.reason == "it crashed" and state.losses >= num_tries - 1
    connecting.cancel()
    await asyncio.wait({connecting})
    await engine.close()


def test_a_worker_is_looked_for_however_often_it_crashes() -> None:
    # So often that an unbounded power of two would be no number of seconds.
    asyncio.run(_keep_trying(1100))


async def _give_up() -> None:
    place = CrashingPlace(MOST_FAILURES)
    engine = FleetEngine([place], epoch=1)
    with pytest.raises(EngineError, match="no engine of the fleet"):
        await engine.connect()
    assert place.num_tries == MOST_FAILURES
    assert [state.status for state in engine.states()] == ["left out"]


def test_otherwise_it_is_left_out() -> None:
    asyncio.run(_give_up())
