"""Every door to the planner, and the engine behind them: figures and their targets.

    python benchmark/bench_doors.py                     all parts
    python benchmark/bench_doors.py lists stream        some of them
    python benchmark/bench_doors.py --list              what each measures

Each part is a module of ``benchmark/doors``. Engines run on the CPU with the demo model,
stock SGLang and ours, each in a process of its own. The last line is one JSON
document. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from report import RESULTS, Figure, finish, print_figures

# Each module has ``measure(quick) -> list[Figure]``; its first line of text is its help.
PARTS: tuple[str, ...] = (
    *("fair", "replicas", "lists", "trickle", "stream", "overhead", "host_time"),
    *("mixed", "pages", "host_pool"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, without targets"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the JSON to results/"
    )
    options = parser.parse_args()
    modules = {name: importlib.import_module(f"doors.{name}") for name in PARTS}
    if options.list:
        for name, module in modules.items():
            print(f"{name:<12} {(module.__doc__ or '').partition(chr(10))[0]}")
        return 0
    figures: list[Figure] = []
    for name in options.parts or PARTS:
        measured = modules[name].measure(options.quick)
        print_figures(name, measured)
        figures += measured
    missed = [figure.name for figure in figures if figure.met is False]
    save = RESULTS / "doors.json" if options.save else None
    finish({"figures": [figure.as_json for figure in figures], "missed": missed}, save)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
