"""Attention of one engine step that reads every shared KV prefix once.

``AttentionPlanner.plan`` turns a batch and its forest of shared prefixes into a task table,
once per step or less often. ``run`` executes it for each layer; without a GPU,
``run_reference`` does so in PyTorch.

    planner = AttentionPlanner(num_q_heads=32, num_kv_heads=8, head_dim=128, ...)
    plan = planner.plan(q_len, kv_len, table_row, node_parent, node_end, request_node)
    for layer in layers:
        run(plan, q, k_cache, v_cache, table, kv_len_on_device, out, scale)

If only the lengths have grown by the next step, check ``plan.still_valid(kv_len)`` and use the
same plan: the ends of the decodes are read on the device.
"""

from sgl_kernel_ext.shared_prefix_attention.attention_plan import (
    AttentionPlan,
    AttentionPlanner,
    Workspace,
)
from sgl_kernel_ext.shared_prefix_attention.checks import TooLarge
from sgl_kernel_ext.shared_prefix_attention.configs import (
    DeviceConfig,
    TileConfig,
    pick_config,
)
from sgl_kernel_ext.shared_prefix_attention.launch import PLAIN, Features, run
from sgl_kernel_ext.shared_prefix_attention.shared_prefix_reference import (
    attention_ref,
    run_reference,
    try_out,
)

__all__ = [
    "PLAIN",
    "AttentionPlan",
    "AttentionPlanner",
    "DeviceConfig",
    "Features",
    "TileConfig",
    "TooLarge",
    "Workspace",
    "attention_ref",
    "pick_config",
    "run",
    "run_reference",
    "try_out",
]
