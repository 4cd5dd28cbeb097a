"""The dense engine as the :class:`~sglang_batch.engine.Engine` of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...dense.model import LoadedModel
from ...dense.row_request import OnAnswer
from ...dense.settings import DenseSettings
from ...engine import KvUse
from ...errors import ConfigError, EngineError
from ...planner.costs.cost_model import CostModel
from ...planner.costs.model_spec import ModelSpec
from ...planner.machine_model import EngineLimits, Machine
from ...planner.requests import Floats, Int64s
from ...request import RequestOutput, line_request_id, parse_request_id
from ...scheduling.job_plan import JobPlan
from ...scheduling.reports.running_tree import TreeNow
from ..compat.server_types import OfflineArgs, TemplateManager
from ..engine.machine import MIN_STEP_TOKENS, NO_OVERLAP, device
from ..engine.sglang_engine import MIN_INFLIGHT, Prepared, SGLangEngine
from .manager import DenseTokenizerManager, RowWorker


class Worker(RowWorker, Protocol):
    """:class:`sglang_batch.dense.worker.DenseWorker`, or another that runs rows."""

    def start(self) -> None:
        """Start its thread."""
        ...

    def stop(self) -> None:
        """End the thread and wait for it. Open rows have no answer."""
        ...

    def running(self) -> dict[str, float]:
        """Seconds since each row joined, by its id."""
        ...


@runtime_checkable
class ReorderingWorker(Protocol):
    """A worker whose open rows can have another priority."""

    def set_priority(self, matches: Callable[[str], bool], priority: int) -> None:
        """Change the priority of the open rows whose ids match."""
        ...


MakeWorker = Callable[[LoadedModel, DenseSettings, OnAnswer, Any], Worker]
"""Makes a worker. The last argument is the tokenizer."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A job's plan: int64 place and float64 output tokens by the request's number.

    Numbers that are in no plan have place -1.
    """

    place: Int64s
    output_len: Floats

    @classmethod
    def of(cls, plan: JobPlan) -> _Planned:
        size = int(plan.number.max(initial=-1)) + 1
        place, output_len = np.full(size, -1, np.int64), np.zeros(size)
        place[plan.number] = plan.position
        output_len[plan.number] = plan.est_decode_steps + 1.0
        return cls(place, output_len)


class OpenPlans:
    """The plans of the open jobs, and their priorities."""

    def __init__(self) -> None:
        self._planned: dict[str, _Planned] = {}
        self._priority: dict[str, int] = {}

    def open(self, job_id: str, plan: JobPlan) -> None:
        self._planned[job_id] = _Planned.of(plan)

    def prioritize(self, job_id: str, priority: int) -> None:
        self._priority[job_id] = priority

    def close(self, job_id: str) -> None:
        self._planned.pop(job_id, None)
        self._priority.pop(job_id, None)

    def of(self, rid: str) -> tuple[int, int, int | None]:
        """The ``place``, ``priority`` and ``expected_len`` of a request.

        One that is in no plan has its number for a place, and no expected length.
        """
        job_id, number, _ = parse_request_id(rid)
        priority = self._priority.get(job_id, 0)
        planned = self._planned.get(job_id)
        if planned is not None and 0 <= number < len(planned.place):
            place = int(planned.place[number])
            if place >= 0:
                return place, priority, max(1, round(float(planned.output_len[number])))
        return max(0, number), priority, None


class DenseEngine(SGLangEngine):
    """Serves a job's requests with SGLang's serving classes and dense batches.

    All calls must come from one event loop.
    """

    def __init__(
        self,
        server_args: OfflineArgs,
        loaded: LoadedModel,
        settings: DenseSettings,
        make_worker: MakeWorker,
        templates: TemplateManager,
    ) -> None:
        """Make it; :meth:`connect` starts it, :meth:`stop` ends it.

        Args:
            server_args: SGLang's, published for the role ``tokenizer``.
            templates: not initialized yet.
        """
        self._plans = OpenPlans()
        manager = DenseTokenizerManager(server_args, loaded, self._plans)
        super().__init__(manager, templates)
        self.templates = templates
        self._manager = manager
        self._loaded = loaded
        self._settings = settings
        self._worker = make_worker(
            loaded, settings, manager.answered, manager.tokenizer
        )
        manager.attach(self._worker)

    @property
    def manager(self) -> DenseTokenizerManager:
        """SGLang's tokenizer manager, which templates need."""
        return self._manager

    @property
    def max_cells(self) -> int:
        """KV cells that all rows can have, each of the context's length."""
        return self._settings.max_cells or (
            self._settings.max_rows * self._loaded.context_len
        )

    async def connect(self) -> None:
        self._max_running_requests = self._settings.max_rows
        self._default_max_inflight = max(MIN_INFLIGHT, 2 * self._settings.max_rows)
        self._machine = dense_machine(self._loaded, self._settings)
        self._worker.start()

    async def execute(
        self, prepared: Prepared, replica: int | None = None
    ) -> RequestOutput:
        """Run a prepared request to its end. Cancelling the call aborts it.

        Raises:
            EngineError: the worker has failed. The request was not answered.
        """
        output = await super().execute(prepared, replica)
        failure = self._worker.failure
        if failure is not None and not output.ok:
            raise EngineError(
                f"the engine died: {type(failure).__name__}: {failure}"
            ) from failure
        return output

    def stop(self) -> None:
        """End the worker's thread."""
        self._worker.stop()

    async def kv_use(self) -> KvUse | None:
        return None

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        return None

    async def running_s(self) -> dict[str, float]:
        longest: dict[str, float] = {}
        for rid, seconds in self._worker.running().items():
            line = line_request_id(rid)
            longest[line] = max(seconds, longest.get(line, 0.0))
        return longest

    async def open_job(
        self,
        job_id: str,
        plans: Sequence[JobPlan],
        names: tuple[str, ...] = (),
        first: int = 0,
    ) -> None:
        self._plans.open(job_id, plans[0])

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        return False

    async def set_priority(self, job_id: str, priority: int) -> None:
        """Set the priority of a job's requests, open ones and those sent from now on."""
        self._plans.prioritize(job_id, priority)
        if isinstance(self._worker, ReorderingWorker):
            self._worker.set_priority(
                lambda rid: parse_request_id(rid)[0] == job_id, priority
            )

    async def close_job(self, job_id: str) -> None:
        self._plans.close(job_id)


