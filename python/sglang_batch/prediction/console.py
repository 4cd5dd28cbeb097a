"""The output of ``plan`` and ``simulate``: progress, tables, JSON and figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from ..errors import ConfigError, ExitStatus, InputError
from ..scheduling.step_record import read_steps
from .report import Measured, Report
from .table import measured_table, table


def progress(policies: Iterable[str]) -> Iterable[str]:
    """Each policy once, with a progress bar on stderr."""
    names = list(dict.fromkeys(policies))
    return tqdm(names, desc="Simulating", unit="policy", dynamic_ncols=True)


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
        print(table(report))
        if measured is not None:
            chosen = report.forecast.runs[report.chosen].simulation
            print(f"\n{measured_table(measured, report.chosen, chosen)}")
    if options.plot is not None:
        from .plot import plot, plot_steps

        if measured is None:
            plot(report, options.plot)
        else:
            plot_steps(measured, options.plot)
        print(f"\nwrote {options.plot}", file=sys.stderr)
    return ExitStatus.OK


def show_measured(measured: Measured, options: argparse.Namespace) -> int:
    """Print and draw measured steps without a prediction; returns the exit status."""
    print(measured.as_json() if options.json else measured_table(measured))
    if options.plot is not None:
        from .plot import plot_steps

        plot_steps(measured, options.plot)
        print(f"\nwrote {options.plot}", file=sys.stderr)
    return ExitStatus.OK
