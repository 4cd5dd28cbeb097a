"""The running engine as the planner's :class:`~sglang_batch.planner.plan.Machine`."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ...errors import ConfigError
from ...planner.costs.cost_model import CostModel
from ...planner.costs.hardware import (
    HardwareSpec,
    Parallelism,
    hardware,
    match_hardware,
)
from ...planner.costs.model_spec import TYPICAL_MODEL, ModelSpec
from ...planner.costs.step_costs import step_costs
from ...planner.costs.weights import UnknownQuantisation
from ...planner.machine_model import (
    NO_POOL,
    EngineLimits,
    Machine,
    PoolShares,
    min_step_tokens,
)
from ...store.measured.row_share_file import UNMEASURED, RowShareKey, kept_row_share
from ...store.measured.timed_steps_file import TimedStepsKey
from ..compat.server_types import (
    HfConfig,
    SchedulerState,
    ServerArgs,
    TokenizerManager,
)
from ..compat.support import ATTENTION_BACKEND, STATE_KEY
from .measuring.timed_costs import timed_cost, timed_steps_key

logger = logging.getLogger(__name__)

# SGLang runs matrix products and attention one after the other.
NO_OVERLAP = 1.0
# Stands for a device that is not in the table. Orders depend only on the ratio of a
# device's rates, and that ratio differs little between data-centre devices.
TYPICAL_DEVICE = "h100"


def machine_of(tokenizer_manager: TokenizerManager, state: SchedulerState) -> Machine:
    """The costs and limits of an engine, for planning.

    Args:
        state: the internal state of one scheduler. All DP ranks have the same KV
            capacity and the same attention.
    """
    ours = state[STATE_KEY]
    cost = datasheet_cost(tokenizer_manager, state)
    if tokenizer_manager.server_args.offline_config.learn_costs:
        cost = timed_cost(cost, engine_key(tokenizer_manager, state))
    # From the scheduler: SGLang has filled in the arguments that the user left out.
    step_tokens = int(ours["step_tokens"])
    second: Any = ours.get("second_pool")
    return Machine(
        cost,
        EngineLimits(
            kv_capacity_tokens=int(state["memory_usage"]["token_capacity"]),
            step_tokens=step_tokens,
            min_step_tokens=min_step_tokens(step_tokens),
            page_size=int(ours["page_size"]),
            max_running=int(state["effective_max_running_requests_per_dp"]),
            # The simulator's SGLang steps are those that mix decodes and prompts.
            as_sglang=bool(ours["mixed_chunk"]),
            prefetches=bool(ours.get("prefetches")),
            overlapped=bool(ours.get("overlapped", True)),
            second_pool=PoolShares(*second) if second else NO_POOL,
        ),
    )


def datasheet_cost(
    tokenizer_manager: TokenizerManager, state: SchedulerState
) -> CostModel:
    """The costs of an engine by the datasheet of its device."""
    spec = _spec(tokenizer_manager, state)
    ours = state[STATE_KEY]
    cost = step_costs(
        spec,
        device(),
        parallelism(tokenizer_manager, state),
        shared_kv_read_once=bool(ours.get("shares_prefixes")),
        interference_exponent=NO_OVERLAP,
        row_share=measured_row_share(row_share_key(tokenizer_manager, state, spec)),
    )
    # From the trial at start, on a GPU.
    split_exponent: Any = ours.get("split_exponent", NO_OVERLAP)
    return replace(cost, split_exponent=float(split_exponent))


def _spec(tokenizer_manager: TokenizerManager, state: SchedulerState) -> ModelSpec:
    return model_spec(
        tokenizer_manager.model_config.hf_config,
        kv_dtype=_kv_dtype(tokenizer_manager, state),
        quantization=tokenizer_manager.server_args.quantization,
    )


def parallelism(
    tokenizer_manager: TokenizerManager, state: SchedulerState
) -> Parallelism:
    """How one replica of an engine is spread."""
    server_args = tokenizer_manager.server_args
    return Parallelism(
        tp=server_args.tp_size,
        pp=server_args.pp_size,
        attention_ranks=state[STATE_KEY].get("attention_ranks", 1),
        ep=server_args.ep_size,
    )


def engine_key(
    tokenizer_manager: TokenizerManager, state: SchedulerState
) -> TimedStepsKey:
    """What the timed steps of this engine hold for."""
    return timed_steps_key(
        device_name(),
        state,
        _spec(tokenizer_manager, state),
        parallelism(tokenizer_manager, state),
    )


def row_share_key(
    tokenizer_manager: TokenizerManager, state: SchedulerState, spec: ModelSpec
) -> RowShareKey:
    """What a measured row_share holds for, of this engine."""
    model = tokenizer_manager.model_config
    backend = state.get("decode_attention_backend") or state.get("attention_backend")
    return RowShareKey(
        device=device_name() or "cpu",
        attention_backend=backend or "unknown",
        kv_heads=spec.kv_shards,
        head_dim=getattr(model, "head_dim", None),
        dtype=_kv_dtype(tokenizer_manager, state),
        page_size=int(state[STATE_KEY]["page_size"]),
        tp=tokenizer_manager.server_args.tp_size,
    )


def measured_row_share(key: RowShareKey) -> float:
    """The row_share that ``sglang-batch calibrate`` kept for this engine, or 0."""
    kept = kept_row_share(key)
    if kept is None:
        _say_unmeasured()
        return 0.0
    logger.info("row_share %.3g, measured at %s", kept.row_share, kept.measured_at)
    return kept.row_share


@cache  # once in a process
def _say_unmeasured() -> None:
    logger.info(UNMEASURED)


def decodes_share(server_args: ServerArgs) -> bool:
    """Whether the arguments name the backend that reads shared prefixes once."""
    chosen = server_args.decode_attention_backend or server_args.attention_backend
    return chosen == ATTENTION_BACKEND


def _kv_dtype(tokenizer_manager: TokenizerManager, state: SchedulerState) -> str:
    """The dtype of KV, "auto" if it is not known."""
    dtype = str(state.get("kv_cache_dtype") or "auto")
    if dtype == "auto":
        dtype = str(getattr(tokenizer_manager.model_config, "dtype", dtype))
    return dtype.removeprefix("torch.")


def model_spec(
    hf_config: HfConfig,
    *,
    kv_dtype: str | None = None,
    quantization: str | None = None,
) -> ModelSpec:
    """The model's size, or a typical one where it cannot be counted.

    Args:
        kv_dtype, quantization: as of :meth:`ModelSpec.from_hf_config`.
    """
    config = hf_config.to_dict()
    try:
        return counted_model(config, kv_dtype=kv_dtype, quantization=quantization)
    except ConfigError as error:
        logger.warning("Planning with the costs of a typical 8B model: %s", error)
        return TYPICAL_MODEL


def counted_model(
    config: dict[str, Any], *, kv_dtype: str | None, quantization: str | None
) -> ModelSpec:
    """:meth:`ModelSpec.from_hf_config`; weights of unknown bits have 16, with a warning.

    Raises:
        ConfigError: a key is missing, or the kind of model is unknown.
    """
    count = ModelSpec.from_hf_config
    try:
        return count(config, kv_dtype=kv_dtype, quantization=quantization)
    except UnknownQuantisation as error:
        logger.warning("Planning with weights of 16 bits: %s", error)
        return count(config, kv_dtype=kv_dtype, weight_dtype="bfloat16")


def device_name() -> str | None:
    """The driver's name for this machine's GPU, or None without one."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def device() -> HardwareSpec:
    """The device that this process sees."""
    name = device_name()
    if name is None:
        return hardware("cpu")
    found = match_hardware(name)
    if found is None:
        logger.warning("Unknown device %s: planning as for %s.", name, TYPICAL_DEVICE)
        return hardware(TYPICAL_DEVICE)
    return found
