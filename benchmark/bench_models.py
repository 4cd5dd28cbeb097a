"""The models and features of today under the plan.

    python benchmark/bench_models.py             all parts
    python benchmark/bench_models.py windows     some of them
    python benchmark/bench_models.py --list      the parts, a line each

Each part is a module of ``benchmark/model_parts``. Engines run on tiny random checkpoints, with
little KV. The last line is one JSON document. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch is imported by a part, and for the engines it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1] / "test" / "helpers"))

from parts_main import Parts, run_parts

PARTS = Parts(
    __doc__.partition("\n")[0],
    package="model_parts",
    names=(
        "families",
        "windows",
        "states",
        "few_states",
        "simulated",
        "answers",
        "adapters",
        "images",
        "speculation",
    ),
    results="models.json",
)


if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
