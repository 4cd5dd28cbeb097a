"""The variants of the benchmark that are built from our own kernels.

A builder takes the inputs and returns a ``Variant``, whose ``launch(layer)`` writes
``inputs.out`` and returns None, or returns a tensor of its own. A builder raises ``Unavailable`` with the reason where it cannot serve them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import timing
import torch
from inputs import Inputs
from shapes import Layout
from split_kv_decode import CONFIGS, SplitKVDecode

from sgl_kernel_ext.shared_prefix_attention import (
    AttentionPlan,
    AttentionPlanner,
    DeviceConfig,
    Workspace,
    pick_config,
    run,
    tasks,
)
from sgl_kernel_ext.shared_prefix_attention.attention_plan import HEADER_TASKS
from sgl_kernel_ext.shared_prefix_attention.launch import attend

OURS = "ours"
OURS_UNSHARED = "ours, sharing off"
UNSHARED = "no sharing"
CASCADE = "cascade emulation"
TWO_LAUNCHES = "prefill, then decode"


Launch = Callable[[int], torch.Tensor | None]


class Unavailable(Exception):
    """A variant cannot serve these inputs, and why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute one layer."""

    name: str
    launch: Launch
    plan: AttentionPlan | None = None
    plan_us: float | None = None  # host time of a plan, median
    note: str = ""


Builder = Callable[[Inputs], Variant]


def max_parts(layout: Layout, config: DeviceConfig) -> int:
    """Parts for every level and token, and for splits."""
    levels = len(layout.shape.counts) + 1
    return levels * layout.num_tokens + 128 * config.num_sms


def make_planner(
    inputs: Inputs,
    *,
    config: DeviceConfig | None = None,
    workspace: Workspace | None = None,
) -> AttentionPlanner:
    """A planner as large as the workload needs."""
    q_heads, kv_heads = inputs.heads
    layout = inputs.layout
    return AttentionPlanner(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=inputs.q.shape[2],
        dtype=inputs.q.dtype,
        page_size=layout.page_size,
        device=inputs.device,
        max_requests=len(layout.q_len),
        max_tokens=layout.num_tokens,
        max_nodes=max(1, len(layout.node_parent)),
        max_parts=max_parts(
            layout,
            config
            or pick_config(inputs.device, inputs.q.shape[2], inputs.q.dtype.itemsize),
        ),
        config=config,
        workspace=workspace,
    )


def timed_plan(
    planner: AttentionPlanner, batch: tuple[np.ndarray, ...], repeats: int = 20
) -> tuple[AttentionPlan, float]:
    """A plan and the median microseconds of the host for it, its copy started."""
    plan = planner.plan(*batch)
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = planner.plan(*batch)
        taken.append(time.perf_counter() - begin)
    return plan, float(np.median(taken)) * 1e6


def ours(inputs: Inputs, config: DeviceConfig | None = None) -> Variant:
    """A launch per tile. The grids are fixed, as in a graph for many batches."""
    planner = make_planner(inputs, config=config)
    plan, plan_us = timed_plan(planner, inputs.layout.batch())

    def launch(layer: int) -> None:
        run(
            plan, inputs.q, inputs.k_caches[layer], inputs.v_caches[layer],
            inputs.table, inputs.kv_len, inputs.out, inputs.scale,
            grid=planner.fixed_grid,
        )  # fmt: skip

    return Variant(OURS, launch, plan, plan_us)


def ours_unshared(inputs: Inputs) -> Variant:
    """The same kernel without a forest, to see the effect of the kernel alone."""
    planner = make_planner(inputs)
    batch = (*inputs.layout.batch()[:5], np.full_like(inputs.layout.request_node, -1))
    plan, plan_us = timed_plan(planner, batch)

    def launch(layer: int) -> None:
        run(
            plan, inputs.q, inputs.k_caches[layer], inputs.v_caches[layer],
            inputs.table, inputs.kv_len, inputs.out, inputs.scale,
            grid=planner.fixed_grid,
        )  # fmt: skip

    return Variant(OURS_UNSHARED, launch, plan, plan_us)


def cascade(inputs: Inputs) -> Variant:
    """Shared spans in one launch, own spans in a second, the merge in a third."""
    planner = make_planner(inputs)
    plan, plan_us = timed_plan(planner, inputs.layout.batch())
    is_node = plan.task_table[:, tasks.IS_NODE] == 1
    if not is_node.any():
        raise Unavailable("the plan shares nothing")
    # A second plan of the batch has the other tasks, and the same parts.
    other = make_planner(inputs, workspace=planner.workspace)
    suffixes = _only(other.plan(*inputs.layout.batch()), ~is_node)
    nodes = _only(plan, is_node)
    grid = [count * planner.num_kv_heads for count in nodes.tile_tasks]

    def launch(layer: int) -> None:
        tensors = (
            inputs.q, inputs.k_caches[layer], inputs.v_caches[layer],
            inputs.table, inputs.kv_len, inputs.out,
        )  # fmt: skip
        attend(grid, nodes, tensors, inputs.scale, None)
        run(suffixes, *tensors, inputs.scale)

    return Variant(CASCADE, launch, plan, plan_us)


def _only(plan: AttentionPlan, chosen: np.ndarray) -> AttentionPlan:
    """The plan with these tasks alone, also on the device."""
    own = torch.from_numpy(plan.task_table[chosen])
    buffers = plan.planner.buffers
    buffers.tasks[: own.numel()] = own.flatten().to(buffers.tasks.device)
    counts = np.bincount(own[:, tasks.TILE], minlength=3)
    first = HEADER_TASKS + 1
    buffers.header[first : first + 3] = torch.from_numpy(counts.cumsum())
    return replace(plan, num_tasks=len(own), tile_tasks=tuple(counts.tolist()))


def _chunk_part(inputs: Inputs, shared: bool) -> Callable[[int], None]:
    """A launch of the prefill chunks alone."""
    layout, first = inputs.layout, inputs.layout.shape.num_decodes
    planner = make_planner(inputs)
    batch = layout.batch(first)
    if not shared:
        batch = (*batch[:5], np.full_like(batch[5], -1))
    plan = planner.plan(*batch)
    q, out, kv_len = inputs.q[first:], inputs.out[first:], inputs.kv_len[first:]

    def launch(layer: int) -> None:
        caches = inputs.k_caches[layer], inputs.v_caches[layer]
        run(plan, q, *caches, inputs.table, kv_len, out, inputs.scale)

    return launch


def two_launches(inputs: Inputs) -> Variant:
    """Chunks in one launch, decodes in a second. Each shares prefixes within itself."""
    layout, decodes = inputs.layout, inputs.layout.shape.num_decodes
    prefill = _chunk_part(inputs, shared=True)
    planner = make_planner(inputs)
    plan, plan_us = timed_plan(planner, layout.batch(0, decodes))

    def launch(layer: int) -> None:
        prefill(layer)
        run(
            plan, inputs.q, inputs.k_caches[layer], inputs.v_caches[layer],
            inputs.table, inputs.kv_len, inputs.out, inputs.scale,
        )  # fmt: skip

    return Variant(TWO_LAUNCHES, launch, plan, plan_us)


def no_sharing(inputs: Inputs) -> Variant:
    """Split-KV decode, compiled and split as is best for this shape.

    Chunks, where there are some, run before it in a launch of their own.
    """
    layout, decodes = inputs.layout, inputs.layout.shape.num_decodes
    prefill = _chunk_part(inputs, shared=False) if layout.shape.chunks else None
    num_sms = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    q, out = inputs.q[:decodes], inputs.out[:decodes]

    def launch_of(kernel: SplitKVDecode) -> Callable[[int], None]:
        def launch(layer: int) -> None:
            if prefill is not None:
                prefill(layer)
            kernel.run(inputs.k_caches[layer], inputs.v_caches[layer], out)

        return launch

    candidates = [
        SplitKVDecode(
            layout.kv_len[:decodes], q, inputs.table, inputs.heads[1],
            layout.page_size, inputs.scale, num_sms, config,
        )
        for config in CONFIGS
    ]  # fmt: skip
    launches = [launch_of(kernel) for kernel in candidates]
    layers = len(inputs.k_caches)
    graphs = [timing.capture(launch, layers) for launch in launches]
    times = timing.replay_by_turns(graphs, 10)
    best = int(np.argmin([np.median(each) for each in times]))
    c = CONFIGS[best]
    note = f"{c.block_n}x{c.num_stages} {c.num_warps}w {c.items_per_sm}/SM"
    return Variant(UNSHARED, launches[best], note=note)


def builders(inputs: Inputs) -> list[tuple[str, Builder]]:
    """Our own variants for a workload, with their names."""
    always: list[tuple[str, Builder]] = [(OURS, ours), (UNSHARED, no_sharing)]
    if inputs.layout.shape.chunks:
        return [*always, (TWO_LAUNCHES, two_launches)]
    return [*always, (OURS_UNSHARED, ours_unshared), (CASCADE, cascade)]
