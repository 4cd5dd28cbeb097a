"""The output of the benchmarks: tables, figures with their targets, a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numba
import numpy as np

RESULTS = Path(__file__).parent / "results"


def add_save(parser: argparse.ArgumentParser) -> None:
    """``--save``: the file of the JSON document, as a path or None."""
    parser.add_argument(
        "--save", type=_saved_at, metavar="NAME",
        help="also write results/NAME.json; a NAME that ends in .json is a path",
    )  # fmt: skip


def end_engines_at_sigterm() -> None:
    """Have SIGTERM end this process as an error does, and with it what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def paths_given(about: str | None, *names: str) -> list[Path]:
    """The paths on the command line of a script that takes nothing else.

    about: its text, which ``--help`` prints.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in names:
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    return [getattr(options, name) for name in names]


def _saved_at(name: str) -> Path:
    return Path(name) if name.endswith(".json") else RESULTS / f"{name}.json"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number.

    target: ``("<=", 2.0)``, ``(">=", 0.995)`` or ``("=", 3.74)``, the last for figures
        rounded as their source prints them. None for a number without a target.
    note: for comparison, such as the paper's figure, or how it was measured.
    """

    name: str
    value: float
    unit: str = ""
    target: tuple[str, float] | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met, or None without one."""
        if self.target is None:
            return None
        relation, bound = self.target
        if relation == "<=":
            return self.value <= bound
        if relation == ">=":
            return self.value >= bound
        return self.value == bound

    @property
    def row(self) -> list[str]:
        """Name, value, target, met, note."""
        bound = f"{self.target[0]} {self.target[1]:g}" if self.target else ""
        met = {None: "", True: "met", False: "NOT MET"}[self.met]
        return [self.name, f"{self.value:.5g} {self.unit}", bound, met, self.note]

    @property
    def as_json(self) -> dict[str, Any]:
        """The figure in the JSON document."""
        values = asdict(self)
        return {**values, "beside": values.pop("note"), "met": self.met}


def print_figures(title: str, figures: Sequence[Figure]) -> None:
    """Print a table of figures and their targets."""
    _print_columns(
        title,
        ["figure", "measured", "target", "", ""],
        [figure.row for figure in figures],
    )


# The tables printed so far, for the JSON document.
_TABLES: list[dict[str, Any]] = []
# Of a run that saves its results as they come: its file, and the results.
_UNFINISHED: list[tuple[Path, dict[str, Any]]] = []


def save_as_they_come(save: Path | None, results: dict[str, Any]) -> None:
    """From now on each table that is printed writes ``save``, so that a run that is cut
    off leaves what it has measured.

    results: further entries of the document, which the caller adds to.
    """
    _UNFINISHED.clear()
    if save is not None:
        _UNFINISHED.append((save, results))


def write_unfinished() -> None:
    """Write the results so far, in a run that saves them as they come."""
    for save, results in _UNFINISHED:
        _write({**results, "unfinished": True}, save)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print a table, and add it to the document of :func:`finish`."""
    _TABLES.append({"title": title, "header": header, "rows": rows})
    _print_columns(title, header, rows)
    write_unfinished()


def _print_columns(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print aligned columns. Those with a number in the first row are right-aligned."""
    print(f"\n{title}")
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [isinstance(cell, int | float) for cell in rows[0]] if rows else []
    right = right or [False] * len(widths)
    for row in cells:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print(f"  {'  '.join(padded)}".rstrip())
    sys.stdout.flush()


@cache
def machine() -> dict[str, str | int]:
    """The machine, the libraries and the commit that were measured."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        **_versions("torch", "triton", "transformers", "sglang"),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def finish(results: dict[str, Any], save: Path | None = None) -> None:
    """Print one JSON document as the last line, and write it to ``save`` if given.

    The tables printed so far, the machine and the command line are added to it.
    """
    _UNFINISHED.clear()
    if save is None:
        document = _document(results)
    else:
        document = _write(results, save)
        print(f"\nsaved as {save}")
    print(json.dumps(document), flush=True)


def _document(results: dict[str, Any]) -> dict[str, Any]:
    # Only file names: the directories of this machine are private.
    named = [Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:]]
    command = " ".join([Path(sys.executable).name, sys.argv[0], *named])
    return {"command": command, "machine": machine(), **results, "tables": _TABLES}


def _write(results: dict[str, Any], save: Path) -> dict[str, Any]:
    """The document, which replaces ``save`` as a whole."""
    document = _document(results)
    save.parent.mkdir(parents=True, exist_ok=True)
    part = save.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(save)
    return document


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def _versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _commit() -> str:
    """The checked-out commit, with ``+`` where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "--", "..", ":!results"
        )
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
