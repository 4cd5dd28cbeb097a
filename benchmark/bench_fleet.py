"""Many engines as one: sharing kept, stealing, faults, the head, jobs larger than memory.

    python benchmark/bench_fleet.py --list
    python benchmark/bench_fleet.py [PART ...] [--quick] [--save]

``faults`` and ``network`` start Ray clusters on this machine and kill their processes. They
take most of an hour; all others take minutes and need no Ray.
"""

from __future__ import annotations

import sys

from parts_main import Parts, run_parts

PARTS = Parts(
    about="Many engines as one: sharing, stealing, faults, the head, large jobs.",
    package="fleet_parts",
    names=("sharing", "stealing", "head", "planning", "network", "faults"),
    results="fleet.json",
)

if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
