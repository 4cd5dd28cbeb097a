"""What ``plan`` and ``simulate`` say of a job: a table for people, JSON for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .forecast import Forecast
from .planner.cost_model import CostModel
from .planner.hardware import HardwareSpec
from .planner.simulator import Simulation

MAX_NAMES_SHOWN = 5
_LABEL_WIDTH = 26

Row = tuple[str, str]


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """The machine by its name, for the report.

    hardware_note: why this device, where nobody asked for it.
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
    """A request that is not part of the forecast, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is printed.

    job: the job's name. num_lines: lines of its file; None where there is no file.
    chosen: the policy that the report is about.
    verdict: that it is, in words; how it compares with others is added.
    lengths: where output lengths come from, in words.
    """

    job: str
    machine: MachineInfo
    forecast: Forecast
    left_out: Sequence[LeftOut]
    chosen: str
    verdict: str
    lengths: str
    num_lines: int | None = None

    def as_table(self) -> str:
        """The report for people."""
        cost = self.forecast.machine.cost
        parts = [
            _section(f"Job: {self.job}", self._job_rows()),
            _section(f"Machine: {self._machine_name()}", self._machine_rows(cost)),
            _section("No schedule can be faster than", self._bound_rows()),
            self._policies(),
            self._conclusion(),
        ]
        return "\n\n".join(parts)

    def as_json(self) -> str:
        """One document; numbers that are not finite become null."""
        f = self.forecast
        document = {
            "job": self._job_figures(),
            "machine": self._machine_figures(),
            "bounds": {**asdict(f.bounds), "tightest_s": f.bounds.tightest_s},
            "policies": [
                {"policy": name, **self._policy_figures(f.runs[name].simulation)}
                for name in f.ranking
            ],
            "chosen": self.chosen,
        }
        return json.dumps(_finite(document), indent=2)

    def _job_figures(self) -> dict[str, Any]:
        f = self.forecast
        order = np.sort(f.densities)
        compute_side = f.densities >= 1
        compute, memory = f.densities * f.work.memory_s, f.work.memory_s
        return {
            "name": self.job,
            "lines": self.num_lines,
            "requests": f.tree.num_requests,
            "left_out": [asdict(each) for each in self.left_out],
            "prompt_tokens": f.tree.num_tokens,
            "unique_prompt_tokens": f.tree.num_unique_tokens,
            "prefix_sharing_ratio": f.tree.prefix_sharing_ratio,
            "expected_output_tokens": f.expected_output_tokens,
            "simulated_output_tokens": int(f.output_len.sum(dtype=np.int64)),
            "output_lengths_from": self.lengths,
            "compute_density": f.density,
            "compute_density_p5": _quantile(order, 0.05),
            "compute_density_p50": _quantile(order, 0.5),
            "compute_density_p95": _quantile(order, 0.95),
            "compute_intensive": _side(compute_side, compute, memory),
            "memory_intensive": _side(~compute_side, compute, memory),
        }

    def _machine_figures(self) -> dict[str, Any]:
        cost, limits = self.forecast.machine.cost, self.forecast.machine.limits
        return {
            "model": self.machine.model,
            "hardware": self.machine.hardware.name,
            "tp": self.machine.tp,
            "compute_flops": self.machine.hardware.compute_flops,
            "bandwidth_bytes_per_s": self.machine.hardware.bandwidth_bytes_per_s,
            "kv_capacity_tokens": limits.kv_capacity_tokens,
            "step_tokens": limits.step_tokens,
            **asdict(cost),
        }

    def _policy_figures(self, run: Simulation) -> dict[str, Any]:
        best = self.forecast.tree.prefix_sharing_ratio
        kept = run.achieved_prefix_sharing_ratio
        return {
            "seconds": run.seconds,
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

    def _job_rows(self) -> list[Row]:
        figures = self._job_figures()
        requests = f"{figures['requests']:,}"
        if self.num_lines is not None:
            requests += f"  (of {self.num_lines:,} lines)"
        rows = [("requests", requests)]
        rows += _left_out_rows(self.left_out)
        rows += [
            ("prompt tokens", f"{figures['prompt_tokens']:,}"),
            (
                "unique prompt tokens",
                f"{figures['unique_prompt_tokens']:,}  (a perfect prefix cache saves "
                f"{figures['prefix_sharing_ratio']:.1%})",
            ),
            (
                "expected output tokens",
                f"{figures['expected_output_tokens']:,.0f}  ({self.lengths})",
            ),
            (
                "compute density",
                f"{_number(figures['compute_density'])}  (compute time / memory time of "
                "the whole job)",
            ),
            (
                "density of requests",
                "  ".join(
                    f"p{q} {_number(figures[f'compute_density_p{q}'])}"
                    for q in (5, 50, 95)
                ),
            ),
        ]
        for side in ("compute", "memory"):
            part = figures[f"{side}_intensive"]
            rows.append(
                (
                    f"{side}-intensive",
                    f"{part['requests']:,} requests: {part['share_of_compute']:.1%} of "
                    f"the compute time, {part['share_of_memory']:.1%} of the memory time",
                )
            )
        return rows

    def _machine_name(self) -> str:
        machine = self.machine
        note = f" ({machine.hardware_note})" if machine.hardware_note else ""
        return f"{machine.model} on {machine.devices}{note}"

    def _machine_rows(self, cost: CostModel) -> list[Row]:
        limits = self.forecast.machine.limits
        rows = [
            ("KV capacity", f"{limits.kv_capacity_tokens:,} tokens"),
            ("tokens of a step", f"{limits.step_tokens:,} at most"),
            ("computes", f"{_rate(cost.token_time_s)} tokens/s"),
            ("reads KV of", f"{_rate(cost.kv_read_time_s)} tokens/s"),
        ]
        if cost.weight_read_time_s:
            rows.append(("reads all weights in", f"{_ms(cost.weight_read_time_s)}"))
        return [*rows, ("compute and memory", _overlap(cost.interference_exponent))]

    def _bound_rows(self) -> list[Row]:
        b = self.forecast.bounds
        law = "the overlap above, perfectly balanced"
        seconds = {
            "compute alone": (b.compute_s, ""),
            "memory alone": (b.memory_s, f"KV and {b.min_steps:,} steps' weights"),
            "the larger of the two": (b.ideal_s, "perfect overlap"),
            "both, one after another": (b.sum_s, "no overlap; no bound if there is some"),
            "both, overlapped": (b.law_s, law),
            "the longest request": (b.critical_path_s, "alone in the engine"),
            "shared KV read once": (b.kv_area_s, "and weights for as many steps"),
        }
        if not self.forecast.machine.cost.weight_read_time_s:
            seconds["memory alone"] = (b.memory_s, "")
            seconds["shared KV read once"] = (b.kv_area_s, "")
        width = max(len(_seconds(value)) for value, _ in seconds.values())
        rows = [
            (name, f"{_seconds(value):>{width}} s  {note}".rstrip())
            for name, (value, note) in seconds.items()
        ]
        tightest = f"{_seconds(b.tightest_s):>{width}} s"
        return [*rows, ("tightest that holds", tightest)]

    def _policies(self) -> str:
        f = self.forecast
        header = (
            "policy", "seconds", "tokens/s", "cached", "of possible", "steps",
            "retracted", "of bound",
        )  # fmt: skip
        lines = [header]
        for name in f.ranking:
            run = self._policy_figures(f.runs[name].simulation)
            possible = run["share_of_optimal_sharing"]
            lines.append(
                (
                    ("* " if name == self.chosen else "  ") + name,
                    _seconds(run["seconds"]),
                    f"{run['tokens_per_second']:,.0f}",
                    f"{run['prefix_sharing_ratio']:.1%}",
                    "-" if possible is None else f"{possible:.1%}",
                    f"{run['steps']:,}",
                    f"{run['retractions']:,}",
                    f"{run['share_of_bound']:.1%}",
                )
            )
        return "Predicted, fastest first\n" + _table(lines)

    def _conclusion(self) -> str:
        """The verdict, with how much faster or slower others are."""
        f = self.forecast
        seconds = {name: run.simulation.seconds for name, run in f.runs.items()}
        others = [name for name in f.ranking if name != self.chosen]
        if not others:
            return f"{self.verdict}."
        named = dict.fromkeys([others[0], *(n for n in ("dfs", "fcfs") if n in others)])
        compared = [
            _compared(seconds[name] / seconds[self.chosen], name) for name in named
        ]
        return f"{self.verdict}: {', '.join(compared)}."


def _side(mask: Any, compute: Any, memory: Any) -> dict[str, float]:
    return {
        "requests": int(mask.sum()),
        "share_of_compute": float(compute[mask].sum() / max(compute.sum(), 1e-300)),
        "share_of_memory": float(memory[mask].sum() / max(memory.sum(), 1e-300)),
    }


def _quantile(ascending: Any, q: float) -> float:
    """A value that occurs: densities may be infinite, which cannot be interpolated."""
    return float(ascending[round(q * (len(ascending) - 1))])


def _left_out_rows(left_out: Sequence[LeftOut]) -> list[Row]:
    if not left_out:
        return []
    rows = [("left out", f"{len(left_out):,}, which cannot run:")]
    rows += [("", f"{each.name}: {each.reason}") for each in left_out[:MAX_NAMES_SHOWN]]
    more = len(left_out) - MAX_NAMES_SHOWN
    return [*rows, ("", f"... and {more:,} more")] if more > 0 else rows


def _compared(ratio: float, name: str) -> str:
    change = ratio - 1
    if abs(change) < 0.0005:
        return f"as fast as {name}"
    return f"{abs(change):.1%} {'faster' if change > 0 else 'slower'} than {name}"


def _section(title: str, rows: list[Row]) -> str:
    lines = [f"  {name:<{_LABEL_WIDTH}}{value}".rstrip() for name, value in rows]
    return "\n".join([title, *lines])


def _table(lines: list[tuple[str, ...]]) -> str:
    """Rows under a header: the first column to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    header = ("  " + lines[0][0], *lines[0][1:])
    return "\n".join(
        f"{line[0]:<{widths[0]}}"
        + "".join(
            f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)
        )
        for line in [header, *lines[1:]]
    )


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:,.3g}"


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:,.3f}"


def _rate(seconds_each: float) -> str:
    return f"{1 / seconds_each:,.0f}" if seconds_each else "unlimited"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms, in every step"


def _overlap(exponent: float) -> str:
    if exponent == 1:
        return "one after the other (overlap exponent 1)"
    if math.isinf(exponent):
        return "overlap perfectly"
    return f"overlap with exponent {exponent:g} (1 = not at all, inf = perfectly)"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
