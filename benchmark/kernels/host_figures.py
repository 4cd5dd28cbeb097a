"""Figures without a GPU: bytes, floors, plans, correctness, the time of planning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from inputs import make_inputs, worst_error
from report import Figure, print_table
from shapes import Layout, Shape, lay_out, parse_shape
from split_kv_decode import MIN_SPLIT_TOKENS, DecodeConfig, SplitKVDecode
from variants import max_parts

from sgl_kernel_ext.shared_prefix_attention import (
    AttentionPlan,
    AttentionPlanner,
    DeviceConfig,
    configs,
    pick_config,
    run,
    run_reference,
)

# Measured before, elsewhere: floors from them are computed and not measured here.
H200_BYTES, H200_FLOPS = 4.3e12, 788e12
H200_SMS = 132
VALUE_BYTES = 2  # bf16
TOLERANCE = 2e-5  # of float32 results
PLAN_US, REUSE_US = 150.0, 20.0
# 512 decodes below 64 groups below 8 roots.
HOST_SHAPE = "8,64,512 512,1500,250"
# Of the small workloads that are checked against the reference.
SMALL_HEADS, SMALL_HEAD_DIM = (4, 2), 32


def hopper_config(head_dim: int) -> DeviceConfig:
    """The planning constants of an H200, without having one."""
    flops_per_byte, task_bytes = configs._FAMILIES["hopper"]
    return replace(
        pick_config(torch.device("cpu"), head_dim, VALUE_BYTES),
        name="hopper",
        num_sms=H200_SMS,
        flops_per_byte=flops_per_byte,
        min_split_tokens=128,
        task_bytes=task_bytes,
        tiles=configs.pick_tiles("hopper", head_dim, VALUE_BYTES),
    )


def plan_as_on_h200(
    layout: Layout, heads: tuple[int, int], head_dim: int
) -> AttentionPlan:
    """The plan that the fused variant would run there."""
    config = hopper_config(head_dim)
    planner = AttentionPlanner(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=torch.bfloat16,
        page_size=layout.page_size,
        device="cpu",
        max_requests=len(layout.q_len),
        max_tokens=layout.num_tokens,
        max_nodes=max(1, len(layout.node_parent)),
        max_parts=max_parts(layout, config),
        config=config,
    )
    return planner.plan(*layout.batch())


@dataclass(frozen=True, slots=True)
class Computed:
    """A workload's bytes and plan, computed. Times are in microseconds per layer."""

    shape: str
    family: str
    page_size: int
    decodes: int
    sharing: float
    unshared_mb: float
    unique_mb: float
    ratio: float
    bytes_us: float
    flops_us: float
    floor_us: float
    tasks: int
    splits: int  # tasks beyond the first of their span
    parts: int
    gain: float  # predicted by the planner's cost model

    @classmethod
    def of(
        cls, shape: Shape, page_size: int, heads: tuple[int, int], head_dim: int
    ) -> Computed:
        """Lay out and plan a shape."""
        layout = lay_out(shape, page_size)
        plan = plan_as_on_h200(layout, heads, head_dim)
        token_bytes = 2 * heads[1] * head_dim * VALUE_BYTES
        unique = layout.num_unique_tokens * token_bytes
        unshared = int(layout.kv_len.sum(dtype=np.int64)) * token_bytes
        # The floor also moves the queries and the output.
        moved = unique + 2 * layout.num_tokens * heads[0] * head_dim * VALUE_BYTES
        bytes_us = 1e6 * moved / H200_BYTES
        flops_us = 1e6 * 4 * heads[0] * head_dim * layout.pairs / H200_FLOPS
        return cls(
            shape=shape.name,
            family=shape.family,
            page_size=page_size,
            decodes=shape.num_decodes,
            sharing=shape.sharing,
            unshared_mb=unshared / 1e6,
            unique_mb=unique / 1e6,
            ratio=unshared / unique,
            bytes_us=bytes_us,
            flops_us=flops_us,
            floor_us=max(bytes_us, flops_us),
            tasks=plan.num_tasks,
            splits=_num_splits(plan, layout),
            parts=plan.num_parts,
            gain=plan.predicted_gain,
        )

    @property
    def row(self) -> list[str]:
        bound = "memory" if self.bytes_us >= self.flops_us else "arithmetic"
        return [
            self.family, self.shape, str(self.page_size), f"{self.unshared_mb:,.0f}",
            f"{self.unique_mb:,.0f}", f"{self.ratio:.2f}", f"{self.floor_us:.1f}",
            bound, f"{self.tasks:,}", f"{self.splits:,}", f"{self.parts:,}",
            f"{self.gain:.2f}",
        ]  # fmt: skip


def _num_splits(plan: AttentionPlan, layout: Layout) -> int:
    """Tasks that begin neither at a sequence's start nor at the end of a node."""
    ends = np.append(layout.node_end, 0)
    begins = plan.task_table[:, 2]
    return int((~np.isin(begins, ends)).sum())


def print_computed(computed: Sequence[Computed]) -> None:
    """The table of all shapes."""
    print_table(
        f"Computed, not measured: floors at {H200_BYTES / 1e12} TB/s and "
        f"{H200_FLOPS / 1e12:.0f} TFLOP/s (H200), plans as on one; per layer",
        [
            "family", "shape", "page", "unshared MB", "unique MB", "ratio", "floor us",
            "bound by", "tasks", "splits", "parts", "predicted gain",
        ],
        [each.row for each in computed],
    )  # fmt: skip


