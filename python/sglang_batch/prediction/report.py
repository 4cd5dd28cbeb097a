"""The duration of a job under each policy, predicted for ``plan`` and ``simulate``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..batch_api.objects import dollars
from ..errors import InputError
from ..planner.costs.bounds import Bounds, lower_bounds
from ..planner.costs.cost_model import CostModel
from ..planner.costs.hardware import HardwareSpec
from ..planner.costs.tree_work import LeafWork, leaf_densities, leaf_work, root_density
from ..planner.machine_model import Machine
from ..planner.ordering.order import OrderSettings
from ..planner.output_lengths.estimates import Observed
from ..planner.output_lengths.sample import choose_sample
from ..planner.plan import Candidates, best
from ..planner.prefixes.prefix_tree import build_prefix_tree
from ..planner.requests import Floats, Int32s, PlanRequests
from ..planner.simulator.simulator import Simulation
from ..scheduling.step_record import Steps, summarize


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Names of the model and its devices, why this one was chosen if no option names it, and
    whether its rates were measured here."""

    model: str
    hardware: HardwareSpec
    tp: int
    hardware_note: str = ""
    calibrated: bool = False

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
        figures = summarize(self.steps)
        # The name before offloading was called that. Kept for one release.
        return figures | {"parked": figures["offloaded"]}

    def as_json(self) -> str:
        """One JSON document with the same ``measured`` as :meth:`Report.as_json`."""
        return json.dumps(_finite({"measured": self.figures()}), indent=2)


@dataclass(frozen=True, slots=True)
class Report:
    """A prediction with everything that is printed about it.

    num_lines: lines of the job's file, or None if it has no file.
    chosen, verdict: the policy that the report is about, and the same in words.
    lengths: the origin of the output lengths, in words.
    num_merged: lines that get the answer of an equal one. They count nowhere else.
    measured: the steps of a run to compare the prediction with.
    gpu_price: dollars for an hour of a device. None: costs are not told.
    own_order_tokens: unique prompt tokens with fields in the template's own order. None:
        they are in that order.
    late_tokens: prompt tokens that text in front would save, see
        :func:`.late_text.num_late_tokens`.
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
    late_tokens: int = 0

    def as_json(self) -> str:
        """One JSON document. Infinite numbers and NaN become null."""
        f = self.forecast
        document: dict[str, Any] = {
            "job": self.job_figures(),
            "machine": self.machine_figures(),
            "bounds": {**asdict(f.bounds), "tightest_s": f.bounds.tightest_s},
            "policies": [
                {"policy": name, **self.policy_figures(f.runs[name])}
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
            "requests": f.job.tree.num_requests,
            "merged": self.num_merged,
            "left_out": [asdict(each) for each in self.left_out],
            "prompt_tokens": f.job.tree.num_tokens,
            "unique_prompt_tokens": f.job.tree.num_unique_tokens,
            "unique_prompt_tokens_in_own_order": self.own_order_tokens,
            "late_shared_tokens": self.late_tokens,
            "prefix_sharing_ratio": f.job.tree.prefix_sharing_ratio,
            "expected_output_tokens": f.output_tokens,
            "simulated_output_tokens": int(f.job.output_len.sum(dtype=np.int64)),
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
        cost, limits = self.forecast.job.machine.cost, self.forecast.job.machine.limits
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
        best = self.forecast.job.tree.prefix_sharing_ratio
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


# Times and rates in units that fit their size, for tables and figures.

SIGNIFICANT = 4


class TimeUnit(NamedTuple):
    """A unit of time. ``seconds`` is its length."""

    name: str
    seconds: float

    def number(self, seconds: float) -> str:
        """A time in this unit, without the unit's name."""
        return significant(seconds / self.seconds)

    def text(self, seconds: float) -> str:
        return f"{self.number(seconds)} {self.name}"


_UNITS = (TimeUnit("h", 3600.0), TimeUnit("s", 1.0), TimeUnit("ms", 1e-3))
_SMALLEST = TimeUnit("\u00b5s", 1e-6)
# Times below this many hours are easier to compare in seconds.
_LEAST_HOURS = 3.0


def time_unit(seconds: float) -> TimeUnit:
    """The unit for times up to this one: hours, seconds, ms or µs."""
    for unit in _UNITS:
        least = _LEAST_HOURS if unit.name == "h" else 1.0
        if seconds >= least * unit.seconds or not math.isfinite(seconds):
            return unit
    return _SMALLEST if seconds else _UNITS[1]


