"""An engine that passes every call on, to be changed in parts by its subclasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..planner.machine_model import Machine
from ..request import BatchRequestInput, RequestOutput
from ..scheduling.job_plan import JobPlan
from ..scheduling.running_tree import TreeNow
from .engine import Engine, KvUse, PreparedRequest, ReplicaChanges


class ForwardingEngine:
    """An :class:`~sglang_batch.job.engine.Engine` in front of another one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._engine.model_names

    @property
    def is_paused(self) -> bool:
        return self._engine.is_paused

    @property
    def default_max_inflight(self) -> int:
        return self._engine.default_max_inflight

    @property
    def max_running_requests(self) -> int:
        return self._engine.max_running_requests

    @property
    def machine(self) -> Machine:
        return self._engine.machine

    @property
    def num_replicas(self) -> int:
        return self._engine.num_replicas

    @property
    def replica_changes(self) -> ReplicaChanges | None:
        return self._engine.replica_changes

    async def kv_use(self) -> KvUse | None:
        return await self._engine.kv_use()

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        return await self._engine.running_tree(limit)

    async def running_s(self) -> dict[str, float]:
        return await self._engine.running_s()

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        await self._engine.open_job(job_id, plans)

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        return self._engine.watch_job(job_id, on_joined)

    async def set_priority(self, job_id: str, priority: int) -> None:
        await self._engine.set_priority(job_id, priority)

    async def close_job(self, job_id: str) -> None:
        await self._engine.close_job(job_id)

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        return await self._engine.prepare(request, rid, tokenize=tokenize)

    def stored(self, prepared: Any) -> bytes | None:
        return self._engine.stored(prepared)

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> PreparedRequest:
        return self._engine.restore(request, rid, stored, input_ids)

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        return await self._engine.execute(prepared, replica=replica)

    def end_early(self, rid: str) -> None:
        self._engine.end_early(rid)
