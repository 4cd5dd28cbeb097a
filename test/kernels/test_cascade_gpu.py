"""FlashInfer's cascade runs our plans at real sizes. Needs an NVIDIA GPU."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import Batch, ints, make_planner
from gpu_batches import assert_output_near, real_batch

from sgl_kernel_ext.shared_prefix_attention import AttentionPlan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("accelerator")]


@pytest.fixture
def cascade_class(accelerator: None) -> Any:
    """The class under test. Skips if FlashInfer is not installed."""
    if torch.version.hip is not None:
        pytest.skip("FlashInfer has no kernels for ROCm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what SGLang and FlashInfer import
        try:
            importlib.import_module("flashinfer")
        except ImportError as error:
            pytest.skip(f"FlashInfer cannot be imported: {error}")
        return importlib.import_module("sglang_batch.srt.attention.cascade").Cascade


def in_two_levels(batch: Batch, groups: int) -> Batch:
    """The same KV. Of every four of a group two share all that they can, one the first
    half of it, and one nothing."""
    group, sibling = batch.request_node, np.arange(len(batch.q_len)) // groups
    kind = sibling % 4
    nodes = np.select([kind < 2, kind == 2], [group + groups, group], -1)
    return replace(
        batch,
        node_parent=ints([-1] * groups + list(range(groups))),
        node_end=ints([*(batch.node_end // 2), *batch.node_end]),
        request_node=ints(nodes),
    )


def check(cascade: Any, batch: Batch, plan: AttentionPlan) -> None:
    """A step of two layers, in tensors with padding behind."""
    cascade.prepare(
        plan, batch.q_len, batch.kv_len, batch.table_row, batch.node_end, batch.table
    )
    q, *others = batch.tensors()
    wanted, _ = batch.truth()
    for _ in range(2):
        out = torch.full_like(torch.cat([q, q[:3]]), 7)
        padded = torch.cat([q, torch.full_like(q[:3], torch.nan)])
        cascade.run(plan, padded, *others, out, batch.scale)
        assert_output_near(out[: batch.num_tokens], wanted)
        assert (out[batch.num_tokens :] == 7).all()


SHAPES: dict[str, dict[str, Any]] = {
    "groups": {},
    "alone": {"groups": 64, "siblings": 1},
    "few": {"groups": 1, "siblings": 10, "prefix": 4000, "own": 400},
    "chunk": {"groups": 4, "chunk": 700},
    "d64": {"groups": 4, "head_dim": 64},
    "d256": {"groups": 4, "head_dim": 256, "heads": (16, 8)},
    "fp16": {"groups": 4, "dtype": torch.float16},
    "group7": {"groups": 4, "heads": (28, 4)},
}


def cascade_of(cascade_class: Any, batch: Batch) -> Any:
    return cascade_class(
        num_q_heads=batch.q.shape[1],
        num_kv_heads=batch.k_cache.shape[1],
        head_dim=batch.q.shape[2],
        dtype=batch.q.dtype,
        scale=batch.scale,
        device=batch.q.device,
    )


@pytest.mark.parametrize("levels", [1, 2], ids="levels{}".format)
@pytest.mark.parametrize("name", SHAPES)
def test_real_sizes(name: str, levels: int, cascade_class: Any) -> None:
    batch = real_batch(**SHAPES[name])
    groups = SHAPES[name].get("groups", 16)
    if levels == 2:
        batch = in_two_levels(batch, groups)
    planner = make_planner(
        batch, config=None, max_requests=512, max_tokens=2048, max_nodes=128
    )
    plan = planner.plan(*batch.planned())
    if name != "alone":
        # With more nodes than groups, one group at least has both of its own.
        assert plan.num_kept_nodes > (levels - 1) * groups
    check(cascade_of(cascade_class, batch), batch, plan)


def test_steps_one_after_the_other(cascade_class: Any) -> None:
    """Steps that keep their plan, and steps with more or fewer levels."""
    batch = real_batch(groups=4)
    planner = make_planner(batch, config=None, max_requests=512)
    cascade = cascade_of(cascade_class, batch)
    alone = replace(batch, request_node=ints([-1] * len(batch.q_len)))
    for each in (batch, in_two_levels(batch, 4), alone, batch):
        plan = planner.plan(*each.planned())
        for grown in (0, 1, 33):
            now = each.grown([grown] * len(each.q_len))
            assert plan.still_valid(now.kv_len)
            check(cascade, now, plan)