def _small_config() -> DeviceConfig:
    """Short splits and nodes for free, so that small batches use all there is."""
    config = pick_config(torch.device("cpu"), SMALL_HEAD_DIM, 4)
    return replace(config, num_sms=8, min_split_tokens=16, task_bytes=0)


def error_of(shape: Shape, page_size: int, interpreted: bool) -> float:
    """Worst relative error of a small shape, float32, through the planner."""
    layout = lay_out(shape, page_size)
    inputs = make_inputs(
        layout, SMALL_HEADS, SMALL_HEAD_DIM, torch.float32, torch.device("cpu"), 1
    )
    planner = AttentionPlanner(
        num_q_heads=SMALL_HEADS[0],
        num_kv_heads=SMALL_HEADS[1],
        head_dim=SMALL_HEAD_DIM,
        dtype=torch.float32,
        page_size=page_size,
        device="cpu",
        max_requests=len(layout.q_len),
        max_tokens=layout.num_tokens,
        max_nodes=max(1, len(layout.node_parent)),
        max_parts=max_parts(layout, _small_config()),
        config=_small_config(),
    )
    plan = planner.plan(*layout.batch())
    if plan.num_kept_nodes == 0 and shape.sharing > 1:
        raise RuntimeError(f"{shape.name}: nothing is shared, so nothing is checked")
    execute = run if interpreted else run_reference
    execute(
        plan, inputs.q, inputs.k_caches[0], inputs.v_caches[0], inputs.table,
        inputs.kv_len, inputs.out, inputs.scale,
    )  # fmt: skip
    return worst_error(inputs.out, inputs.truth())


def split_kv_error(shape: Shape, page_size: int) -> float:
    """Worst relative error of the kernel without sharing, in the interpreter."""
    layout = lay_out(shape, page_size)
    inputs = make_inputs(
        layout, SMALL_HEADS, SMALL_HEAD_DIM, torch.float32, torch.device("cpu"), 1
    )
    kernel = SplitKVDecode(
        layout.kv_len, inputs.q, inputs.table, SMALL_HEADS[1], page_size, inputs.scale,
        16, DecodeConfig(32, 1, 4, 1),
    )  # fmt: skip
    if not kernel.num_parts and max(layout.kv_len) > MIN_SPLIT_TOKENS:
        raise RuntimeError(f"{shape.name}: nothing is split, so no merge is checked")
    kernel.run(inputs.k_caches[0], inputs.v_caches[0], inputs.out)
    return worst_error(inputs.out, inputs.truth())


def interpreted_errors() -> dict[str, float]:
    """Errors of the Triton kernels on two tiny shapes, with TRITON_INTERPRET set."""
    torch.manual_seed(0)
    tree = parse_shape("tiny", "1,2,5 37,21,19")
    long = parse_shape("tiny", "1,3 40,150")
    return {
        "ours, page 1": error_of(tree, 1, interpreted=True),
        "ours, page 16": error_of(long, 16, interpreted=True),
        "no sharing, page 1": split_kv_error(tree, 1),
        "no sharing, page 16": split_kv_error(long, 16),
    }


def correctness(shapes: Sequence[Shape], script: Path) -> list[Figure]:
    """Errors of the PyTorch execution per family, and of the interpreted kernels."""
    torch.manual_seed(0)
    figures = []
    for family in dict.fromkeys(shape.family for shape in shapes):
        small = {s.scaled_down() for s in shapes if s.family == family}
        errors = [
            error_of(shape, page_size, interpreted=False)
            for shape in sorted(small, key=lambda shape: shape.name)
            for page_size in (1, 16)
            if page_size == 1 or max(shape.tokens[:-1], default=16) >= 16
        ]
        name = f"plans in PyTorch, {family}: worst relative error"
        note = f"{len(errors)} small workloads, float32"
        figures.append(Figure(name, max(errors), "", ("<=", TOLERANCE), note))
    done = subprocess.run(
        [sys.executable, str(script), "--interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the interpreter's run failed:\n{done.stderr[-2000:]}")
    errors_by_name: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures + [
        Figure(f"interpreted kernel, {name}", error, "", ("<=", TOLERANCE), "float32")
        for name, error in errors_by_name.items()
    ]


def host_times(heads: tuple[int, int], head_dim: int, calls: int) -> list[Figure]:
    """Microseconds of the host for a new plan and for a step that keeps its plan."""
    layout = lay_out(parse_shape("host", HOST_SHAPE), 16)
    planner = plan_as_on_h200(layout, heads, head_dim).planner
    batch = layout.batch()
    plan = planner.plan(*batch)
    grown = layout.kv_len + 1
    plan_us, reuse_us = [], []
    for _ in range(calls):
        begin = time.perf_counter()
        plan = planner.plan(*batch)
        middle = time.perf_counter()
        good = plan.still_valid(grown)
        reuse_us.append(1e6 * (time.perf_counter() - middle))
        plan_us.append(1e6 * (middle - begin))
        if not good:
            raise RuntimeError("a plan does not outlive one step")
    shape = f"512 decodes, 64 groups, two levels; {calls} calls"
    figures = []
    for name, taken, most in (
        ("plan on the host", plan_us, PLAN_US),
        ("step that keeps its plan, on the host", reuse_us, REUSE_US),
    ):
        median, p99 = np.percentile(taken, (50, 99))
        target = ("<=", most)
        figures.append(Figure(f"{name}: median", float(median), "us", target, shape))
        figures.append(Figure(f"{name}: p99", float(p99), "us", None, shape))
    return figures
