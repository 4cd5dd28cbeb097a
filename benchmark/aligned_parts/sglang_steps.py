"""Real SGLang on a CPU: steps, offloads and requests computed again, as simulated.

Three jobs of prompts that share prefixes, with the demo model and KV for 6,144 tokens. All
lengths are known, so that nothing has to be offloaded. In a fourth job, prompts of many lengths,
batches are switched by a law in which the longest row decides, and rows of the old one are
parked.
"""

from __future__ import annotations

from report import Figure, print_table

from .engine_counts import counts_of

POLICIES = ("length-tree", "length-aligned")
OFF = 2.0  # per cent
# A law by which rows are parked, with a buffer for KV that comes back.
PARKING, BUFFER = 33.0, {"prefetch_bytes": 2_000_000}


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has no targets."""
    counts = counts_of(POLICIES)
    parking = counts_of(POLICIES[:1], ["lengths"], PARKING, BUFFER)
    columns = ("steps", "cached_tokens", "decode_tokens", "offloaded")
    table, figures = [], []
    for name, case in (counts | parking).items():
        real, simulated = case["real"], case["simulated"]
        for kind in ("real", "simulated"):
            table.append([name, kind, *(case[kind][column] for column in columns)])
        for column in ("steps", "offloaded" if name in parking else "cached_tokens"):
            off = 100 * abs(simulated[column] / real[column] - 1)
            what = f"{name}: {column.replace('_', ' ')}, real and simulated"
            figures.append(Figure(what, off, "%", None if quick else ("<=", OFF)))
    print_table("Real SGLang and the simulator", ["job", "", *columns], table)
    total = sum(case["real"]["offloaded"] for case in counts.values())
    figures.append(Figure("offloaded, but those parked", total, "", ("=", 0)))
    cases = [*counts.values(), *parking.values()]
    total = sum(case["real"]["offload_recomputed"] for case in cases)
    figures.append(Figure("offload recomputed", total, "", ("=", 0)))
    return figures
