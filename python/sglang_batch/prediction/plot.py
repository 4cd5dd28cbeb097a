"""The figures of ``--plot``: how two policies keep arithmetic and memory busy, or what
the steps of a run did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..planner.cost_model import compute_density
from ..planner.requests import Floats, Int64s
from .forecast import Forecast
from .report import Measured, Report

# Two colours for what is busy, two for the policies; told apart in grey print as well.
COMPUTE, MEMORY = "#d1495b", "#2e6f95"
POLICY_COLOURS = ("#5b2a86", "#e08e1b")
ONLINE, SHARED, KEPT = "#e08e1b", "#5b2a86", "#b3b3b3"
NUM_TIMES = 120
NUM_PLACES = 100
# What is drawn of a step, from the bottom up: column, name, colour, strength.
_TOKENS = (
    ("prefill_left", "prefill, left", COMPUTE, 0.95),
    ("prefill_right", "prefill, right", MEMORY, 0.95),
    ("prefill_online", "prefill, online", ONLINE, 0.95),
    ("decode_left", "decode, left", COMPUTE, 0.45),
    ("decode_right", "decode, right", MEMORY, 0.45),
    ("decode_online", "decode, online", ONLINE, 0.45),
)
_KV = (
    ("kv_shared", "shared prefixes", SHARED, 0.85),
    ("kv_left", "left", COMPUTE, 0.85),
    ("kv_right", "right", MEMORY, 0.85),
    ("kv_online", "online", ONLINE, 0.85),
    ("kv_cached", "kept for later", KEPT, 0.6),
)
_WITHOUT_SIDES = {
    "prefill_left": "prefill",
    "decode_left": "decode",
    "kv_left": "running requests",
}

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


def plot_steps(measured: Measured, path: Path) -> None:
    """Draw the steps of a run, as a PNG: tokens, KV, times and the times' ratio.

    Long runs are drawn in ``NUM_TIMES`` columns, each the mean of its steps.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 10), dpi=150, layout="constrained")
        panels = figure.subplots(4, 1, sharex=True, height_ratios=(1.2, 1.2, 0.9, 0.9))
        edges, means = _binned_steps(measured)
        _draw_layers(panels[0], edges, means, _TOKENS)
        panels[0].set_ylabel("tokens of a step")
        panels[0].set_title("What is computed: prompt tokens below, decodes above")
        _draw_layers(panels[1], edges, means, _KV)
        panels[1].set_ylabel("tokens of KV")
        panels[1].set_title("What the KV cache holds")
        _draw_times(panels[2], edges, means)
        _draw_ratio(panels[3], edges, means, measured.figures())
        panels[3].set_xlim(0, edges[-1])
        panels[3].set_xlabel("steps")
        panels[3].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        for axes in panels:
            # Layers are named from the top down, as they lie.
            handles, names = axes.get_legend_handles_labels()
            step = -1 if axes in panels[:2] else 1
            axes.legend(
                handles[::step], names[::step], loc="upper left",
                bbox_to_anchor=(1.0, 1.0),
            )  # fmt: skip
        figure.suptitle(
            f"{_beginning(measured.name)}: {edges[-1]:,} steps measured",
            x=0.01, ha="left", fontsize=13, fontweight="bold",
        )  # fmt: skip
        figure.savefig(path, format="png")


def _binned_steps(measured: Measured) -> tuple[Int64s, dict[str, Floats]]:
    """The columns' means over runs of steps, and the steps between which these lie."""
    count = len(measured.steps["step"])
    columns = min(NUM_TIMES, count)
    edges = np.arange(columns + 1) * count // columns
    means = {
        name: np.add.reduceat(values.astype(np.float64), edges[:-1]) / np.diff(edges)
        for name, values in measured.steps.items()
    }
    return edges, means


def _draw_layers(
    axes: Any,
    edges: Int64s,
    means: dict[str, Floats],
    layers: tuple[tuple[str, str, str, float], ...],
) -> None:
    """Stack columns on one another; those that are always 0 are left out."""
    others = [column for column, *_ in layers if column.endswith(("_right", "_online"))]
    sides = any(means[column].any() for column in others)
    base = np.zeros(len(edges) - 1)
    for column, name, colour, strength in layers:
        if not means[column].any():
            continue
        top = base + means[column]
        axes.stairs(
            top, edges, baseline=base, fill=True, color=colour, alpha=strength,
            linewidth=0, label=name if sides else _WITHOUT_SIDES.get(column, name),
        )  # fmt: skip
        base = top
    axes.set_ylim(0, max(1.0, 1.05 * float(base.max())))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_times(axes: Any, edges: Int64s, means: dict[str, Floats]) -> None:
    for column, name, colour in (
        ("compute_s", "compute", COMPUTE),
        ("memory_s", "memory", MEMORY),
    ):
        axes.stairs(
            1000 * means[column], edges, baseline=None, color=colour, linewidth=1.8,
            label=name,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms a step")
    axes.set_title("Estimated time at the device's full rates")


def _draw_ratio(
    axes: Any, edges: Int64s, means: dict[str, Floats], figures: dict[str, Any]
) -> None:
    compute, memory = means["compute_s"], means["memory_s"]
    both = (compute > 0) & (memory > 0)
    ratio = np.full(len(compute), np.nan)
    np.divide(compute, memory, out=ratio, where=both)
    axes.stairs(
        ratio, edges, baseline=None, color="black", linewidth=1.5, label="ratio"
    )
    if both.any():
        whole = figures["compute_s"] / figures["memory_s"]
        axes.axhline(
            whole, color="black", linestyle="--", linewidth=1.2,
            label=f"all steps: {whole:.3g}",
        )  # fmt: skip
        axes.set_yscale("log")
        # A decade to either side at least: small differences are to look small.
        low, high = np.nanmin(ratio), np.nanmax(ratio)
        axes.set_ylim(min(0.8 * low, whole / 10), max(1.25 * high, 10 * whole))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylabel("compute time\n/ memory time")
    axes.set_title(
        f"How even the steps are: ratio spread {figures['ratio_spread']:.3g}"
    )


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:,.3f}"


def _beginning(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _end(path: str, most: int = 60) -> str:
    return path if len(path) <= most else f"...{path[3 - most :]}"
