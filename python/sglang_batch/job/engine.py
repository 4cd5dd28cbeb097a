"""The protocol of an inference engine, as a job uses it.

:class:`sglang_batch.srt.engine.sglang_engine.SGLangEngine` implements it with SGLang. Jobs,
servers and their tests run without SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..request import BatchRequestInput, RequestOutput

if TYPE_CHECKING:
    from ..planner.machine_model import Machine
    from ..planner.sharding.speeds import ShardSpeeds
    from ..scheduling.job_plan import JobPlan
    from ..scheduling.running_tree import TreeNow

# SGLang's native endpoint, for frontend programs. Not for batch files.
GENERATE_URL = "/generate"
# The same for a sample of a rollout: at an abort it is answered with its tokens so far.
SAMPLE_URL = "/generate (sample)"
# The path at which an offline server accepts a list of these requests.
WAVE_PATH = "/offline_batch/wave"
# The header of its answer with the number of requests that keeps the engine full.
MAX_INFLIGHT = "x-max-inflight"
# The paths at which an offline server serves the head of a fleet.
WORKER_PATH = "/offline_batch/worker"
# Most nodes of the running tree that are shown of each replica.
MAX_TREE_NODES = 1000


class PreparedRequest(Protocol):
    """A rendered request: its template is applied, and it can be sent to the engine."""

    @property
    def input_ids(self) -> list[int] | None:
        """Token ids of the prompt, or of the first of several, or None unless requested."""
        ...

    @property
    def shareable_len(self) -> int | None:
        """Most tokens of the prompt that may come from the cache, or None for all."""
        ...

    @property
    def has_media(self) -> bool:
        """Whether it has images or the like, so that it is kept on disk."""
        ...

    @property
    def adapter(self) -> str:
        """The LoRA adapter that it runs with, or "" for the model alone."""
        ...

    @property
    def namespace(self) -> str:
        """What tells its KV from that of equal tokens, such as its adapter, or ""."""
        ...

    @property
    def max_new_tokens(self) -> int | None:
        """Most tokens to generate, or None if only the context limits them."""
        ...

    @property
    def ignore_eos(self) -> bool:
        """Whether it generates exactly ``max_new_tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class KvUse:
    """The KV cache of an engine's running requests, summed over its replicas.

    running: number of running requests, including online ones.
    left, right, online: tokens of KV by side, without shared prefixes.
    shared: tokens of the shared prefixes in use.
    capacity: tokens of KV that fit in total.
    """

    running: int
    left: int
    right: int
    online: int
    shared: int
    capacity: int


class ReplicaLost(Exception):
    """A replica ended with a request in flight, which may run on another one.

    is_suspect: whether several replicas crashed that had the request, so that it should run
        again with no other one.
    """

    def __init__(self, reason: str, *, is_suspect: bool = False) -> None:
        super().__init__(reason)
        self.is_suspect = is_suspect


class ReplicaChanges(Protocol):
    """Replicas that come, go and change their speed while jobs run.

    A replica that is gone keeps its number. It may come back, and new ones get the next
    numbers.
    """

    @property
    def speeds(self) -> ShardSpeeds:
        """The speed of each replica now, 0 for one that is gone."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why no replica will run anything any more, or None."""
        ...

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` after each change, until :meth:`unwatch`."""
        ...

    def unwatch(self, on_change: Callable[[], None]) -> None: ...

    def release_idle(self) -> None:
        """All requests are sent: replicas that have none may end, if others have some.

        Only requests that are lost with another replica may be sent after this.
        """
        ...


class Engine(Protocol):
    """Renders requests and executes them. Both calls may run concurrently."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the served model. The first one is used in messages."""
        ...

    @property
    def default_max_inflight(self) -> int:
        """The number of requests that keeps this engine full without a long queue."""
        ...

    @property
    def max_running_requests(self) -> int:
        """Most requests that run at a time, in all replicas together."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether an admin has paused the engine: it answers nothing for now."""
        ...

    @property
    def machine(self) -> Machine:
        """The model's costs on this engine's hardware, for planning."""
        ...

    @property
    def num_replicas(self) -> int:
        """Copies of the model that share the work (data parallel ranks)."""
        ...

    @property
    def replica_changes(self) -> ReplicaChanges | None:
        """Tells when replicas come and go. None: they are always there, and equal."""
        ...

    async def kv_use(self) -> KvUse | None:
        """The present use of the KV cache, or None if the engine does not count by side.

        The call may wait for the engine's current step: use it every few seconds only.
        """
        ...

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        """The prefix trees of the open jobs, of each replica, or None if the engine has
        none.

        The call may wait for the engine's current step.

        Args:
            limit: most nodes of each replica.
        """
        ...

    async def running_s(self) -> dict[str, float]:
        """Seconds since each line's requests began to run, by the id of its first one.

        Lines that only wait are left out. The call may wait for the engine's current
        step.
        """
        ...

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        """Announce a job whose requests will follow, or a new plan for an open job.

        The ids of requests name their job, see ``request.engine_request_id``.

        Args:
            plans: one for each replica: its part of the job.
        """
        ...

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        """Have the replicas tell which requests of a job they run, until it is closed.

        Call this before :meth:`open_job`.

        Args:
            on_joined: called with numbers of requests that have just joined.

        Returns:
            Whether the engine does so.
        """
        ...

    async def set_priority(self, job_id: str, priority: int) -> None:
        """Set the priority of an open job, which is 0 at first.

        Requests of the jobs of highest priority are admitted first. Jobs of the same
        priority share the engine evenly.
        """
        ...

    async def close_job(self, job_id: str) -> None:
        """Close a job: no more of its requests will follow."""
        ...

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        """Render one request.

        Args:
            rid: our id for the request, unique in the engine.
            tokenize: whether to set ``input_ids``, which planning needs.

        Returns:
            The prepared request, or an error answer if it cannot be served.
        """
        ...

    def stored(self, prepared: Any) -> bytes | None:
        """A prepared request without its ``input_ids``, to be kept on disk.

        Returns:
            None where the request can only be prepared again.
        """
        ...

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> PreparedRequest:
        """The prepared request of :meth:`stored`, without template and tokenizer."""
        ...

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        """Run a prepared request to its end. Cancelling the call aborts it.

        Args:
            replica: the replica to run it on. None lets the engine choose.

        Raises:
            ReplicaLost: the replica is gone. Without ``replica``, only for a suspect.
        """
        ...

    def end_early(self, rid: str) -> None:
        """End a sample (:data:`SAMPLE_URL`), which runs or will be executed.

        Its :meth:`execute` returns the tokens so far, or all of them if it has ended
        meanwhile, or if the engine runs every request to its end.

        Args:
            rid: of its first attempt.
        """
        ...


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
