"""The running engine as the planner's :class:`~sglang_batch.planner.plan.Machine`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..errors import ConfigError
from ..planner.cost_model import CostModel, ModelSpec
from ..planner.hardware import HardwareSpec, hardware, match_hardware
from ..planner.plan import Machine
from ..planner.simulator import EngineLimits
from .support import ATTENTION_BACKEND, STATE_KEY

logger = logging.getLogger(__name__)

# SGLang runs matrix products and attention one after the other.
NO_OVERLAP = 1.0
# Where steps are small, what gets the right side going must not fill them.
MIN_STEP_TOKENS = 512
# Of a device that is not in the table. Orders depend on the ratio of its rates only,
# and that ratio differs little between data-centre devices.
TYPICAL_DEVICE = "h100"
# Of a model whose parameters cannot be counted: an 8B model with 8 KV heads.
TYPICAL_MODEL = ModelSpec(
    num_params=8_030_261_248,
    num_active_params=8_030_261_248,
    num_layers=32,
    hidden=4096,
    kv_bytes_per_token=131_072,
    weight_bytes=16_060_522_496,
)


def machine_of(tokenizer_manager: Any, state: dict[str, Any]) -> Machine:
    """What planning has to know of an engine.

    Args:
        state: internal state of one scheduler. Each DP rank has as much KV, and
            attends in the same way.
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
    # Of the scheduler: what the user left out, SGLang decides.
    step_tokens = int(ours["step_tokens"])
    return Machine(
        cost,
        EngineLimits(
            kv_capacity_tokens=int(state["memory_usage"]["token_capacity"]),
            step_tokens=step_tokens,
            min_step_tokens=min(MIN_STEP_TOKENS, max(1, step_tokens // 8)),
            max_running=int(state["effective_max_running_requests_per_dp"]),
            # The simulator knows SGLang's steps as those in which decodes and prompts
            # are mixed.
            as_sglang=bool(ours["mixed_chunk"]),
        ),
    )


def decodes_share(server_args: Any) -> bool:
    """Whether the backend that reads shared prefixes once was asked for."""
    chosen = server_args.decode_attention_backend or server_args.attention_backend
    return bool(chosen == ATTENTION_BACKEND)


def model_spec(hf_config: Any) -> ModelSpec:
    """Counts of the model, or those of a typical one where they are not known."""
    try:
        return ModelSpec.from_hf_config(hf_config.to_dict())
    except ConfigError as error:
        logger.warning("Planning with the costs of a typical 8B model: %s", error)
        return TYPICAL_MODEL


def device_name() -> str | None:
    """What the driver calls this machine's GPU; None without one."""
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
        logger.warning("%s is not known: planning as for %s.", name, TYPICAL_DEVICE)
        return hardware(TYPICAL_DEVICE)
    return found
