"""The output of ``plan`` and ``simulate``: tables, progress, JSON and figures."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..config import ORDERS, POLICY_TABLE
from ..errors import ConfigError, ExitStatus, InputError
from ..inputs.local_input import late_bar
from ..planner.simulator.simulator import Simulation
from ..run.progress import aligned
from ..scheduling.step_record import read_steps
from .report import LeftOut, Measured, Report, rate_text, time_text, time_unit

MAX_NAMES_SHOWN = 5
# The verdict compares with the fastest other policy, and with these if simulated.
BASELINES = (
    ORDERS[0],
    *(name for name in ORDERS if not POLICY_TABLE[name].uses_prompts),
)
_LABEL_WIDTH = 26
# Late text is worth a line if it is at least this share of the tokens to compute.
LATE_SHARE = 0.05

# The figures of measured steps that are printed, and their labels.
_MEASURED = {
    "num_steps": "steps",
    "prefill_tokens": "prompt tokens computed",
    "cached_tokens": "prompt tokens cached",
    "decode_tokens": "tokens decoded",
    "max_kv_tokens": "most KV tokens in use",
    "evicted_tokens": "KV tokens evicted",
    "offloaded": "requests offloaded",
    "resumed": "requests resumed",
    "retracted": "requests retracted",
    "compute_s": "compute time",
    "memory_s": "memory time",
    "ratio_spread": "ratio spread",
}


Row = tuple[str, str]


def answer(report: Report) -> str:
    """The prediction in three lines: time, money, advice; and others if there is late text, or
    if requests are left out."""
    runs, machine = report.forecast.runs, report.machine
    run = report.policy_figures(runs[report.chosen])
    rates = "costs of timed steps"
    if not machine.calibrated:
        rates = "not calibrated: `sglang-batch calibrate`, or a run, measures the rates"
    cost = "unknown; name the price of a device with --price-per-gpu-hour"
    if "dollars" in run:
        cost = (
            f"${run['dollars']:,.2f} at ${report.gpu_price:g} an hour for each device"
        )
    slowest = max(each.seconds for each in runs.values())
    advice = _conclusion(report)
    if len(runs) == 1:
        advice = "leave out --policy to compare all orders."
    elif slowest <= 1.01 * run["seconds"]:
        advice = f"{report.verdict}; the others are within 1 %."
    num = report.forecast.job.tree.num_requests
    left_out = [": ".join(filter(None, row)) for row in _left_out_rows(report.left_out)]
    return "\n".join(
        [
            f"Time: {time_text(run['seconds'])} for {num:,} requests on {machine.devices} "
            f"({rates})",
            f"Cost: {cost}",
            f"Advice: {advice} --all prints all figures.",
            *(f"{label.capitalize()}: {text}" for label, text in _late_rows(report)),
            *left_out,
        ]
    )


def table(report: Report) -> str:
    machine = report.machine
    note = f" ({machine.hardware_note})" if machine.hardware_note else ""
    name = f"{machine.model} on {machine.devices}{note}"
    parts = [
        _section(f"Job: {report.job}", _job_rows(report)),
        _section(f"Machine: {name}", _machine_rows(report)),
        _section("Bounds: no schedule is faster than", _bound_rows(report)),
        _policies(report),
        _conclusion(report),
    ]
    return "\n\n".join(parts)


def _job_rows(report: Report) -> list[Row]:
    figures = report.job_figures()
    requests = f"{figures['requests']:,}"
    if report.num_lines is not None:
        requests += f"  (of {report.num_lines:,} lines)"
    rows = [("requests", requests)]
    if report.num_merged:
        rows.append(("merged", f"{report.num_merged:,} that are equal to others"))
    rows += _left_out_rows(report.left_out)
    rows += [
        ("prompt tokens", f"{figures['prompt_tokens']:,}"),
        (
            "unique prompt tokens",
            f"{figures['unique_prompt_tokens']:,}  (a perfect prefix cache saves "
            f"{figures['prefix_sharing_ratio']:.1%})",
        ),
    ]
    if (own := report.own_order_tokens) is not None:
        rows.append(("  in own order of fields", f"{own:,}"))
    rows += [
        *_late_rows(report),
        (
            "output tokens",
            f"{figures['expected_output_tokens']:,.0f}  ({report.lengths})",
        ),
        ("reading KV for decodes", _kv_reads(report)),
        (
            "compute density",
            f"{_number(figures['compute_density'])}  (compute time / memory time of "
            "the whole job)",
        ),
        (
            "density of requests",
            "  ".join(
                f"p{q} {_number(figures[f'compute_density_p{q}'])}" for q in (5, 50, 95)
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


def _kv_reads(report: Report) -> str:
    f = report.forecast
    unit = time_unit(f.kv_read_s)
    alone, shared = unit.text(f.kv_read_s), unit.text(f.kv_read_shared_s)
    if f.job.machine.cost.shared_kv_read_once:
        return f"{shared}  ({alone} without shared-prefix attention)"
    return f"{alone}  ({shared} with shared-prefix attention)"


def _machine_rows(report: Report) -> list[Row]:
    cost, limits = report.forecast.job.machine.cost, report.forecast.job.machine.limits
    rows = [
        ("KV capacity", f"{limits.kv_capacity_tokens:,} tokens"),
        ("step size", f"at most {limits.step_tokens:,} tokens"),
        ("computes", _rate(cost.token_time_s)),
        ("reads KV of", _rate(cost.kv_read_time_s)),
    ]
    if cost.weight_read_time_s:
        least = time_text(cost.weight_read_time_s)
        if cost.table is None:
            rows.append(("reads all weights in", f"{least}, in every step"))
        else:
            rows.append(("a small step takes", f"{least}, most of it to read weights"))
    if cost.padded:
        rows.append(("KV of a row", "read as far as the longest row's"))
    elif cost.row_share:
        rows.append(("one row alone uses", f"at most 1/{cost.row_share:.3g} of it"))
    return [*rows, ("compute and memory", _overlap(cost.interference_exponent))]


def _bound_rows(report: Report) -> list[Row]:
    b, cost = report.forecast.bounds, report.forecast.job.machine.cost
    exponent = cost.interference_exponent
    weights = f"with the weights, read in {b.min_steps:,} steps"
    note = weights if cost.weight_read_time_s else ""
    rows = [
        ("compute", b.compute_s, ""),
        ("memory", b.memory_s, note),
        ("the longest request", b.critical_path_s, "alone in the engine"),
        ("held KV, read once a step", b.kv_area_s, note),
        ("perfect overlap", b.ideal_s, "the larger of compute and memory"),
    ]
    if 1 < exponent < math.inf:
        law = f"with exponent {exponent:g}, if all steps have the job's density"
        rows.append(("overlap", b.law_s, law))
        rows.append(("no overlap", b.sum_s, "no bound: some schedules are faster"))
    elif exponent == 1:
        rows.append(("no overlap", b.sum_s, "compute, then memory"))
    rows.append(("tightest bound", b.tightest_s, ""))
    unit = time_unit(b.sum_s)
    width = max(len(unit.number(seconds)) for _, seconds, _ in rows)
    return [
        (name, f"{unit.number(seconds):>{width}} {unit.name}  {note}".rstrip())
        for name, seconds, note in rows
    ]


def _policies(report: Report) -> str:
    f = report.forecast
    slowest = max(run.seconds for run in f.runs.values())
    unit = time_unit(slowest)
    header = (
        "  policy", f"time ({unit.name})", "tokens/s", "cache hits", "of possible", "steps",
        "retractions", "of bound", "tail", *(["cost"] * (report.gpu_price is not None)),
    )  # fmt: skip
    lines = [header]
    for name in f.ranking:
        run = report.policy_figures(f.runs[name])
        possible = run["share_of_optimal_sharing"]
        lines.append(
            (
                ("* " if name == report.chosen else "  ") + name,
                unit.number(run["seconds"]),
                rate_text(run["tokens_per_second"]),
                f"{run['prefix_sharing_ratio']:.1%}",
                "-" if possible is None else f"{possible:.1%}",
                f"{run['steps']:,}",
                f"{run['retractions']:,}",
                f"{run['share_of_bound']:.1%}",
                f"{run['tail_s'] / max(run['seconds'], 1e-300):.1%}",
                *([f"${run['dollars']:,.4f}"] if "dollars" in run else []),
            )
        )
    return "Predicted, fastest first\n" + aligned(lines, "<" + ">" * (len(header) - 1))


def _conclusion(report: Report) -> str:
    """The verdict, and how much faster or slower the chosen policy is than others."""
    f = report.forecast
    seconds = {name: run.seconds for name, run in f.runs.items()}
    others = [name for name in f.ranking if name != report.chosen]
    if not others:
        return f"{report.verdict}."
    named = dict.fromkeys([others[0], *(n for n in BASELINES if n in others)])
    compared = [
        _compared(seconds[name] / seconds[report.chosen], name) for name in named
    ]
    return f"{report.verdict}: {', '.join(compared)}."


def _late_rows(report: Report) -> list[Row]:
    late, tree = report.late_tokens, report.forecast.job.tree
    if late < LATE_SHARE * tree.num_unique_tokens:
        return []
    seconds = late * report.forecast.job.machine.cost.token_time_s
    text = (
        f"about {late:,} tokens of text that many prompts share come after text or images "
        f"that differ; placed first, they would save {time_text(seconds)} of computing."
    )
    return [("late text", text)]


def _left_out_rows(left_out: Sequence[LeftOut]) -> list[Row]:
    if not left_out:
        return []
    rows = [("left out", f"{len(left_out):,} that cannot run:")]
    rows += [("", f"{each.name}: {each.reason}") for each in left_out[:MAX_NAMES_SHOWN]]
    more = len(left_out) - MAX_NAMES_SHOWN
    return [*rows, ("", f"... and {more:,} more")] if more > 0 else rows


def _compared(ratio: float, name: str) -> str:
    change = ratio - 1
    if abs(change) < 0.0005:
        return f"as fast as {name}"
    if ratio >= 2:
        return f"{ratio:.1f} times as fast as {name}"
    return f"{abs(change):.1%} {'faster' if change > 0 else 'slower'} than {name}"


def _section(title: str, rows: list[Row]) -> str:
    lines = [f"  {name:<{_LABEL_WIDTH}}{value}".rstrip() for name, value in rows]
    return "\n".join([title, *lines])


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:,.3g}"


def _rate(seconds_each: float) -> str:
    return f"{rate_text(1 / seconds_each)} tokens/s" if seconds_each else "unlimited"


def _overlap(exponent: float) -> str:
    if exponent == 1:
        return "one after the other (overlap exponent 1)"
    if math.isinf(exponent):
        return "overlap perfectly"
    return f"overlap with exponent {exponent:g} (1 = not at all, inf = perfectly)"


def measured_table(
    measured: Measured, policy: str = "", predicted: Simulation | None = None
) -> str:
    """Measured steps, with the prediction for a policy in a second column if given."""
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
    lines = []
    for name, label in _MEASURED.items():
        values = [found[name], *([expected.get(name)] if expected else [])]
        if name.endswith("_s"):
            unit = time_unit(max(values))
            label = f"{label} ({unit.name})"
            texts = [unit.number(value) for value in values]
        else:
            texts = [_figure(value) for value in values]
        columns = "  ".join(f"{text:>14}" for text in texts)
        lines.append(f"  {label:<{_LABEL_WIDTH}}{columns}")
    if expected:
        lines.insert(0, f"  {'':<{_LABEL_WIDTH}}{'measured':>14}  {policy:>14}")
    return "\n".join([f"Measured: {measured.name}", *lines])


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def progress(policies: Iterable[str]) -> Iterable[str]:
    """Each policy once, with a progress bar on stderr."""
    names = list(dict.fromkeys(policies))
    return late_bar(names, desc="Simulating", unit="policy")


def check_plot(path: Path | None) -> None:
    """Check that a figure can be written, before the work is done.

    Raises:
        ConfigError: it cannot.
    """
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path} must end in .png.")
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a directory" if path.is_dir() else "its directory is missing"
        raise ConfigError(f"cannot write --plot {path}: {reason}.")


def read_measured(path: Path) -> Measured:
    """The steps that a server logged.

    Raises:
        InputError: the file is not a log of steps, or it is empty.
    """
    steps = read_steps(path)
    if not len(steps["step"]):
        raise InputError(f"{path} has no step yet; wait for the run to make some.")
    return Measured(path.name, steps)


def show(report: Report, options: argparse.Namespace) -> int:
    """Print the report and draw the figure; returns the exit status."""
    measured = report.measured
    if options.json:
        print(report.as_json())
    else:
        in_full = getattr(options, "all", True) or measured is not None
        print(table(report) if in_full else answer(report))
        if measured is not None:
            chosen = report.forecast.runs[report.chosen]
            print(f"\n{measured_table(measured, report.chosen, chosen)}")
    return _draw(measured or report, options.plot)


def show_measured(measured: Measured, options: argparse.Namespace) -> int:
    """Print and draw measured steps without a prediction; returns the exit status."""
    print(measured.as_json() if options.json else measured_table(measured))
    return _draw(measured, options.plot)


def _draw(shown: Report | Measured, path: Path | None) -> int:
    if path is not None:
        from .plot import plot, plot_steps

        if isinstance(shown, Measured):
            plot_steps(shown, path)
        else:
            plot(shown, path)
        print(f"\nwrote {path}", file=sys.stderr)
    return ExitStatus.OK
