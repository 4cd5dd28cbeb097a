"""Tokens that need not be computed.

    python benchmark/bench_savings.py --list
    python benchmark/bench_savings.py [PART ...] [--quick] [--save]

Runs the demo model, on a CPU. ``frames`` installs a package in a folder of its own.
"""

from __future__ import annotations

import sys

from parts_main import Parts, run_parts

PARTS = Parts(
    about="Tokens that need not be computed, and their cost if they were.",
    package="savings_parts",
    names=(
        "equal",
        "fields",
        "rules",
        "tail",
        "rollouts",
        "streams",
        "frames",
    ),
    results="savings.json",
)

if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
