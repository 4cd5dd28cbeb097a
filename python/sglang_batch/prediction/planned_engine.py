"""The engine that a plan is for: its own limits, and the costs that it measured here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..planner.costs.hardware import HardwareSpec, Parallelism, match_hardware
from ..planner.costs.model_spec import ModelSpec
from ..planner.machine_model import Machine, min_step_tokens

if TYPE_CHECKING:
    from ..srt.compat.server_types import OfflineArgs


def kept_kv_dtype(server_args: OfflineArgs) -> str:
    """The dtype of KV that an engine with these arguments keeps, "auto" if it follows the
    model's."""
    if server_args.kv_cache_dtype != "auto":
        return server_args.kv_cache_dtype
    return server_args.dtype


def timed_machine(
    machine: Machine,
    model: ModelSpec,
    server_args: OfflineArgs,
    device: HardwareSpec,
    tp: int,
) -> tuple[Machine, str]:
    """With the limits of the arguments, and the costs of steps that were timed here.

    Args:
        machine: by the datasheet of ``tp`` of these devices.

    Returns:
        It, and where its costs are from, empty for the datasheet.
    """
    limits = machine.limits
    if most := server_args.max_total_tokens:
        capacity = min(limits.kv_capacity_tokens, most)
        limits = replace(limits, kv_capacity_tokens=capacity)
    if rows := server_args.max_running_requests:
        rows = min(rows, limits.max_running or rows)
        limits = replace(limits, max_running=rows)
    machine = replace(machine, limits=limits)
    from ..srt.engine.machine import device_name, planned_law

    name = device_name()
    here = match_hardware(name) if name else None
    if device.name != (here.name if here else "cpu"):
        return machine, ""
    parallel = Parallelism(tp=tp, ep=server_args.ep_size)
    found = planned_law(machine.cost, name, model, parallel)
    if found is None:
        return machine, ""
    law, mixed = found
    limits = replace(
        limits, as_sglang=mixed, min_step_tokens=min_step_tokens(limits.step_tokens)
    )
    note = f"costs of {law.num_samples} timed steps"
    return Machine(law.applied(machine.cost), limits), note
