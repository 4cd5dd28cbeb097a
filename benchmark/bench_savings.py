"""Tokens that need not be computed.

    python benchmark/bench_savings.py --list
    python benchmark/bench_savings.py [PART ...] [--quick] [--save]

Runs the demo model with ``sglang-batch run``, on a CPU.
"""

from __future__ import annotations

import sys

from parts_main import Parts, run_parts

PARTS = Parts(
    about="Tokens that need not be computed: equal requests, rollouts.",
    package="savings_parts",
    names=("equal", "rollouts"),
    results="savings.json",
)

if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
