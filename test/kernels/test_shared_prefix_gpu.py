"""The shared-prefix kernel at real sizes. Needs an accelerator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    Batch,
    features_of,
    ints,
    make_planner,
    poisoned_outputs,
)
from gpu_batches import assert_near, real_batch

from sgl_kernel_ext.shared_prefix_attention import run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("accelerator")]

LATENT = {"head_dim": 576, "v_head_dim": 512, "latent": True, "groups": 4}
SHAPES: dict[str, dict[str, object]] = {
    "sd16": {},
    "sd4": {"groups": 32, "siblings": 4},
    "one-prefix": {"groups": 1, "siblings": 256},
    "alone": {"groups": 64, "siblings": 1},
    "few": {"groups": 1, "siblings": 10, "prefix": 4000, "own": 400},
    "page16": {"page_size": 16, "prefix": 2011},
    "page64": {"page_size": 64},
    "chunk": {"chunk": 700, "groups": 4},
    "d64": {"head_dim": 64, "groups": 4},
    "d80": {"head_dim": 80, "groups": 4, "heads": (32, 32)},
    "d96": {"head_dim": 96, "groups": 4},
    "d192": {"head_dim": 192, "groups": 4},
    "d256": {"head_dim": 256, "groups": 4, "heads": (16, 8)},
    "fp16": {"dtype": torch.float16, "groups": 4},
    "fp32": {"dtype": torch.float32, "groups": 4},
    "fp8": {"kv_dtype": torch.float8_e4m3fn, "groups": 4},
    "group7": {"heads": (28, 4), "groups": 4},
    "k192-v128": {"head_dim": 192, "v_head_dim": 128, "groups": 4},
    "d512": {"head_dim": 512, "groups": 4, "heads": (16, 4)},
    "latent": LATENT | {"heads": (16, 1)},
    "latent-128-heads": LATENT | {"heads": (128, 2)},
}


@pytest.mark.parametrize("max_tile", [64, 128], ids="tile{}".format)
@pytest.mark.parametrize("name", SHAPES)
def test_real_sizes(name: str, max_tile: int) -> None:
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no e4m3 for Ampere")
    batch = real_batch(**SHAPES[name])  # type: ignore[arg-type]
    if batch.v_cache.shape[-1] > 256:
        max_tile = min(max_tile, 64)
    planner = make_planner(
        batch, config=None, max_tile=max_tile, max_requests=512, max_tokens=2048
    )
    plan = planner.plan(*batch.planned())
    for grid in (None, planner.fixed_grid):
        out, lse = poisoned_outputs(batch, plan)
        run(plan, *batch.tensors(), out, batch.scale, lse=lse, grid=grid)
        assert_near(batch, out, lse)


@pytest.mark.parametrize("max_tile", [64, 128], ids="tile{}".format)
@pytest.mark.parametrize("number", range(len(features_of(32))))
def test_features(number: int, max_tile: int) -> None:
    batch = real_batch(groups=4, chunk=700)
    batch = replace(batch, q=batch.q * 4, features=features_of(32, "cuda")[number])
    planner = make_planner(
        batch, config=None, max_tile=max_tile, max_requests=512, max_tokens=2048
    )
    plan = planner.plan(*batch.planned())
    out, lse = poisoned_outputs(batch, plan)
    run(plan, *batch.tensors(), out, batch.scale, features=batch.features, lse=lse)
    assert_near(batch, out, lse)


def test_a_graph_replays_grown_and_replanned_batches() -> None:
    batch = real_batch(groups=4)
    planner = make_planner(batch, config=None, max_requests=512, max_tokens=512)
    plan = planner.plan(*batch.planned())
    q, k_cache, v_cache, table, kv_len = batch.tensors()
    out, lse = poisoned_outputs(batch, plan)

    def launch() -> None:
        grid = planner.fixed_grid
        run(
            plan,
            q,
            k_cache,
            v_cache,
            table,
            kv_len,
            out,
            batch.scale,
            lse=lse,
            grid=grid,
        )

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def replay(now: Batch) -> None:
        kv_len.copy_(torch.from_numpy(now.kv_len))
        out.fill_(torch.nan)
        graph.replay()
        assert_near(now, out, lse)

    replay(batch)
    grown = batch.grown([33] * len(batch.q_len))
    assert plan.still_valid(grown.kv_len)
    replay(grown)
    apart = replace(grown, request_node=ints([-1] * len(batch.q_len)))
    planner.plan(*apart.planned())
    replay(apart)


def test_plans_in_quick_succession_do_not_overwrite_each_other() -> None:
    batches = [real_batch(groups=groups, siblings=8) for groups in (1, 2, 3, 4, 5)]
    planner = make_planner(batches[0], config=None)
    outs = []
    for batch in batches:
        plan = planner.plan(*batch.planned())
        out = torch.full_like(batch.q, torch.nan)
        run(plan, *batch.tensors(), out, batch.scale)
        outs.append(out)
    for batch, out in zip(batches, outs, strict=True):
        wanted, _ = batch.truth()
        assert (out.float() - wanted).norm() / wanted.norm() < 1e-2
