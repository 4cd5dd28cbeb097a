"""The machine that a job is predicted for, from the options that describe it."""

from __future__ import annotations

import argparse

from ..errors import ConfigError
from ..planner.costs.cost_model import CostModel, kv_capacity_tokens
from ..planner.costs.hardware import HardwareSpec, hardware, match_hardware
from ..planner.costs.model_spec import ModelSpec
from ..planner.machine_model import EngineLimits, Machine


def named_device(options: argparse.Namespace, name: str) -> HardwareSpec:
    """The device of this name, with the measured rates that the options give.

    Raises:
        ConfigError: the device is unknown.
    """
    tflops, tbs = options.compute_tflops, options.bandwidth_tbs
    return hardware(
        name,
        compute_flops=None if tflops is None else tflops * 1e12,
        bandwidth_bytes_per_s=None if tbs is None else tbs * 1e12,
    )


def chosen_device(options: argparse.Namespace) -> tuple[HardwareSpec, str]:
    """The device of ``--hardware``, or this machine's and a note that it is.

    Raises:
        ConfigError: the device is unknown.
    """
    if options.hardware is not None:
        return named_device(options, options.hardware), ""
    from ..srt.engine.machine import device_name

    name = device_name()
    if name is None:
        return named_device(options, "cpu"), "no GPU here; name another with --hardware"
    if match_hardware(name) is None:
        raise ConfigError(
            f"This machine's {name!r} is not in the table of devices. Name the most "
            "similar one with --hardware, and its measured rates with "
            "--compute-tflops and --bandwidth-tbs."
        )
    return named_device(options, name), "this machine"


def make_machine(
    options: argparse.Namespace,
    model: ModelSpec,
    device: HardwareSpec,
    *,
    paper_costs: bool = False,
) -> Machine:
    """The model on ``--tp`` of these devices.

    Raises:
        ConfigError: the weights leave no memory for KV.
    """
    capacity = options.kv_capacity_tokens
    if capacity is None:
        capacity = kv_capacity_tokens(
            model, device, options.tp, mem_fraction=options.mem_fraction_static
        )
    cost = CostModel.of(
        model,
        device,
        tp=options.tp,
        attention_flops=not paper_costs,
        weight_reads=not paper_costs,
        shared_kv_read_once=options.shared_prefix_attention,
        interference_exponent=options.overlap,
    )
    return Machine(cost, EngineLimits(capacity, options.chunked_prefill_size))
