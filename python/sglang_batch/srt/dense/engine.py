"""The dense engine as the :class:`~sglang_batch.job.engine.Engine` of a job, and its start."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import transformers
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.runtime_context import publish, restore_context, snapshot_context
from sglang.srt.utils import configure_logger
from sglang.srt.utils.hf_transformers_utils import get_config

from ...dense.admission import MAX_TICKS, ByLength
from ...dense.embedding import embedding_reason, load_embedding_model
from ...dense.model import LoadedModel, ModelOptions, load_model
from ...dense.row_request import DenseRequest, DenseSettings
from ...dense.worker import worker_of
from ...errors import ConfigError, EngineError, ExitStatus
from ...planner.costs.cost_model import CostModel
from ...planner.costs.model_spec import ModelSpec
from ...planner.machine_model import EngineLimits, Machine, min_step_tokens
from ...request import RequestOutput, parse_request_id
from ...scheduling.job_plan import JobPlan, LeafNumbers
from ..compat.server_types import OfflineArgs
from ..engine.in_process import read_templates
from ..engine.machine import NO_OVERLAP, device
from ..engine.sglang_engine import (
    MIN_INFLIGHT,
    Prepared,
    SGLangEngine,
    longest_of_lines,
)
from .grammars import Grammars
from .manager import DenseTokenizerManager, PlannedPlace

# Most requests that wait in the engine, and tokens of their prompts, which take about 36
# bytes each. Of more requests, better batches of similar length are formed.
_MAX_INFLIGHT = 4096
_MAX_PROMPT_TOKENS = 1 << 23


class OpenPlans:
    """The plans of the open jobs, and their priorities."""

    def __init__(self) -> None:
        self._planned: dict[str, tuple[JobPlan, LeafNumbers]] = {}
        self._priority: dict[str, int] = {}

    def open(self, job_id: str, plan: JobPlan) -> None:
        self._planned[job_id] = plan, LeafNumbers(plan.number)

    def prioritize(self, job_id: str, priority: int) -> None:
        self._priority[job_id] = priority

    def close(self, job_id: str) -> None:
        self._planned.pop(job_id, None)
        self._priority.pop(job_id, None)

    def of(self, rid: str) -> PlannedPlace:
        """Where a request is in its job's plan.

        One that is in no plan has its number for a place, and no expected length.
        """
        job_id, number, _ = parse_request_id(rid)
        priority = self._priority.get(job_id, 0)
        found = self._place(job_id, number, priority)
        return found or PlannedPlace(max(0, number), priority)

    def revised(self, job_id: str, request: DenseRequest) -> DenseRequest:
        """An open request as it is planned now, if it is of this job."""
        job, number, _ = parse_request_id(request.rid)
        found = self._place(job, number, request.priority) if job == job_id else None
        return request if found is None else replace(request, **found._asdict())

    def _place(self, job_id: str, number: int, priority: int) -> PlannedPlace | None:
        if job_id not in self._planned:
            return None
        plan, leaves = self._planned[job_id]
        leaf = leaves.of(number)
        if leaf < 0:
            return None
        by_length = None
        if plan.length_key is not None and plan.family is not None:
            key, family = int(plan.length_key[leaf]), int(plan.family[leaf])
            limit = plan.max_wait_steps or MAX_TICKS
            by_length = ByLength(plan.length_rule, key, family, limit)
        return PlannedPlace(
            int(plan.position[leaf]),
            priority,
            max(1, round(float(plan.est_decode_steps[leaf]) + 1.0)),
            by_length,
        )


class DenseEngine(SGLangEngine):
    """Serves a job's requests with SGLang's serving classes and dense batches.

    All calls must come from one event loop.
    """

    manager: DenseTokenizerManager

    def __init__(
        self,
        server_args: OfflineArgs,
        loaded: LoadedModel,
        settings: DenseSettings,
        templates: TemplateManager,
    ) -> None:
        """Make it; :meth:`connect` starts it, :meth:`stop` ends it.

        Args:
            server_args: SGLang's, published for the role ``tokenizer``.
            templates: not initialized yet.
        """
        self._plans = OpenPlans()
        manager = DenseTokenizerManager(server_args, loaded, self._plans.of)
        super().__init__(manager, templates)
        self.templates = templates
        self._loaded = loaded
        self._machine = dense_machine(loaded, settings)
        cost = self._machine.cost
        # By which rows are put together that join by length.
        step_cells = float(cost.weight_read_time_s) / float(cost.kv_read_time_s)
        self._settings = settings = replace(settings, step_cells=step_cells)
        self._worker = worker_of(
            loaded, settings, manager.answered, manager.tokenizer, Grammars
        )
        manager.attach(self._worker)
        self._connected = False

    @property
    def machine(self) -> Machine:
        return self._machine

    @property
    def is_connected(self) -> bool:
        return self._connected

    async def connect(self) -> None:
        self.max_running_requests = self._settings.max_rows
        self.default_max_inflight = max(
            MIN_INFLIGHT,
            2 * self._settings.max_rows,
            min(_MAX_INFLIGHT, _MAX_PROMPT_TOKENS // self._loaded.context_len),
        )
        self._worker.start()
        self._connected = True

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
        self._worker.stop()

    def end_early(self, rid: str) -> None:
        """Every sample runs to its end: the worker gives no part of a row's answer."""

    async def running_s(self) -> dict[str, float]:
        return longest_of_lines([self._worker.running()])

    async def open_job(
        self,
        job_id: str,
        plans: Sequence[JobPlan],
        names: tuple[str, ...] = (),
        first: int = 0,
    ) -> None:
        self._plans.open(job_id, plans[0])
        # Requests that wait, too, profit from better estimates.
        self._worker.revise(partial(self._plans.revised, job_id))

    async def set_priority(self, job_id: str, priority: int) -> None:
        """Set the priority of a job's requests, open ones and those sent from now on."""
        self._plans.prioritize(job_id, priority)

        def revised(request: DenseRequest) -> DenseRequest:
            is_ours = parse_request_id(request.rid)[0] == job_id
            return replace(request, priority=priority) if is_ours else request

        self._worker.revise(revised)

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
    cost = replace(cost, padded=True)
    step_tokens = settings.prefill_tokens
    return Machine(
        cost,
        EngineLimits(
            kv_capacity_tokens=settings.max_cells
            or settings.max_rows * loaded.context_len,
            step_tokens=step_tokens,
            min_step_tokens=min_step_tokens(step_tokens),
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


# Its start with or without an HTTP server, and which models it runs.

logger = logging.getLogger(__name__)


@contextmanager
def loaded_engine(
    server_args: OfflineArgs, model: ModelOptions, settings: DenseSettings
) -> Iterator[DenseEngine]:
    """Load the model, and yield the engine, for the event loop that connects it.

    Args:
        server_args: SGLang's, which name the tokenizer, the template and the parsers.

    Raises:
        ConfigError: the model, its tokenizer or its template cannot be loaded.
    """
    # While the options were parsed, SGLang's log went to a buffer.
    configure_logger(server_args)
    reason = embedding_reason(model)
    if reason is not None:
        logger.info("An embedding model: %s.", reason)
    loaded = load_model(model) if reason is None else load_embedding_model(model)
    before = snapshot_context()
    try:
        try:
            publish(server_args, role="tokenizer")
            templates = TemplateManager()
            found = DenseEngine(server_args, loaded, settings, templates)
            read_templates(templates, found.manager, model.path)
        except ConfigError:  # of the model itself
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"--model-path {model.path} has a tokenizer or template that cannot be "
                f"loaded: {error}; --tokenizer-path and --chat-template name others."
            ) from error
        try:
            yield found
        finally:
            found.stop()
    finally:
        restore_context(before)


@contextmanager
def engine(
    server_args: OfflineArgs, model: ModelOptions, settings: DenseSettings
) -> Iterator[tuple[DenseEngine, asyncio.AbstractEventLoop]]:
    """As :func:`loaded_engine`, with an event loop for calls to the engine."""
    # It ends the tasks that still run, such as the manager's own loop.
    with (
        asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner,
        loaded_engine(server_args, model, settings) as found,
    ):
        yield found, runner.get_loop()


def serve(
    server_args: OfflineArgs, model: ModelOptions, settings: DenseSettings
) -> None:
    """Load the model and serve it until a signal ends the server. Raises as
    :func:`loaded_engine`.
    """
    from sglang.srt.entrypoints import http_server

    from ..plugin.main_process import enter_offline_main

    enter_offline_main()
    with loaded_engine(server_args, model, settings) as engine:
        manager = engine.manager
        manager.on_failure = _end_process
        manager.drains = True
        # Batches and calls with lists use this engine, connected once the app starts.
        manager.offline_engine = engine
        http_server._setup_and_run_http_server(
            server_args,
            manager,
            engine.templates,
            None,  # ports of other processes
            [
                {  # those of a scheduler that SGLang's routes show
                    "max_req_input_len": manager.context_len - 1,
                    "max_total_num_tokens": engine.machine.limits.kv_capacity_tokens,
                }
            ],
            None,
        )


def _end_process() -> None:
    """End as SGLang does when its scheduler dies: a supervisor starts a new server."""
    from ..plugin import engine_death

    logger.error("The dense engine has failed; the server ends.")
    engine_death.tell()
    logging.shutdown()
    os._exit(ExitStatus.FAILED)


def why_not_sglang(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> str | None:
    """Why SGLang cannot run a model, or None if it can: it has a class for it, or can replace
    the attention of transformers' class.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    try:
        config: Any = get_config(
            path, trust_remote_code=trust_remote_code, revision=revision
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model-path {path}: {error}") from error
    names = config.architectures or []
    if not names:
        return f"the configuration of {path} names no architecture"
    if any(ModelRegistry.is_arch_supported(name) for name in names):
        return None
    options = ModelOptions(path, revision=revision, trust_remote_code=trust_remote_code)
    embeds = embedding_reason(options)
    if embeds is not None:  # SGLang pools those of transformers in its own way
        return f"SGLang has no {names[0]}, and {embeds}"
    remote = "AutoModel" in (getattr(config, "auto_map", None) or {})
    for name in names:
        kind = getattr(transformers, name, None)
        if kind is None and remote:
            continue  # SGLang decides when it has loaded the code
        if kind is None or not kind.is_backend_compatible():
            return f"SGLang has no {name}, and cannot run that of transformers"
    return None