def time_text(seconds: float) -> str:
    """A time in the unit that fits it."""
    return time_unit(seconds).text(seconds)


def rate_text(per_second: float) -> str:
    """A number of things per second, without their name."""
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if per_second >= size:
            some = per_second / size
            return f"{some:.3g} {name}" if some < 999.5 else f"{some:,.0f} {name}"
    return f"{per_second:,.0f}" if per_second >= 100 else significant(per_second)


def significant(value: float) -> str:
    """A number with ``SIGNIFICANT`` digits or more, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = SIGNIFICANT - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), 9)}f}"


# Predicts how long a job takes under each policy, for ``plan`` and ``simulate``.
#
# Every policy is simulated, with the true output lengths if they are known.


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job, of which ``n`` requests fit into the KV cache, and its run per policy.

    output_tokens: sum of the true output lengths, or of their estimates.
    num_sampled: requests from whose true lengths the estimates were learnt.
    work: estimated work of each leaf, from true lengths if they are known.
    kv_read_s, kv_read_shared_s: seconds to read the KV of all decodes, without and with shared
        prefixes read once.
    densities, density: float64 ``[n]``, compute density of each leaf's request, and of the job.
    """

    job: Candidates
    output_tokens: float
    num_sampled: int
    work: LeafWork
    kv_read_s: float
    kv_read_shared_s: float
    densities: Floats
    density: float
    bounds: Bounds
    runs: dict[str, Simulation]

    @property
    def ranking(self) -> list[str]:
        """The policies, fastest first."""
        return sorted(self.runs, key=lambda name: self.runs[name].seconds)

    def best_of(self, policies: Iterable[str]) -> str:
        """The policy that ``auto`` takes among these."""
        return best({name: self.runs[name] for name in policies})


def forecast(
    requests: PlanRequests,
    machine: Machine,
    policies: Iterable[str],
    settings: OrderSettings,
    *,
    true_output_len: Int32s | None = None,
    sample_share: float = 0.0,
    default_output_len: int | None = None,
) -> Forecast:
    """Simulate a job under each policy. ``policies`` may be a progress bar.

    Args:
        true_output_len: int32 ``[n]``, to simulate with. None to draw them from the estimates'
            distribution.
        sample_share: share of the requests from whose true lengths the estimates are learnt.
        default_output_len: of requests of unknown length, see ``OutputLengthEstimator``.

    Raises:
        ConfigError: a policy is unknown.
        InputError: no request fits into the machine, or a setting is out of range.
    """
    observed = None
    if true_output_len is not None and sample_share > 0:
        tree = build_prefix_tree(requests.tokens, requests.offsets)
        sample = choose_sample(tree, requests, share=sample_share, seed=settings.seed)
        observed = Observed(sample, true_output_len[sample])
    job = Candidates(
        requests,
        machine,
        settings,
        observed=observed,
        true_output_len=true_output_len,
        default_output_len=default_output_len,
    )
    if len(job.fits) == 0 < len(requests):
        raise InputError(
            "No request fits into a KV cache of "
            f"{machine.limits.kv_capacity_tokens:,} tokens: the shortest prompt has "
            f"{requests.input_len.min():,}. Give the engine more memory."
        )
    runs = {policy: job.run(policy) for policy in policies}
    est_output_len = job.estimates.est_output_len
    est_output_len_sq = job.estimates.est_output_len_sq
    if true_output_len is not None:
        est_output_len = job.output_len.astype(np.float64)
        est_output_len_sq = est_output_len**2

    def work_of(cost: CostModel) -> LeafWork:
        return leaf_work(job.tree, cost, est_output_len, est_output_len_sq)

    work = work_of(machine.cost)
    own, shared = (
        float(work_of(replace(machine.cost, shared_kv_read_once=once)).memory_s.sum())
        for once in (False, True)
    )
    return Forecast(
        job=job,
        output_tokens=float(est_output_len.sum()),
        num_sampled=0 if observed is None else len(observed.requests),
        work=work,
        kv_read_s=own,
        kv_read_shared_s=shared,
        densities=leaf_densities(job.tree, machine.cost, work),
        density=root_density(job.tree, machine.cost, work),
        bounds=lower_bounds(
            job.tree,
            machine.cost,
            job.output_len,
            machine.limits.kv_capacity_tokens,
            as_sglang=machine.limits.as_sglang,
        ),
        runs=runs,
    )
