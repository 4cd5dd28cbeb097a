"""What ``plan`` and ``simulate`` do alike: options to a machine, a report to its reader."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import ConfigError, InputError
from ..planner.cost_model import CostModel, kv_capacity_tokens
from ..planner.hardware import HardwareSpec, hardware
from ..planner.model_spec import ModelSpec
from ..planner.plan import Machine
from ..planner.simulator import EngineLimits, Simulation
from ..scheduling.step_record import read_steps
from .report import Measured, Report
from .table import table

# What is printed of measured steps, and how it is called.
_MEASURED = {
    "num_steps": "steps",
    "prefill_tokens": "prompt tokens computed",
    "cached_tokens": "prompt tokens cached",
    "decode_tokens": "tokens decoded",
    "max_kv_tokens": "most KV tokens in use",
    "evicted_tokens": "KV tokens evicted",
    "parked": "requests parked",
    "resumed": "requests resumed",
    "retracted": "requests retracted",
    "compute_s": "compute time (s)",
    "memory_s": "memory time (s)",
    "ratio_spread": "ratio spread",
}


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
        shared_kv_read_once=options.shared_prefix_attention,
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


def read_measured(path: Path) -> Measured:
    """The steps that a server logged.

    Raises:
        InputError: the file is not a log of steps, or has none.
    """
    steps = read_steps(path)
    if not len(steps["step"]):
        raise InputError(f"{path} has no step yet; wait for the run to make some.")
    return Measured(path.name, steps)


def show(report: Report, options: argparse.Namespace) -> int:
    """Print the report, draw the figure; returns the exit status."""
    measured = report.measured
    if options.json:
        print(report.as_json())
    else:
        print(table(report))
        if measured is not None:
            chosen = report.forecast.runs[report.chosen].simulation
            print(f"\n{_measured_table(measured, report.chosen, chosen)}")
    if options.plot is not None:
        from .plot import plot, plot_steps

        if measured is None:
            plot(report, options.plot)
        else:
            plot_steps(measured, options.plot)
        print(f"\nwrote {options.plot}", file=sys.stderr)
    return 0


def show_measured(measured: Measured, options: argparse.Namespace) -> int:
    """The same for steps without a prediction."""
    print(measured.as_json() if options.json else _measured_table(measured))
    if options.plot is not None:
        from .plot import plot_steps

        plot_steps(measured, options.plot)
        print(f"\nwrote {options.plot}", file=sys.stderr)
    return 0


def _measured_table(
    measured: Measured, policy: str = "", predicted: Simulation | None = None
) -> str:
    """What was measured, and beside it what a policy is predicted to do."""
    found = measured.figures()
    expected: dict[str, float] = {}
    if predicted is not None:
        expected = {
            "num_steps": predicted.num_steps,
            "prefill_tokens": predicted.prefilled_tokens,
            "cached_tokens": predicted.cached_tokens,
            "retracted": predicted.retractions,
            "compute_s": predicted.compute_s,
            "memory_s": predicted.memory_s,
        }
    lines = [
        f"  {label:<26}{_figure(found[name]):>14}"
        + (f"  {_figure(expected.get(name)):>14}" if expected else "")
        for name, label in _MEASURED.items()
    ]
    if expected:
        lines.insert(0, f"  {'':<26}{'measured':>14}  {policy:>14}")
    return "\n".join([f"Measured: {measured.name}", *lines])


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
