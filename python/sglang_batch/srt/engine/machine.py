"""The running engine as the planner's :class:`~sglang_batch.planner.machine_model.Machine`.

Its costs are those of a data sheet until the engine's first scheduler has timed steps, now or
in earlier runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch

from ...errors import ConfigError, StoreWriteError
from ...planner import machine_model
from ...planner.costs import hardware as devices
from ...planner.costs.cost_model import CostModel
from ...planner.costs.hardware import HardwareSpec, Parallelism
from ...planner.costs.model_spec import TYPICAL_MODEL, ModelSpec, counted_model
from ...planner.costs.step_costs import StepSample, step_costs
from ...planner.costs.step_law import StepLaw
from ...planner.machine_model import Machine
from ...scheduling.step_record import KeptSamples
from ...store import measured_costs as measured
from ...store.measured_costs import RowShareKey, TimedSteps, TimedStepsKey
from ..compat.job_control import StepsQuery, StepsQueryOutput, channel_of
from ..compat.server_types import OfflineArgs, SchedulerState, TokenizerManager
from ..compat.support import ATTENTION_BACKEND, STATE_KEY
from .timed_steps import STEP_WIDTH, engine_names, kept_law, samples_of

logger = logging.getLogger(__name__)

# SGLang runs matrix products and attention one after the other.
NO_OVERLAP = 1.0
# In place of a device that is not in the table. Orders depend only on the ratio of a
# device's rates, and that ratio differs little between data-centre devices.
TYPICAL_DEVICE = "h100"


def machine_of(manager: TokenizerManager, state: SchedulerState) -> Machine:
    """The costs and limits of an engine, for planning.

    state: of any scheduler. All DP ranks have the same KV capacity and attention.
    """
    ours = state[STATE_KEY]
    cost, datasheet = datasheet_cost(manager, state), None
    if manager.server_args.offline_config.learn_costs:
        law = kept_law(cost, engine_key(manager, state))
        if law is not None:
            logger.info(
                "Planning with the costs of %d timed steps, half of which are within "
                "%.0f %%",
                law.num_samples,
                100 * law.noise,
            )
            cost, datasheet = law.applied(cost), cost
    # From the scheduler: SGLang has filled in the arguments that the user left out.
    step_tokens = int(ours["step_tokens"])
    second = ours.get("second_pool")
    pool = machine_model.PoolShares(*second) if second else machine_model.NO_POOL
    limits = machine_model.EngineLimits(
        kv_capacity_tokens=int(state["memory_usage"]["token_capacity"]),
        step_tokens=step_tokens,
        min_step_tokens=machine_model.min_step_tokens(step_tokens),
        page_size=int(ours["page_size"]),
        max_running=int(state["effective_max_running_requests_per_dp"]),
        # The simulator's SGLang steps are those that mix decodes and prompts.
        as_sglang=bool(ours["mixed_chunk"]),
        prefetches=bool(ours.get("prefetches")),
        overlapped=bool(ours.get("overlapped", True)),
        second_pool=pool,
    )
    return Machine(cost, limits, datasheet)


def datasheet_cost(manager: TokenizerManager, state: SchedulerState) -> CostModel:
    """The costs of an engine by the datasheet of its device."""
    spec, spread = _spec(manager, state), parallelism(manager, state)
    ours = state[STATE_KEY]
    cost = step_costs(
        spec,
        device(),
        spread,
        shared_kv_read_once=bool(ours.get("shares_prefixes")),
        interference_exponent=NO_OVERLAP,
    )
    row_share = measured_row_share(row_share_key(manager, state, spec))
    # From the trial at start, on a GPU.
    exponent = ours.get("split_exponent", NO_OVERLAP)
    return replace(cost, row_share=float(row_share), split_exponent=float(exponent))


def _spec(manager: TokenizerManager, state: SchedulerState) -> ModelSpec:
    return model_spec(
        manager.model_config.hf_config,
        kv_dtype=_kv_dtype(manager, state),
        quantization=manager.server_args.quantization,
    )


def parallelism(manager: TokenizerManager, state: SchedulerState) -> Parallelism:
    """How one replica of an engine is spread."""
    server_args = manager.server_args
    return Parallelism(
        tp=server_args.tp_size,
        pp=server_args.pp_size,
        attention_ranks=state[STATE_KEY].get("attention_ranks", 1),
        ep=server_args.ep_size,
    )


def engine_key(manager: TokenizerManager, state: SchedulerState) -> TimedStepsKey:
    """The key of the timed steps of this engine."""
    spec, spread = _spec(manager, state), parallelism(manager, state)
    return timed_steps_key(device_name(), state, spec, spread)


def row_share_key(
    manager: TokenizerManager, state: SchedulerState, spec: ModelSpec
) -> RowShareKey:
    """The key of a measured row_share of this engine."""
    model = manager.model_config
    return RowShareKey(
        device=device_name() or "cpu",
        attention_backend=_attention_backend(state),
        kv_heads=spec.kv_shards,
        head_dim=getattr(model, "head_dim", None),
        dtype=_kv_dtype(manager, state),
        page_size=int(state[STATE_KEY]["page_size"]),
        tp=manager.server_args.tp_size,
    )


def measured_row_share(key: RowShareKey) -> float:
    """The row_share that ``sglang-batch calibrate`` kept for this engine, or 0."""
    kept = measured.kept_row_share(key)
    if kept is None:
        _say_unmeasured()
        return 0.0
    logger.info("row_share %.3g, measured at %s", kept.row_share, kept.measured_at)
    return kept.row_share


@cache  # once in a process
def _say_unmeasured() -> None:
    logger.info(measured.UNMEASURED)


def decodes_share(server_args: OfflineArgs) -> bool:
    """Whether the arguments name the backend that reads shared prefixes once."""
    chosen = server_args.decode_attention_backend or server_args.attention_backend
    return chosen == ATTENTION_BACKEND


def _attention_backend(state: SchedulerState) -> str:
    backend = state.get("decode_attention_backend") or state.get("attention_backend")
    return backend or "unknown"


def _kv_dtype(manager: TokenizerManager, state: SchedulerState) -> str:
    dtype = str(state.get("kv_cache_dtype") or "auto")
    if dtype == "auto":
        dtype = str(getattr(manager.model_config, "dtype", dtype))
    return dtype.removeprefix("torch.")


def model_spec(
    hf_config: Any, *, kv_dtype: str | None = None, quantization: str | None = None
) -> ModelSpec:
    """The model's size by :meth:`ModelSpec.from_hf_config`, or a typical one."""
    config = hf_config.to_dict()
    try:
        return counted_model(config, kv_dtype=kv_dtype, quantization=quantization)
    except ConfigError as error:
        logger.warning("Planning with the costs of a typical 8B model: %s", error)
        return TYPICAL_MODEL


