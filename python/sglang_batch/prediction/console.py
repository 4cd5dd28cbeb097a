"""What ``plan`` and ``simulate`` do alike: options to a machine, a report to its reader."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import ConfigError
from ..planner.cost_model import CostModel, kv_capacity_tokens
from ..planner.hardware import HardwareSpec, hardware
from ..planner.model_spec import ModelSpec
from ..planner.plan import Machine
from ..planner.simulator import EngineLimits
from .report import Report
from .table import table


def measured(options: argparse.Namespace, name: str) -> HardwareSpec:
    """The device, with the figures that the options give instead of the table's."""
    tflops, tbs = options.compute_tflops, options.bandwidth_tbs
    return hardware(
        name,
        compute_flops=None if tflops is None else tflops * 1e12,
        bandwidth_bytes_per_s=None if tbs is None else tbs * 1e12,
    )


def make_machine(
    options: argparse.Namespace,
    model: ModelSpec,
    device: HardwareSpec,
    *,
    paper_costs: bool = False,
) -> Machine:
    """The model on its devices, as the options say."""
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
        interference_exponent=options.overlap,
    )
    return Machine(cost, EngineLimits(capacity, options.chunked_prefill_size))


def progress(policies: dict[str, Any]) -> Any:
    """The policies, with a bar that shows how many are simulated."""
    return tqdm(list(policies), desc="Simulating", unit="policy", dynamic_ncols=True)


def check_plot(path: Path | None) -> None:
    """Whether a figure can be written, before the work is done.

    Raises:
        ConfigError: it cannot.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path} must end in .png.")
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a directory" if path.is_dir() else "has no directory to be in"
        raise ConfigError(f"cannot write --plot {path}: it {reason}.")


def show(report: Report, options: argparse.Namespace) -> int:
    """Print the report, draw the figure; returns the exit status."""
    print(report.as_json() if options.json else table(report))
    if options.plot is not None:
        from .plot import plot

        plot(report, options.plot)
        print(f"\nwrote {options.plot}", file=sys.stderr)
    return 0
