"""Places of a fleet whose workers are in this process."""

from __future__ import annotations

from fake_engine import FakeEngine

from sglang_batch.fleet.places import WorkerPort
from sglang_batch.fleet.worker_host import WorkerHost


class _Port(WorkerPort):
    def __init__(self, host: WorkerHost) -> None:
        self.ask = host.call  # type: ignore[method-assign]


class LocalPlace:
    """A worker with this engine."""

    def __init__(self, name: str, engine: FakeEngine) -> None:
        self.name, self._engine = name, engine

    async def find(self) -> WorkerPort:
        return _Port(WorkerHost(self._engine, self.name, trusts=False))

    async def free(self) -> None:
        pass
