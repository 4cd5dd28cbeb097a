"""The figure of ``--plot``: how two policies keep arithmetic and memory busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..planner.cost_model import compute_density
from ..planner.requests import Floats, Int64s
from .forecast import Forecast
from .report import Report

# Two colours for what is busy, two for the policies; told apart in grey print as well.
COMPUTE, MEMORY = "#d1495b", "#2e6f95"
POLICY_COLOURS = ("#5b2a86", "#e08e1b")
NUM_TIMES = 120
NUM_PLACES = 100

_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def plot(report: Report, path: Path) -> None:
    """Draw the chosen policy and one to compare it with, as a PNG.

    Above, the share of the time that arithmetic and memory are busy while the job
    runs; below, the compute density of the requests in the order they are sent.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        # A figure of its own, not pyplot's: no window system, no global state.
        figure = Figure(figsize=(12, 7.6), dpi=150, layout="constrained")
        policies = _policies(report)
        grid = figure.add_gridspec(2, len(policies), height_ratios=(1.0, 1.1))
        longest = max(
            report.forecast.runs[policy].simulation.seconds for policy in policies
        )
        above = [figure.add_subplot(grid[0, i]) for i in range(len(policies))]
        for axes, policy in zip(above, policies, strict=True):
            _draw_busy(axes, report.forecast, policy, longest)
        above[0].set_ylabel("share of the time busy")
        above[0].legend(loc="upper right", ncols=2)
        below = figure.add_subplot(grid[1, :])
        _draw_order(below, report.forecast, policies)
        figure.legend(
            *below.get_legend_handles_labels(), loc="outside lower center", ncols=3
        )
        tokens = report.forecast.tree.num_tokens
        figure.suptitle(
            f"{_beginning(report.job)}: {report.forecast.tree.num_requests:,} requests, "
            f"{tokens:,} prompt tokens\n"
            f"{_end(report.machine.model)} on {report.machine.devices}",
            x=0.01, ha="left", fontsize=13, fontweight="bold",
        )  # fmt: skip
        figure.savefig(path, format="png")


def _policies(report: Report) -> list[str]:
    """The chosen policy, and what it is to be seen against: dfs, to dfs dual-scan."""
    others = [name for name in report.forecast.ranking if name != report.chosen]
    telling = [name for name in ("dfs", "dual-scan") if name in others]
    return [report.chosen, *(telling or others)[:1]]


def _draw_busy(axes: Any, forecast: Forecast, policy: str, longest: float) -> None:
    simulation = forecast.runs[policy].simulation
    seconds, compute, memory = _binned_by_time(simulation.samples)
    share = simulation.achieved_prefix_sharing_ratio
    edges = np.concatenate([[0.0], np.cumsum(seconds)])
    busy = np.maximum(seconds, 1e-300)
    for part, colour, name in (
        (compute / busy, COMPUTE, "arithmetic"),
        (memory / busy, MEMORY, "memory reads"),
    ):
        axes.stairs(part, edges, baseline=None, color=colour, linewidth=1.8, label=name)
        axes.stairs(part, edges, color=colour, alpha=0.12, fill=True)
    axes.set_xlim(0, longest)
    axes.set_ylim(0, 1.2)  # room for the legend
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("time (s)")
    axes.set_title(
        f"{policy}: {_seconds(simulation.seconds)} s predicted, {share:.0%} cached"
    )


def _binned_by_time(samples: Floats) -> Floats:
    """Samples taken together to at most ``NUM_TIMES`` columns of about equal time."""
    samples = samples[:, samples[0] > 0]
    if samples.shape[1] == 0:
        return np.zeros((3, 0))
    end = np.cumsum(samples[0])
    column = np.ceil(end / end[-1] * NUM_TIMES).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    return np.add.reduceat(samples, first, axis=1)


def _draw_order(axes: Any, forecast: Forecast, policies: list[str]) -> None:
    for policy, colour in zip(policies, POLICY_COLOURS, strict=False):
        places, density = _density_along(forecast, forecast.runs[policy].sent)
        axes.plot(
            places, density, color=colour, linewidth=1.5, drawstyle="steps-mid",
            label=f"order of {policy}", alpha=0.9,
        )  # fmt: skip
    axes.axhline(
        forecast.density, color="black", linestyle="--", linewidth=1.2,
        label=f"the whole job: {forecast.density:.3g}",
    )  # fmt: skip
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # A decade to either side at least: small differences are to look small.
    axes.set_ylim(min(low, forecast.density / 10), max(high, 10 * forecast.density))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlim(0, forecast.tree.num_requests)
    axes.set_xlabel("place in the order (requests sent before)")
    axes.set_ylabel("compute density\n(compute time / memory time)")
    axes.set_title(
        "Who is sent when: above the line compute-intensive for this job, below it "
        "memory-intensive"
    )


def _density_along(forecast: Forecast, order: Int64s) -> tuple[Floats, Floats]:
    """Density of runs of requests that follow one another, and their middles."""
    leaf_of = np.empty(len(order), dtype=np.int64)
    leaf_of[forecast.tree.order] = np.arange(len(order))
    leaves = leaf_of[order]
    memory = forecast.work.memory_s[leaves]
    compute = forecast.densities[leaves] * memory
    count = min(NUM_PLACES, len(order))
    first = np.arange(count) * len(order) // count
    end = np.append(first[1:], len(order))
    density = compute_density(
        np.add.reduceat(compute, first), np.add.reduceat(memory, first)
    )
    return (first + end) / 2, density


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:,.3f}"


def _beginning(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _end(path: str, most: int = 60) -> str:
    return path if len(path) <= most else f"...{path[3 - most :]}"
