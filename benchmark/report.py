"""The output of the benchmarks: tables, figures with their targets, a line of JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numba
import numpy as np

RESULTS = Path(__file__).parent / "results"


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


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print a table, and add it to the document of :func:`finish`."""
    _TABLES.append({"title": title, "header": header, "rows": rows})
    _print_columns(title, header, rows)


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


def machine() -> dict[str, str | int]:
    """The machine, the libraries and the commit that were measured."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        **_versions("torch", "transformers", "sglang"),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def finish(results: dict[str, Any], save: Path | None = None) -> None:
    """Print one JSON document as the last line, and write it to ``save`` if given.

    The tables printed so far, the machine and the command line are added to it.
    """
    # Only file names: the directories of this machine are private.
    named = [Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:]]
    command = [Path(sys.executable).name, sys.argv[0], *named]
    document = {"command": " ".join(command), "machine": machine(), **results}
    document["tables"] = _TABLES
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nsaved as {save}")
    print(json.dumps(document), flush=True)


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
