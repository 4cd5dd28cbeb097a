"""The figures that ``plan`` and ``simulate`` report, also as JSON for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..batch_api.objects import dollars
from ..planner.costs.hardware import HardwareSpec
from ..planner.simulator.simulator import Simulation
from ..scheduling.step_record import Steps, summarize
from .forecast import Forecast


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Names of the model and its devices.

    hardware_note: why this device was chosen, if no option names it.
    """

    model: str
    hardware: HardwareSpec
    tp: int
    hardware_note: str = ""

    @property
    def devices(self) -> str:
        return f"{self.tp}x {self.hardware.name}" if self.tp > 1 else self.hardware.name


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A request that the forecast leaves out, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of a run, as a server logged them.

    name: file name of the log.
    steps: columns of the log, with at least one step.
    """

    name: str
    steps: Steps

    def figures(self) -> dict[str, Any]:
        figures = asdict(summarize(self.steps))
        # The name before offloading was called that. Kept for one release.
        return figures | {"parked": figures["offloaded"]}

    def as_json(self) -> str:
        """One JSON document with the same ``measured`` as :meth:`Report.as_json`."""
        return json.dumps(_finite({"measured": self.figures()}), indent=2)


@dataclass(frozen=True, slots=True)
class Report:
    """A prediction with everything that is printed about it.

    job: the job's name.
    num_lines: lines of its file, or None if it has no file.
    chosen: the policy that the report is about.
    verdict: that policy in words. Comparisons with other policies are added to it.
    lengths: the origin of the output lengths, in words.
    num_merged: lines that get the answer of an equal one. They count nowhere else.
    measured: the steps of a run to compare the prediction with.
    gpu_price: dollars for an hour of a device. None: costs are not told.
    own_order_tokens: unique prompt tokens with fields in the template's own order. None:
        they are in that order.
    """

    job: str
    machine: MachineInfo
    forecast: Forecast
    left_out: Sequence[LeftOut]
    chosen: str
    verdict: str
    lengths: str
    num_lines: int | None = None
    num_merged: int = 0
    measured: Measured | None = None
    gpu_price: float | None = None
    own_order_tokens: int | None = None

    def as_json(self) -> str:
        """One JSON document. Infinite numbers and NaN become null."""
        f = self.forecast
        document: dict[str, Any] = {
            "job": self.job_figures(),
            "machine": self.machine_figures(),
            "bounds": {**asdict(f.bounds), "tightest_s": f.bounds.tightest_s},
            "policies": [
                {"policy": name, **self.policy_figures(f.runs[name].simulation)}
                for name in f.ranking
            ],
            "chosen": self.chosen,
        }
        if self.measured is not None:
            document["measured"] = self.measured.figures()
        return json.dumps(_finite(document), indent=2)

    def job_figures(self) -> dict[str, Any]:
        f = self.forecast
        order = np.sort(f.densities)
        compute_side = f.densities >= 1
        compute, memory = f.densities * f.work.memory_s, f.work.memory_s
        return {
            "name": self.job,
            "lines": self.num_lines,
            "requests": f.tree.num_requests,
            "merged": self.num_merged,
            "left_out": [asdict(each) for each in self.left_out],
            "prompt_tokens": f.tree.num_tokens,
            "unique_prompt_tokens": f.tree.num_unique_tokens,
            "unique_prompt_tokens_in_own_order": self.own_order_tokens,
            "prefix_sharing_ratio": f.tree.prefix_sharing_ratio,
            "expected_output_tokens": f.output_tokens,
            "simulated_output_tokens": int(f.output_len.sum(dtype=np.int64)),
            "output_lengths_from": self.lengths,
            "kv_read_s": f.kv_read_s,
            "kv_read_shared_s": f.kv_read_shared_s,
            "compute_density": f.density,
            "compute_density_p5": _quantile(order, 0.05),
            "compute_density_p50": _quantile(order, 0.5),
            "compute_density_p95": _quantile(order, 0.95),
            "compute_intensive": _side(compute_side, compute, memory),
            "memory_intensive": _side(~compute_side, compute, memory),
        }

    def machine_figures(self) -> dict[str, Any]:
        cost, limits = self.forecast.machine.cost, self.forecast.machine.limits
        return {
            "model": self.machine.model,
            "hardware": self.machine.hardware.name,
            "tp": self.machine.tp,
            "compute_flops": self.machine.hardware.compute_flops,
            "bandwidth_bytes_per_s": self.machine.hardware.bandwidth_bytes_per_s,
            "kv_capacity_tokens": limits.kv_capacity_tokens,
            "step_tokens": limits.step_tokens,
            # A table has thousands of values.
            **asdict(replace(cost, table=None)),
        }

    def policy_figures(self, run: Simulation) -> dict[str, Any]:
        best = self.forecast.tree.prefix_sharing_ratio
        kept = run.achieved_prefix_sharing_ratio
        cost = {}
        if self.gpu_price is not None:
            cost["dollars"] = dollars(run.seconds * self.machine.tp, self.gpu_price)
        return cost | {
            "seconds": run.seconds,
            "tail_s": run.tail_s,
            "tokens_per_second": run.total_throughput,
            "prefix_sharing_ratio": kept,
            "share_of_optimal_sharing": kept / best if best else None,
            "steps": run.num_steps,
            "retractions": run.retractions,
            "compute_s": run.compute_s,
            "memory_s": run.memory_s,
            "recomputed_tokens": run.recomputed_tokens,
            "mean_kv_share": run.mean_kv_share,
            "share_of_bound": self.forecast.bounds.tightest_s / run.seconds,
        }


def _side(mask: Any, compute: Any, memory: Any) -> dict[str, float]:
    return {
        "requests": int(mask.sum()),
        "share_of_compute": float(compute[mask].sum() / max(compute.sum(), 1e-300)),
        "share_of_memory": float(memory[mask].sum() / max(memory.sum(), 1e-300)),
    }


def _quantile(ascending: Any, q: float) -> float:
    """One of the values: densities can be infinite, so they are not interpolated."""
    return float(ascending[round(q * (len(ascending) - 1))])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
