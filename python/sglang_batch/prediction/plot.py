"""The figures of ``--plot``: policies against the bounds, or a run's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..config import ORDERS, POLICY_TABLE
from ..planner.requests import Floats, Int64s
from ..planner.simulator.simulator import Simulation
from .report import Measured, Report, time_unit

# Two colours for compute and memory and two for policies, distinct in grey print too.
COMPUTE, MEMORY = "#d1495b", "#2e6f95"
CHOSEN, OTHER = "#5b2a86", "#b9a6cc"
ONLINE, SHARED, KEPT = "#e08e1b", "#5b2a86", "#b3b3b3"
NUM_TIMES = 120
# Layers of a step, from the bottom up: column, name, colour, opacity.
_TOKENS = (
    ("prefill_left", "prefill, prompt-heavy", COMPUTE, 0.95),
    ("prefill_right", "prefill, output-heavy", MEMORY, 0.95),
    ("prefill_online", "prefill, online", ONLINE, 0.95),
    ("decode_left", "decode, prompt-heavy", COMPUTE, 0.45),
    ("decode_right", "decode, output-heavy", MEMORY, 0.45),
    ("decode_online", "decode, online", ONLINE, 0.45),
)
_KV = (
    ("kv_shared", "shared prefixes", SHARED, 0.85),
    ("kv_left", "prompt-heavy", COMPUTE, 0.85),
    ("kv_right", "output-heavy", MEMORY, 0.85),
    ("kv_online", "online", ONLINE, 0.85),
    ("kv_cached", "cached, unused now", KEPT, 0.6),
)
_WITHOUT_SIDES = {
    "prefill_left": "prefill",
    "decode_left": "decode",
    "kv_left": "running requests",
}

# Policies to compare the chosen one with, the first of them that was simulated: the
# simplest order, then orders that are taken from both ends.
_COUNTERPARTS = (ORDERS[0], *(name for name in ORDERS if POLICY_TABLE[name].both_ends))

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
    """Draw all policies against the bounds, and how busy two of them keep the device.

    The upper panels have a bar for each policy: its time, with the tightest bound as a
    line, and the share of prompt tokens that it finds in the cache, with that of a perfect cache.
    Those below show how busy arithmetic and memory are, for the chosen policy and one to compare it
    with, and the KV length of the rows that run: their mean, and the longest.
    """
    import matplotlib
    from matplotlib.figure import Figure

    forecast = report.forecast
    others = [name for name in forecast.ranking if name != report.chosen]
    counterparts = [name for name in _COUNTERPARTS if name in others]
    policies = [report.chosen, *(counterparts or others)[:1]]
    bars = 1.2 + 0.34 * len(forecast.runs)
    with matplotlib.rc_context(_STYLE):
        # A figure of its own, not pyplot's: no window system, no global state.
        figure = Figure(figsize=(12, 6.4 + bars), dpi=150, layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(bars, 3.2, 2.4))
        times = figure.add_subplot(grid[0, 0])
        _draw_times_of_policies(times, report)
        _draw_cached_shares(figure.add_subplot(grid[0, 1], sharey=times), report)
        longest = max(forecast.runs[name].seconds for name in policies)
        unit = time_unit(longest)
        both = len(policies) == 2
        columns = [slice(0, 1), slice(1, 2)] if both else [slice(0, 2)]
        for row, draw, name, place in (
            (1, _draw_busy, "share of the time busy", "upper right"),
            (2, _draw_lengths, "tokens of KV of a row", "lower right"),
        ):
            first: Any = None
            for column, policy in zip(columns, policies, strict=True):
                axes = figure.add_subplot(grid[row, column], sharey=first)
                draw(axes, forecast.runs[policy], longest)
                axes.set_xlim(0, longest / unit.seconds)
                axes.set_xlabel(f"time ({unit.name})")
                axes.set_title(f"{policy}: {axes.get_title()}")
                first = first or axes
            first.set_ylabel(name)
            first.legend(loc=place, ncols=2)
        figure.suptitle(
            f"{_beginning(report.job)}: {forecast.job.tree.num_requests:,} requests, "
            f"{forecast.job.tree.num_tokens:,} prompt tokens\n"
            f"{_end(report.machine.model)} on {report.machine.devices}",
            x=0.01, ha="left", fontsize=13, fontweight="bold",
        )  # fmt: skip
        figure.savefig(path, format="png")


def _draw_times_of_policies(axes: Any, report: Report) -> None:
    """A bar for each policy, fastest on top, and the tightest bound."""
    forecast = report.forecast
    seconds = [forecast.runs[name].seconds for name in forecast.ranking]
    bound = forecast.bounds.tightest_s
    unit = time_unit(max(seconds))
    labels = [
        f"{unit.text(value)}  ({value / bound - 1:.1%} above the bound)"
        for value in seconds
    ]
    line = f"no schedule is faster: {unit.text(bound)}"
    values = [value / unit.seconds for value in seconds]
    _draw_bars(axes, report, values, labels, (bound / unit.seconds, line))
    # Room for the labels behind the bars.
    axes.set_xlim(0, 1.95 * max(seconds) / unit.seconds)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel(f"time ({unit.name})")
    axes.set_title("Predicted time of each policy")


def _draw_cached_shares(axes: Any, report: Report) -> None:
    """A bar for each policy, and the share of a perfect cache."""
    forecast = report.forecast
    shares = [
        forecast.runs[name].achieved_prefix_sharing_ratio for name in forecast.ranking
    ]
    possible = forecast.job.tree.prefix_sharing_ratio
    labels = [f"{share:.1%}" for share in shares]
    line = f"a perfect cache: {possible:.1%}"
    _draw_bars(axes, report, shares, labels, (possible, line))
    axes.set_xlim(0, 1.15)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the prompt tokens")
    axes.set_title("Prompt tokens found in the cache")
    axes.tick_params(labelleft=False)


def _draw_bars(
    axes: Any,
    report: Report,
    values: list[float],
    labels: list[str],
    best: tuple[float, str],
) -> None:
    """A bar for each policy, and a line at the best possible value with its name."""
    ranking = report.forecast.ranking
    colours = [CHOSEN if name == report.chosen else OTHER for name in ranking]
    bars = axes.barh(range(len(ranking)), values, height=0.66, color=colours)
    axes.bar_label(bars, labels, padding=4, fontsize=10)
    axes.set_yticks(range(len(ranking)), ranking)
    # The fastest on top, and room below for the legend.
    axes.set_ylim(len(ranking) + 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.axvline(best[0], color="black", linestyle="--", linewidth=1.4, label=best[1])
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, -0.02), frameon=True, edgecolor="none"
    )


def _draw_busy(axes: Any, simulation: Simulation, longest: float) -> None:
    """Arithmetic and memory reads as shares of the time."""
    seconds, compute, memory = _binned_by_time(simulation.samples[:3])
    edges = np.concatenate([[0.0], np.cumsum(seconds)]) / time_unit(longest).seconds
    busy = np.maximum(seconds, 1e-300)
    for part, colour, name in (
        (compute / busy, COMPUTE, "arithmetic"),
        (memory / busy, MEMORY, "memory reads"),
    ):
        axes.stairs(part, edges, baseline=None, color=colour, linewidth=1.8, label=name)
        axes.stairs(part, edges, color=colour, alpha=0.12, fill=True)
    axes.set_ylim(0, 1.2)  # room for the legend
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title("how busy the device is")


def _draw_lengths(axes: Any, simulation: Simulation, longest: float) -> None:
    """The KV length of the rows that run. What is between the two lines is uneven work."""
    samples = simulation.samples
    seconds, _, _, rows, tokens, longest_row = _binned_by_time(samples)
    # Sums over the same steps: tokens by rows is the mean, weighted by rows. The longest
    # row is a sum over steps, whose number a column of samples does not have.
    steps = _binned_by_time(np.vstack([samples[0], samples[5] > 0]))[1]
    edges = np.concatenate([[0.0], np.cumsum(seconds)]) / time_unit(longest).seconds
    mean = tokens / np.maximum(rows, 1)
    columns = max(1, samples.shape[1])
    per_column = max(1, -(-simulation.num_steps // columns))
    most = np.maximum(mean, longest_row / np.maximum(steps * per_column, 1))
    for values, colour, name in ((most, CHOSEN, "longest"), (mean, OTHER, "mean")):
        axes.stairs(
            values, edges, baseline=None, color=colour, linewidth=1.6, label=name
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title("KV length of the rows that run")


def _binned_by_time(samples: Floats) -> Floats:
    """Samples summed into at most ``NUM_TIMES`` columns of about equal time."""
    samples = samples[:, samples[0] > 0]
    if samples.shape[1] == 0:
        return np.zeros((len(samples), 0))
    end = np.cumsum(samples[0])
    column = np.ceil(end / end[-1] * NUM_TIMES).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    return np.add.reduceat(samples, first, axis=1)


def plot_steps(measured: Measured, path: Path) -> None:
    """Draw the steps of a run, as a PNG: tokens, KV, times and the times' ratio.

    Long runs have ``NUM_TIMES`` columns, each the mean of its steps.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 10), dpi=150, layout="constrained")
        panels = figure.subplots(4, 1, sharex=True, height_ratios=(1.2, 1.2, 0.9, 0.9))
        edges, means = _binned_steps(measured)
        _draw_layers(panels[0], edges, means, _TOKENS)
        panels[0].set_ylabel("tokens of a step")
        panels[0].set_title("Computed tokens: prompts below, decodes above")
        _draw_layers(panels[1], edges, means, _KV)
        panels[1].set_ylabel("tokens of KV")
        panels[1].set_title("Tokens in the KV cache")
        compute, memory = means["compute_s"], means["memory_s"]
        unit = time_unit(float(max(compute.max(), memory.max())))
        for times, name, colour in (
            (compute, "compute", COMPUTE),
            (memory, "memory", MEMORY),
        ):
            panels[2].stairs(
                times / unit.seconds, edges, baseline=None, color=colour,
                linewidth=1.8, label=name,
            )  # fmt: skip
        panels[2].set_ylim(bottom=0)
        panels[2].set_ylabel(f"{unit.name} a step")
        panels[2].set_title("Estimated time at the device's full rates")
        _draw_ratio(panels[3], edges, means, measured.figures())
        panels[3].set_xlim(0, edges[-1])
        panels[3].set_xlabel("steps")
        panels[3].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        for axes in panels:
            # The legend lists layers from the top down, as they are drawn.
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
    """Step numbers that bound the columns, and each value's mean within a column."""
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
    """Stack the layers on one another, without those that are always 0."""
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
        # At least a decade to either side, so that small differences look small.
        low, high = np.nanmin(ratio), np.nanmax(ratio)
        axes.set_ylim(min(0.8 * low, whole / 10), max(1.25 * high, 10 * whole))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylabel("compute time\n/ memory time")
    axes.set_title(
        f"How even the steps are: ratio spread {figures['ratio_spread']:.3g}"
    )


def _beginning(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _end(path: str, most: int = 60) -> str:
    return path if len(path) <= most else f"...{path[3 - most :]}"
