"""The machine that a job is predicted for, from the options that describe it."""

from __future__ import annotations

import argparse
import logging

from ..errors import ConfigError
from ..planner.costs.cost_model import CostModel, kv_capacity_tokens
from ..planner.costs.hardware import HardwareSpec, Parallelism, hardware, match_hardware
from ..planner.costs.model_spec import ModelSpec
from ..planner.costs.step_costs import step_costs
from ..planner.machine_model import EngineLimits, Machine, second_pool
from ..store.measured_costs import UNMEASURED, kept_row_shares

logger = logging.getLogger(__name__)


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
    if paper_costs:
        cost = CostModel.of(
            model,
            device,
            tp=options.tp,
            shared_kv_read_once=options.shared_prefix_attention,
            interference_exponent=options.overlap,
            fp8=model.in_8_bits and device.fp8_flops is not None,
            row_share=options.row_share or 0.0,
            padded=options.padded_attention,
        )
    else:
        cost = step_costs(
            model,
            device,
            Parallelism(tp=options.tp),
            shared_kv_read_once=options.shared_prefix_attention,
            interference_exponent=options.overlap,
            row_share=_row_share(options, model, device),
            padded=options.padded_attention,
        )
    step_tokens = options.chunked_prefill_size
    pool, max_running = second_pool(model, capacity, step_tokens, options.tp)
    return Machine(
        cost,
        EngineLimits(capacity, step_tokens, max_running=max_running, second_pool=pool),
    )


def _row_share(
    options: argparse.Namespace, model: ModelSpec, device: HardwareSpec
) -> float:
    """That of the option, or the last one measured for this device, or 0."""
    if options.row_share is not None:
        return float(options.row_share)
    for kept in reversed(kept_row_shares()):
        key = kept.key
        spec = match_hardware(key.device)
        # Without an engine neither its attention backend nor its pages are known.
        if (
            spec is not None
            and spec.name == device.name
            and key.kv_heads == model.kv_shards
            and key.tp == options.tp
        ):
            return kept.row_share
    logger.info(UNMEASURED)
    return 0.0
