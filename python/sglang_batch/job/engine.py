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

    @property
    def shareable_len(self) -> int | None:
        """Most tokens of the prompt that may come from the cache, or None for all."""

    @property
    def has_media(self) -> bool:
        """Whether it has images or the like, so that it is kept on disk."""

    @property
    def adapter(self) -> str:
        """The LoRA adapter that it runs with, or "" for the model alone."""

    @property
    def namespace(self) -> str:
        """What tells its KV from that of equal tokens, such as its adapter, or ""."""

    @property
    def max_new_tokens(self) -> int | None:
        """Most tokens to generate, or None if only the context limits them."""

    @property
    def ignore_eos(self) -> bool:
        """Whether it generates exactly ``max_new_tokens``."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """The KV cache of an engine's running requests, summed over its replicas: their number,
    tokens of KV by side without shared prefixes, those of shared prefixes, and tokens that
    fit in total."""

    running: int
    left: int
    right: int
    online: int
    shared: int
    capacity: int


class ReplicaLost(Exception):
    """A replica ended with a request in flight, which may run on another one: with no other request
    if ``is_suspect``, as several replicas crashed that had it."""

    def __init__(self, reason: str, *, is_suspect: bool = False) -> None:
        super().__init__(reason)
        self.is_suspect = is_suspect


class ReplicaChanges(Protocol):
    """Replicas that come, go and change their speed while jobs run. One that is gone keeps its
    number. It may come back, and new ones get the next numbers."""

    @property
    def speeds(self) -> ShardSpeeds:
        """The speed of each replica now, 0 for one that is gone."""

    @property
    def failure(self) -> Exception | None:
        """Why no replica will run anything any more, or None."""

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` after each change, until :meth:`unwatch`."""

    def unwatch(self, on_change: Callable[[], None]) -> None: ...

    def release_idle(self) -> None:
        """All requests are sent, but for those that are lost with another replica: replicas
        that have none may end, if others have some."""


class Engine(Protocol):
    """Renders requests and executes them. Both calls may run concurrently."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the served model. The first one is used in messages."""

    @property
    def default_max_inflight(self) -> int:
        """The number of requests that keeps this engine full without a long queue."""

    @property
    def max_running_requests(self) -> int:
        """Most requests that run at a time, in all replicas together."""

    @property
    def is_paused(self) -> bool:
        """Whether an admin has paused the engine: it answers nothing for now."""

    @property
    def machine(self) -> Machine:
        """The model's costs on this engine's hardware, for planning."""

    @property
    def num_replicas(self) -> int:
        """Copies of the model that share the work (data parallel ranks)."""

    @property
    def replica_changes(self) -> ReplicaChanges | None:
        """Tells when replicas come and go. None: they are always there, and equal."""

    async def kv_use(self) -> KvUse | None:
        """The present use of the KV cache, or None if the engine does not count by side. It
        may wait for the engine's current step: use it every few seconds only."""

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        """The prefix trees of the open jobs, at most ``limit`` nodes of each replica, or
        None if the engine has none. It may wait for the engine's current step."""

    async def running_s(self) -> dict[str, float]:
        """Seconds since each line's requests began to run, by the id of its first one,
        without lines that only wait. It may wait for the engine's current step."""

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        """Announce a job whose requests will follow, or a new plan for an open job: a part for each
        replica. The ids of requests name their job, see ``request.engine_request_id``."""

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        """Have ``on_joined`` called with the numbers of requests of a job that have just
        joined, until it is closed. Call this before :meth:`open_job`. Returns whether the
        engine does so."""

    async def set_priority(self, job_id: str, priority: int) -> None:
        """Set the priority of an open job, which is 0 at first. Requests of the highest are
        admitted first, and jobs of the same priority share the engine evenly."""

    async def close_job(self, job_id: str) -> None:
        """Close a job: no more of its requests will follow."""

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        """Render one request, or return an error answer if it cannot be served.

        Args:
            rid: our id for the request, unique in the engine.
            tokenize: whether to set ``input_ids``, which planning needs.
        """

    def stored(self, prepared: Any) -> bytes | None:
        """A prepared request without its ``input_ids``, to be kept on disk. None where the
        request can only be prepared again."""

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> PreparedRequest:
        """The prepared request of :meth:`stored`, without template and tokenizer."""

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        """Run a prepared request to its end. Cancelling the call aborts it.

        Args:
            replica: the replica to run it on. None lets the engine choose.

        Raises:
            ReplicaLost: the replica is gone. Without ``replica``, only for a suspect.
        """

    def end_early(self, rid: str) -> None:
        """End a sample (:data:`SAMPLE_URL`) by the id of its first attempt. Its
        :meth:`execute` returns the tokens so far, or all if it has ended, or if the engine
        runs every request to its end."""


# A base of classes that have all attributes of another object, for type checkers.
Forwards: Any = object


class ForwardingEngine(Forwards):  # type: ignore[misc]
    """An :class:`Engine` in front of another one, which has all that it does not define."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
