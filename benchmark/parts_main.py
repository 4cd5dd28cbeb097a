"""The main of a benchmark that has parts: ``bench_doors.py`` and ``bench_dense.py``.

A part is a module of the benchmark's package, with ``measure(quick) -> list[Figure]``,
or ``measure(quick, repeats)`` where runs are repeated. The first line of its text is its
help.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from report import RESULTS, Figure, end_engines_at_sigterm, finish, print_figures


@dataclass(frozen=True, slots=True)
class Parts:
    """A benchmark with parts.

    about: the first line of its help.
    package: of the parts' modules.
    names: of the parts, in the order in which they run.
    results: of the file in ``results/`` that ``--save`` alone writes.
    repeats: how often runs are repeated by default. None: parts have no such number.
    """

    about: str
    package: str
    names: Sequence[str]
    results: str
    repeats: int | None = None


def run_parts(parts: Parts) -> int:
    """Run the parts that the command line names. The exit status: 1 if a target is missed."""
    options = _parse(parts)
    end_engines_at_sigterm()
    if options.list:
        for name in parts.names:
            about = importlib.import_module(f"{parts.package}.{name}").__doc__ or ""
            print(f"{name:<12} {about.partition(chr(10))[0]}")
        return 0
    settings = {"quick": options.quick}
    if parts.repeats is not None:
        settings["repeats"] = options.repeats
    figures: list[Figure] = []
    for name in options.parts or parts.names:
        module = importlib.import_module(f"{parts.package}.{name}")
        measured = module.measure(**settings)
        print_figures(name, measured)
        figures += measured
    missed = [figure.name for figure in figures if figure.met is False]
    document = {"figures": [figure.as_json for figure in figures], "missed": missed}
    finish(document, options.save)
    return 1 if missed else 0


def _parse(parts: Parts) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=parts.about)
    parser.add_argument(
        "parts", nargs="*", choices=[*parts.names, []], metavar="PART",
        help=f"{', '.join(parts.names)}; all by default",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, most of them without targets"
    )
    if parts.repeats is not None:
        parser.add_argument(
            "--repeats", type=int, metavar="N", default=parts.repeats,
            help=f"runs of which the median counts (default: {parts.repeats})",
        )  # fmt: skip
    default = RESULTS / parts.results
    parser.add_argument(
        "--save", type=Path, nargs="?", const=default, metavar="FILE",
        help=f"write the JSON to a file, results/{parts.results} by default",
    )  # fmt: skip
    options = parser.parse_args()
    if str(options.save) in parts.names:  # --save, followed by a part
        options.parts.insert(0, str(options.save))
        options.save = default
    return options
