"""The running engine as the planner's :class:`~sglang_batch.planner.plan.Machine`."""

from __future__ import annotations

import logging

import torch

from ...errors import ConfigError
from ...planner.costs.cost_model import CostModel
from ...planner.costs.hardware import HardwareSpec, hardware, match_hardware
from ...planner.costs.model_spec import TYPICAL_MODEL, ModelSpec
from ...planner.machine_model import EngineLimits, Machine
from ..compat.server_types import (
    HfConfig,
    SchedulerState,
    ServerArgs,
    TokenizerManager,
)
from ..compat.support import ATTENTION_BACKEND, STATE_KEY

logger = logging.getLogger(__name__)

# SGLang runs matrix products and attention one after the other.
NO_OVERLAP = 1.0
# Where steps are small, the requests that start the right side must not fill them.
MIN_STEP_TOKENS = 512
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
    cost = CostModel.of(
        model_spec(tokenizer_manager.model_config.hf_config),
        device(),
        tp=tokenizer_manager.server_args.tp_size,
        attention_flops=True,
        weight_reads=True,
        shared_kv_read_once=bool(ours.get("shares_prefixes")),
        interference_exponent=NO_OVERLAP,
    )
    # From the scheduler: SGLang has filled in the arguments that the user left out.
    step_tokens = int(ours["step_tokens"])
    return Machine(
        cost,
        EngineLimits(
            kv_capacity_tokens=int(state["memory_usage"]["token_capacity"]),
            step_tokens=step_tokens,
            min_step_tokens=min(MIN_STEP_TOKENS, max(1, step_tokens // 8)),
            page_size=int(ours["page_size"]),
            max_running=int(state["effective_max_running_requests_per_dp"]),
            # The simulator's SGLang steps are those that mix decodes and prompts.
            as_sglang=bool(ours["mixed_chunk"]),
        ),
    )


def decodes_share(server_args: ServerArgs) -> bool:
    """Whether the arguments name the backend that reads shared prefixes once."""
    chosen = server_args.decode_attention_backend or server_args.attention_backend
    return chosen == ATTENTION_BACKEND


def model_spec(hf_config: HfConfig) -> ModelSpec:
    """The model's size, or a typical one where it cannot be counted."""
    try:
        return ModelSpec.from_hf_config(hf_config.to_dict())
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
        return hardware("cpu")
    found = match_hardware(name)
    if found is None:
        logger.warning("Unknown device %s: planning as for %s.", name, TYPICAL_DEVICE)
        return hardware(TYPICAL_DEVICE)
    return found
