"""The narrow face of an inference engine, as a job sees it.

:class:`sglang_batch.srt.engine.SGLangEngine` implements it over SGLang. Everything
above this line runs and is tested without SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .request import BatchRequestInput, RequestOutput

if TYPE_CHECKING:
    from .planner.plan import Machine
    from .scheduling.job_plan import JobPlan

# SGLang's native endpoint: what frontend programs send. Not for batch files.
GENERATE_URL = "/generate"
# Where an offline server takes them, a list at a time.
WAVE_PATH = "/offline_batch/wave"


class PreparedRequest(Protocol):
    """A request rendered for the engine: template applied, ready to be sent."""

    @property
    def input_ids(self) -> list[int] | None:
        """Prompt token ids, when they were asked for.

        Of a request with several prompts, those of the first.
        """
        ...

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens it may generate; None where only the context limits it."""
        ...

    @property
    def ignore_eos(self) -> bool:
        """Whether it generates exactly that many."""
        ...


@dataclass(frozen=True, slots=True)
class KvUse:
    """What an engine's running requests hold, all its replicas together.

    running: requests, online ones among them.
    left, right, online: tokens of KV by side, without shared prefixes.
    shared: tokens of the shared prefixes that they use.
    capacity: tokens of KV that there is room for.
    """

    running: int
    left: int
    right: int
    online: int
    shared: int
    capacity: int


class Engine(Protocol):
    """Renders requests and executes them. Both calls may run concurrently."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models served; the first is the one to name in messages."""
        ...

    @property
    def default_max_inflight(self) -> int:
        """How many requests keep this engine full without a long queue."""
        ...

    @property
    def max_running_requests(self) -> int:
        """The most requests that run at a time, in all replicas together."""
        ...

    @property
    def machine(self) -> Machine:
        """What the model costs on this engine's hardware, for planning."""
        ...

    @property
    def num_replicas(self) -> int:
        """Copies of the model that share the work (data parallel ranks)."""
        ...

    async def kv_use(self) -> KvUse | None:
        """What its requests hold now; None where it does not count by side.

        It may wait for the step that the engine makes: for every few seconds.
        """
        ...

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        """Tell the engine of a job whose requests will follow, or of a new plan of it.

        Requests belong to it by their ids, see ``request.engine_request_id``.

        Args:
            plans: one for each replica: what of the job it is to run.
        """
        ...

    async def set_priority(self, job_id: str, priority: int) -> None:
        """Requests of the open jobs of highest priority are admitted first.

        A job has priority 0 until it is told. Jobs of one priority share the engine
        evenly.
        """
        ...

    async def close_job(self, job_id: str) -> None:
        """No more requests of the job will follow."""
        ...

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        """Render one request.

        Args:
            rid: our id for it, unique in the engine.
            tokenize: whether ``input_ids`` are wanted, for planning.

        Returns:
            The prepared request, or the error answer if it cannot be served.
        """
        ...

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        """Run a prepared request to its end. Cancelling the call aborts it.

        Args:
            replica: the one that is to run it; None lets the engine choose.
        """
        ...
