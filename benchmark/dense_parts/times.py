"""Processor time of one model's jobs, by every way to run them on transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from report import Figure, print_table

from dense_parts.jobs import Task, longest_first, mixed, sharegpt
from dense_parts.turns import Ways, compared
from dense_parts.ways import continuous, dense, llama, llama_copy, static
from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseSettings

# How many times our processor time the others have to take.
LEAST = {"static": 2.0, "sorted": 1.2, "continuous": 1.0}


def jobs(quick: bool) -> dict[str, list[Task]]:
    """Known lengths: long and short in 1:1:2, and those of ShareGPT, a quarter as long."""
    if quick:
        return {"1:1:2": mixed(8, 40, (3, 10), 1), "ShareGPT": sharegpt(8, 0.05, 1)}
    return {"1:1:2": mixed(32, 160, (3, 40), 1), "ShareGPT": sharegpt(32, 0.25, 1)}


def times_of(layers: int, hidden: int, quick: bool, repeats: int) -> list[Figure]:
    """The figures of a model, by job and batch size."""
    plain = llama(layers, hidden)
    model = wrap(llama_copy(plain))
    figures, rows, surgery = [], [], []
    for name, tasks in jobs(quick).items():
        for batch in (4,) if quick else (8, 16):
            label = f"{layers}x{hidden}, {name}, batch {batch}"
            ways = _ways(plain, model, tasks, batch)
            done = compared(label, plain, tasks, ways, repeats)
            ours = done["dense"]
            rows.append([label, *(f"{each.cpu_s:.2f}" for each in done.values())])
            surgery.append(ours.surgery_s / ours.cpu_s)
            figures += [
                Figure(
                    f"{label}: {way} over dense",
                    done[way].cpu_s / ours.cpu_s,
                    "x",
                    None if quick else (">=", least),
                )
                for way, least in LEAST.items()
            ]
            cells = ours.cells / done["static"].cells
            most = None if quick else ("<=", 1.0)
            figures.append(
                Figure(f"{label}: peak KV cells over static's", cells, "x", most)
            )
    print_table("Processor seconds", ["job", *LEAST, "dense"], rows)
    target = None if quick else ("<=", 3.0)
    share = 100 * max(surgery)
    return [*figures, Figure("cache surgery, most of all rows", share, "%", target)]


def _ways(plain: Any, model: LoadedModel, tasks: list[Task], batch: int) -> Ways:
    settings = DenseSettings(max_rows=batch)
    return {
        "static": partial(static, plain, tasks, batch),
        "sorted": partial(static, plain, tasks, batch, ordered=True),
        "continuous": partial(continuous, plain, tasks, batch),
        "dense": partial(dense, model, tasks, settings, order=longest_first(tasks)),
    }
