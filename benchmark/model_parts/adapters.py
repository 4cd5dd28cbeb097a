"""400 lines over 12 LoRA adapters, 4 of them in memory at a time: how often one is loaded.

The demo model on a CPU, with KV for a part of the requests at a time. Loads are counted where
SGLang copies an adapter's weights into its pool. Beside it stock SGLang, which gets all
lines at once in the order of the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from adapter_job import Line, lines, shareable, write_checkpoints
from adapter_runs import run_adapters
from report import Figure, print_table

POLICIES = ("auto", "dfs", "dual-scan", "lpt")
ARGUMENTS = ("--max-running-requests=32", "--chunked-prefill-size=1024")
MOST = 4


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer lines, and the same targets."""
    number, adapters = (60, 6) if quick else (400, 12)
    job = lines(number, adapters)
    with tempfile.TemporaryDirectory() as folder:
        model, paths = write_checkpoints(Path(folder), adapters)
        stock = run_adapters(model, paths, job, *ARGUMENTS, most=MOST)["stock"]
        policies = POLICIES[:1] if quick else POLICIES
        found = {
            # An engine of its own, so that none finds adapters of the one before.
            policy: run_adapters(
                model, paths, job, *ARGUMENTS, most=MOST, policies=[policy]
            )[policy]
            for policy in policies
        }
    possible = shareable(job)
    rows = [
        [name, each["loads"], each["cached"], _share(each["cached"], job)]
        for name, each in {"stock SGLang": stock, **found}.items()
    ]
    print_table(
        f"{number} lines, {adapters} adapters, {MOST} at a time",
        ["", "adapters loaded", "tokens cached", "share of prompts"],
        rows,
    )
    figures = []
    for name, each in found.items():
        wrong = sum(a != b for a, b in zip(each["texts"], stock["texts"], strict=True))
        loads, kept = each["loads"] / adapters, each["cached"] / possible
        figures += [
            Figure(
                f"{name}: adapters loaded, of the least possible",
                loads,
                "",
                ("<=", 1.1),
                f"{each['loads']}; stock SGLang {stock['loads']}",
            ),
            Figure(f"{name}: cached tokens, of all possible", kept, "", (">=", 0.99)),
            Figure(f"{name}: answers unlike stock SGLang's", wrong, "", ("=", 0)),
        ]
    return figures


def _share(cached: int, job: list[Line]) -> str:
    return f"{cached / sum(len(line.prompt) for line in job):.1%}"
