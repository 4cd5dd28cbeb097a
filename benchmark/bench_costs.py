"""The cost model: predicted against published and measured times, and its choices.

    python benchmark/bench_costs.py                  all parts
    python benchmark/bench_costs.py published        some of them
    python benchmark/bench_costs.py --list           the parts, a line each

Each part is a module of ``benchmark/cost_parts``. The last line is one JSON document. The exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import os
import sys

# Before numba and torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from parts_main import Parts, run_parts

PARTS = Parts(
    __doc__.partition("\n")[0],
    package="cost_parts",
    names=("published", "choices", "halves", "measured"),
    results="costs.json",
)

if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
