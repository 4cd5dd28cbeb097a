"""The limit on KV cells is halved while a job runs, and raised again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from report import Figure

from dense_parts.jobs import mixed
from dense_parts.turns import differing, progress
from dense_parts.ways import dense, llama, llama_copy
from sglang_batch.dense.decode_loop import DecodeLoop
from sglang_batch.dense.model import wrap
from sglang_batch.dense.row_request import DenseSettings


def _limit(loop: DecodeLoop, max_cells: int) -> None:
    """Another process takes memory, or gives it back."""
    loop._admission.max_cells, loop._changed = max_cells, True


def measure(quick: bool, repeats: int) -> list[Figure]:
    tasks = mixed(16, 80, (3, 15), 3) if quick else mixed(48, 240, (3, 40), 3)
    begin, end = (20, 60) if quick else (60, 200)
    plain = llama(2, 128)
    model = wrap(llama_copy(plain))
    wide = DenseSettings(max_rows=8 if quick else 16)
    full = dense(model, tasks, wide)
    progress(f"memory: without a limit, {full.wall_s:.1f} s")
    changes: dict[int, Callable[[DecodeLoop], None]] = {
        begin: lambda loop: _limit(loop, full.cells // 2),
        end: lambda loop: _limit(loop, 1 << 40),
    }
    figures = []
    for name, host in (("all fit the host pool", 1 << 20), ("no host pool", 0)):
        settings = replace(wide, host_cells=host)
        done = dense(model, tasks, settings, at_step=changes)
        progress(f"memory: {name}, {done.wall_s:.1f} s")
        lost = differing(plain, tasks, full, done)
        again = ("=", 0.0) if host else None
        figures += [
            Figure(f"{name}: answers that differ", lost, "", ("=", 0)),
            Figure(f"{name}: tokens computed again", done.recomputed, "", again),
        ]
    return figures
