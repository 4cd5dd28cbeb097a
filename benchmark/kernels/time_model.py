"""A model of the kernel's time from its plans: ``python benchmark/kernels/time_model.py``.

Nothing here is measured. It says what a plan would take on an H200 if its items ran at the rates
that the planner assumes, in the order of the table, with as many programs on a multiprocessor as
fit, and compares that with a floor that has the parts in it. Its constants are fits to measured
times. That the launches of a graph's branches overlap is assumed.
"""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark"), str(ROOT / "benchmark" / "kernels")]

from host_figures import VALUE_BYTES, plan_as_on_h200  # noqa: E402
from report import paths_given, print_table  # noqa: E402
from shapes import PERFORMANCE, Shape, all_shapes, lay_out  # noqa: E402

from sgl_kernel_ext.shared_prefix_attention import AttentionPlan, tasks  # noqa: E402

HEADS, HEAD_DIM = (32, 8), 128
# Measured: reads of the whole device. An attention loop on Hopper reaches about 600 TFLOP/s.
BYTES_PER_US, FLOPS_PER_US = 4.69e6, 600e6
# Fitted: an item beyond its bytes, and a launch after another one.
ITEM_US, LAUNCH_US = 2.9, 2.0
UNSHARED = ("8 16384", "512 300", "ragged: 256 1000")


@dataclass(frozen=True, slots=True)
class Modelled:
    """A shape's plan. Times are in microseconds per layer."""

    shape: str
    items: int
    bytes_us: float
    flops_us: float
    model_us: float

    @property
    def floor_us(self) -> float:
        return max(self.bytes_us, self.flops_us)

    @property
    def ratio(self) -> float:
        return self.model_us / self.floor_us


def model(shape: Shape) -> Modelled:
    """Plan a shape of page 1 as on an H200, and add up its launches."""
    layout = lay_out(shape, 1)
    plan = plan_as_on_h200(layout, HEADS, HEAD_DIM)
    # A part is written and read once, and queries and output are moved.
    parts = plan.num_parts * HEADS[0] * 2 * 4 * (HEAD_DIM + 1)
    rest = 2 * layout.num_tokens * HEADS[0] * HEAD_DIM * VALUE_BYTES
    unique = layout.num_unique_tokens * 2 * HEADS[1] * HEAD_DIM * VALUE_BYTES
    merge_us = LAUNCH_US + parts / 2 / BYTES_PER_US if plan.num_parts else 0.0
    return Modelled(
        shape.name,
        plan.num_tasks * HEADS[1],
        (unique + parts + rest) / BYTES_PER_US,
        4 * HEADS[0] * HEAD_DIM * layout.pairs / FLOPS_PER_US,
        launches_us(plan) + merge_us,
    )


def launches_us(plan: AttentionPlan) -> float:
    """Time of the launches of a plan's tiles, which are branches of a graph.

    Items begin in the order of the table, wide tiles first, where a multiprocessor has room
    for one program more. A program takes the share of it that its binary leaves to each.
    """
    settings, config = plan.planner._settings, plan.planner.config
    whole = math.lcm(*config.tiles.programs)
    free = np.full(config.num_sms, whole)
    running: list[tuple[float, int, int]] = []  # end, multiprocessor, share
    now, ends = 0.0, np.cumsum(plan.tile_tasks)
    for tile in (2, 1, 0):
        own = plan.task_table[ends[tile] - plan.tile_tasks[tile] : ends[tile]]
        places = config.num_sms * config.tiles.programs[tile]
        share = whole // config.tiles.programs[tile]
        span = own[:, tasks.KV_END] - own[:, tasks.KV_BEGIN]
        cost = span * settings[tasks.TOKEN_BYTES + tile]
        cost += (
            own[:, tasks.COUNT] * plan.planner.group * settings[tasks.PART_BYTES] // 2
        )
        # Each place has an equal share of the bandwidth, also when others have ended.
        us = np.repeat(ITEM_US + cost * places / BYTES_PER_US, HEADS[1])
        for each in us.tolist():
            while free.max() < share:
                now, sm, ended = heapq.heappop(running)
                free[sm] += ended
            sm = int(free.argmax())
            free[sm] -= share
            heapq.heappush(running, (now + each, sm, share))
    return LAUNCH_US + max(end for end, _, _ in running)


def all_modelled() -> list[Modelled]:
    """The shapes of the target."""
    names = (*(f"{label}: {of}" for label, of in PERFORMANCE.items()), *UNSHARED)
    found = {shape.name: shape for shape in all_shapes()}
    return [model(found[name]) for name in names]


def main() -> None:
    """Print the table."""
    paths_given(__doc__)
    print_table(
        f"A model, not measured: an H200 at {BYTES_PER_US / 1e6} TB/s, and at "
        f"{FLOPS_PER_US / 1e6:.0f} TFLOP/s for the floor; us per layer",
        ["shape", "items", "bytes", "products", "floor", "model", "ratio"],
        [
            [m.shape, f"{m.items:,}", *(f"{us:.0f}" for us in (m.bytes_us, m.flops_us, m.floor_us, m.model_us)), f"{m.ratio:.2f}"]
            for m in all_modelled()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
