"""The dense engine: steps and processor time against other ways to run transformers.

    python benchmark/bench_dense.py                  all parts
    python benchmark/bench_dense.py small memory     some of them
    python benchmark/bench_dense.py --list           the parts, a line each

Each part is a module of ``benchmark/dense_parts``. Random models of up to 108 million
parameters run on one CPU core, in float32, greedy, to lengths that are set. All ways of a
row take turns, ``--repeats`` times; medians count, and all answers are compared. The
progress is on stderr. The last line is one JSON document. The exit status is 1 if a
target is missed.
"""

from __future__ import annotations

import os
import sys

# Before torch and the engines are started, which get the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from parts_main import Parts, run_parts

PARTS = Parts(
    __doc__.partition("\n")[0],
    package="dense_parts",
    names=(
        "steps",
        "small",
        "large",
        "sglang",
        "sharing",
        "memory",
        "packed",
        "models",
    ),
    results="dense.json",
    repeats=3,
)


def main() -> int:
    torch.set_num_threads(1)
    # Continuous batching warns of each request that has no ending token.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with torch.inference_mode():
        return run_parts(PARTS)


if __name__ == "__main__":
    sys.exit(main())
