"""AlignedServe: batches of requests with KV of similar length, against its promises.

    python benchmark/bench_aligned.py                  all parts
    python benchmark/bench_aligned.py traces forming   some of them
    python benchmark/bench_aligned.py --list           the parts, a line each
    TRACES=DIR python benchmark/bench_aligned.py traces

Each part is a module of ``benchmark/aligned_parts``. ``TRACES`` names a folder with the open
files of lengths (Azure LLM 2023, ShareGPT as in NanoFlow, arXiv as in Vidur); without it,
lengths are drawn with the moments of these files. The last line is one JSON document. The exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import os
import sys

# Before torch is imported by a part, and for the engines it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from parts_main import Parts, run_parts

PARTS = Parts(
    __doc__.partition("\n")[0],
    package="aligned_parts",
    names=(
        "choices",
        "starvation",
        "forming",
        "traces",
        "parking",
        "dense_engine",
        "sglang_steps",
        "kv_pool",
        "two_processes",
    ),
    results="aligned.json",
)


if __name__ == "__main__":
    sys.exit(run_parts(PARTS))
