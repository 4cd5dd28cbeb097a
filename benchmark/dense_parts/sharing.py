"""A job of which four fifths are shared prefixes."""

from __future__ import annotations

from functools import partial

from report import Figure

from dense_parts.jobs import by_prefix, siblings
from dense_parts.turns import compared
from dense_parts.ways import dense, llama
from sglang_batch.dense.model import wrap
from sglang_batch.dense.row_request import DenseSettings

EACH = 12


def measure(quick: bool, repeats: int) -> list[Figure]:
    groups, shared = (2, 64) if quick else (8, 256)
    tasks = siblings(groups, EACH, shared, 1)
    plain = llama(2, 128) if quick else llama(4, 256)
    model = wrap(plain)
    order = by_prefix(tasks)
    with_it = DenseSettings(max_rows=EACH)
    without = DenseSettings(max_rows=EACH, shortest_shared=1 << 30)
    ways = {
        "alone": partial(dense, model, tasks, without, order=order),
        "shared": partial(dense, model, tasks, with_it, order=order),
    }
    done = compared("sharing", plain, tasks, ways, 1 if quick else repeats)
    least = groups * (shared + EACH * (shared // 4))
    return [
        Figure("prompt tokens computed", done["shared"].computed, "", ("=", least)),
        Figure(
            "without sharing over with it",
            done["alone"].cpu_s / done["shared"].cpu_s,
            "x",
            None if quick else (">=", 1.5),
        ),
    ]
