"""Real SGLang on a CPU: steps, offloads and requests computed again, as simulated.

Three jobs of prompts that share prefixes, with the demo model and KV for 6,144 tokens. All
lengths are known, so that nothing has to be offloaded.
"""

from __future__ import annotations

from report import Figure, print_table

from .engine_counts import counts_of

POLICIES = ("length-tree", "length-aligned")
OFF = 2.0  # per cent


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has no targets."""
    counts = counts_of(POLICIES)
    columns = ("steps", "cached_tokens", "decode_tokens", "offloaded")
    table, figures = [], []
    for name, case in counts.items():
        real, simulated = case["real"], case["simulated"]
        for kind in ("real", "simulated"):
            table.append([name, kind, *(case[kind][column] for column in columns)])
        for column in ("steps", "cached_tokens"):
            off = 100 * abs(simulated[column] / real[column] - 1)
            what = f"{name}: {column.replace('_', ' ')}, real and simulated"
            figures.append(Figure(what, off, "%", None if quick else ("<=", OFF)))
    print_table("Real SGLang and the simulator", ["job", "", *columns], table)
    for column in ("offloaded", "offload_recomputed"):
        total = sum(case["real"][column] for case in counts.values())
        figures.append(Figure(column.replace("_", " "), total, "", ("=", 0)))
    return figures
