"""Batches that the planner and run_reference refuse, and their errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import (
    FORESTS,
    assert_attention_close,
    ints,
    make_batch,
    make_planner,
)

from sgl_kernel_ext.shared_prefix_attention import run, run_reference


def test_buffers_that_are_too_small() -> None:
    batch = make_batch(**FORESTS["two-groups"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    needed = {
        "requests": 7,
        "nodes": 2,
        "tokens": 7,
        "tasks": plan.num_tasks,
        "parts": plan.num_parts,
    }
    for name, count in needed.items():
        enough = make_planner(batch, **{f"max_{name}": count})
        assert enough.plan(*batch.planned()).num_tasks == plan.num_tasks
        small = make_planner(batch, **{f"max_{name}": count - 1})
        with pytest.raises(ValueError, match=f"{count} {name}, .*: 1 too few"):
            small.plan(*batch.planned())


def test_what_plan_refuses() -> None:
    good = {
        "q_len": [1, 3],
        "kv_len": [10, 20],
        "table_row": [0, 1],
        "node_parent": [-1, 0],
        "node_end": [5, 9],
        "request_node": [1, 1],
    }
    planner = make_planner(make_batch())
    planner.plan(**{name: ints(values) for name, values in good.items()})
    refusals: list[tuple[dict[str, list[int]], str]] = [
        ({"node_parent": [-1, 1]}, r"node_parent\[1\] is 1; parents come before"),
        ({"node_parent": [-1, -2]}, r"node_parent\[1\] is -2"),
        ({"node_end": [5, 4]}, r"node_end\[1\] is 4, before the end"),
        ({"node_end": [-5, 9]}, r"node_end\[0\] is -5"),
        ({"q_len": [0, 3]}, r"q_len\[0\] is 0"),
        ({"q_len": [11, 3]}, r"kv_len\[0\] is 10; it counts the 11 queries"),
        ({"request_node": [1, 2]}, r"request_node\[1\] is 2; the forest has 2"),
        ({"request_node": [-2, 1]}, r"request_node\[0\] is -2"),
        ({"node_end": [5, 10]}, "ends at 10, but the queries begin at 9"),
        ({"table_row": [0, -1]}, r"table_row\[1\] is -1"),
        ({"kv_len": [10]}, "kv_len has 1 entries, q_len has 2"),
        ({"node_end": [5]}, "node_end has 1 entries, node_parent has 2"),
    ]
    for change, message in refusals:
        arrays = {name: ints(values) for name, values in (good | change).items()}
        with pytest.raises(ValueError, match=message):
            planner.plan(**arrays)
    arrays = {name: ints(values) for name, values in good.items()}
    with pytest.raises(ValueError, match="kv_len is int64"):
        planner.plan(**(arrays | {"kv_len": np.array([10, 20])}))
    nothing = {name: ints([]) for name in good}
    with pytest.raises(ValueError, match="no requests"):
        planner.plan(**nothing)


def test_what_a_planner_refuses() -> None:
    batch = make_batch()
    refusals: list[tuple[dict[str, object], str]] = [
        ({"num_q_heads": 3}, "3 query heads cannot be divided among 2"),
        ({"num_q_heads": 34, "max_tile": 16}, "17 query heads per KV head exceed"),
        ({"max_tile": 32}, "max_tile is 32"),
        ({"head_dim": 513}, "head_dim is 513; supported are 1 to 512"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"v_head_dim": 513}, "v_head_dim is 513"),
        ({"latent": True}, "v_head_dim is 32; with latents, K has head_dim = 32"),
        ({"latent": True, "head_dim": 1088, "v_head_dim": 512}, "head_dim is 576"),
        ({"dtype": torch.float8_e4m3fn}, r"dtype is torch\.float8"),
        ({"kv_dtype": torch.float16}, r"kv_dtype is torch\.float16"),
        ({"page_size": 0}, "page_size is 0"),
        ({"max_tasks": 1 << 21}, "too few"),
    ]
    for change, message in refusals:
        with pytest.raises(ValueError, match=message):
            make_planner(batch, **change)


def test_run_reference_checks_as_run_does() -> None:
    batch = make_batch(own_len=[3])
    plan = make_planner(batch).plan(*batch.planned())
    out = torch.empty_like(batch.q)
    with pytest.raises(ValueError, match="scale is 0"):
        run_reference(plan, *batch.tensors(), out, 0.0)
    run_reference(plan, *batch.tensors(), out, batch.scale)
    assert_attention_close(batch, out)


def test_triton_refuses_cpu_tensors() -> None:
    batch = make_batch(own_len=[3])
    plan = make_planner(batch).plan(*batch.planned())
    with pytest.raises(ValueError, match="on CPU tensors use run_reference"):
        run(plan, *batch.tensors(), torch.empty_like(batch.q), batch.scale)
