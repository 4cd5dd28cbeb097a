"""Every door to the planner, and the engine behind them: figures and their targets.

    python benchmark/bench_doors.py                     all parts
    python benchmark/bench_doors.py lists stream        some of them
    python benchmark/bench_doors.py --list              the parts, a line each

Each part is a module of ``benchmark/doors``. Engines run on the CPU with the demo model,
stock SGLang and ours, each in a process of its own. The last line is one JSON
document. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import sys

from parts_main import Parts, run_parts

PARTS = Parts(
    __doc__.partition("\n")[0],
    package="doors",
    names=(
        *("fair", "replicas", "lists", "trickle", "stream", "overhead", "host_time"),
        *("mixed", "pages", "host_pool"),
    ),
    results="doors.json",
)


if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