def dense_machine(loaded: LoadedModel, settings: DenseSettings) -> Machine:
    """The costs and limits of dense batches of a model, for planning."""
    cost = CostModel.of(
        _model_spec(loaded),
        device(),
        attention_flops=True,
        weight_reads=True,
        interference_exponent=NO_OVERLAP,
    )
    step_tokens = settings.prefill_tokens
    return Machine(
        cost,
        EngineLimits(
            kv_capacity_tokens=settings.max_cells
            or settings.max_rows * loaded.context_len,
            step_tokens=step_tokens,
            min_step_tokens=min(MIN_STEP_TOKENS, max(1, step_tokens // 8)),
            max_running=settings.max_rows,
            dense=True,
        ),
    )


def _model_spec(loaded: LoadedModel) -> ModelSpec:
    """The model's size: from its configuration, or counted from its weights."""
    config: Any = loaded.model.config
    try:
        return ModelSpec.from_hf_config(config.to_dict())
    except ConfigError:
        pass  # such as BLOOM's, whose keys have names of their own
    text = config.get_text_config()

    def figure(*names: str, default: int = 1) -> int:
        found = (getattr(text, name, None) for name in names)
        return next((x for x in found if isinstance(x, int) and x > 0), default)

    weights = list(loaded.model.parameters())
    num_params = max(1, sum(weight.numel() for weight in weights))
    itemsize = int(weights[0].element_size()) if weights else 2
    hidden = figure("hidden_size", "d_model", "n_embd")
    layers = figure("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    heads = figure("num_attention_heads", "n_head", "decoder_attention_heads")
    # Falcon of one KV head says so in a key of its own.
    kv_heads = 1 if getattr(text, "multi_query", False) else heads
    kv_heads = figure("num_key_value_heads", "num_kv_heads", default=kv_heads)
    kv_width = max(1, hidden // heads) * kv_heads
    return ModelSpec(
        num_params=num_params,
        num_active_params=num_params,
        num_layers=layers,
        hidden=hidden,
        kv_bytes_per_token=2 * layers * kv_width * itemsize,
        weight_bytes=sum(weight.numel() * weight.element_size() for weight in weights)
        or num_params * itemsize,
    )