def device_name() -> str | None:
    """The driver's name for this machine's GPU, or None without one."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def device() -> HardwareSpec:
    """The device that this process sees."""
    name = device_name()
    if name is None:
        return devices.hardware("cpu")
    found = devices.match_hardware(name)
    if found is None:
        logger.warning("Unknown device %s: planning as for %s.", name, TYPICAL_DEVICE)
        return devices.hardware(TYPICAL_DEVICE)
    return found


def timed_device(device: str | None) -> str:
    """The name of a device for its timed steps. device: the driver's, None for a CPU."""
    return device or f"cpu, {torch.get_num_threads()} threads"


def timed_steps_key(
    device: str | None, state: SchedulerState, spec: ModelSpec, parallel: Parallelism
) -> TimedStepsKey:
    """The key under which timed steps of an engine are kept.

    device: the driver's name, None for a CPU.
    """
    return TimedStepsKey(
        **engine_names(timed_device(device), spec, parallel),
        attention_backend=_attention_backend(state),
        mixed=bool(state[STATE_KEY]["mixed_chunk"]),
    )


async def keep_timed_steps(manager: TokenizerManager, key: TimedStepsKey) -> int:
    """Ask the first scheduler for its steps and keep them, with earlier ones.

    Returns:
        Steps that are kept in all. 0 if there are no new ones, or the file cannot be
        written, which is logged.
    """
    answers: Any = await channel_of(manager, StepsQueryOutput)(StepsQuery())
    found: list[float] = next((each.samples for each in answers if each.samples), [])
    if not found:
        return 0
    known = KeptSamples(samples_of(measured.kept_steps(key)))
    for begin in range(0, len(found), STEP_WIDTH):
        known.add(StepSample(*found[begin : begin + STEP_WIDTH]))
    entry = TimedSteps(
        key=key,
        samples=[list(map(float, sample)) for sample in known.samples],
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    try:
        measured.keep_steps(entry)
    except StoreWriteError as error:
        logger.warning("Timed steps are not kept: %s", error)
        return 0
    return len(entry.samples)


class LearntMachine:
    """Costs and limits of an engine, and how they change with the steps that it times.

    state: of the engine's first scheduler.
    machine: for the next plan.
    """

    def __init__(self, manager: TokenizerManager, state: SchedulerState) -> None:
        self._manager = manager
        self._state = state
        self._learns = manager.server_args.offline_config.learn_costs
        self.machine: Machine = machine_of(manager, state)

    @contextmanager
    def by_datasheet(self) -> Iterator[None]:
        """Plan with the datasheet's costs, which always mix prompts and decodes, and learn
        nothing meanwhile."""
        learns, self._learns = self._learns, False
        cost = datasheet_cost(self._manager, self._state)
        self.machine = replace(self.machine, cost=cost, datasheet=None)
        try:
            yield
        finally:
            self._learns = learns

    async def keep_steps(self) -> bool:
        """Keep the steps that were timed since the last call. Whether plans may learn from
        them."""
        if not self._learns:
            return False
        return await keep_timed_steps(self._manager, self._key) > 0

    async def learn(self) -> None:
        """Plan the next jobs with the costs of all steps that are kept.

        While no job is open: the work of open jobs is counted in seconds by their plans' costs.
        """
        self.machine = await asyncio.to_thread(machine_of, self._manager, self._state)

    def law(self) -> StepLaw | None:
        """The law of all steps that are kept. None if they are too few."""
        return kept_law(datasheet_cost(self._manager, self._state), self._key)

    @property
    def _key(self) -> TimedStepsKey:
        return engine_key(self._manager, self._state)
