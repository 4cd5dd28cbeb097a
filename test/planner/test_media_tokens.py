"""Placeholders of images and sounds in prompts, and the time of their encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_jobs import (
    COST,
    PROMPTS,
    Prompt,
    make_requests,
    outputs_of,
    prefixes,
    tree_of,
    work_of,
)
from sim_jobs import make_job, run, unit_cost

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.hardware import hardware
from sglang_batch.planner.costs.model_spec import TYPICAL_MODEL, encoder_flops_per_token
from sglang_batch.planner.costs.tree_work import (
    leaf_compute,
    node_work,
    planned_work,
    root_density,
)
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.plan import Candidates
from sglang_batch.planner.requests import END_OF_PLACEHOLDERS, FIRST_PLACEHOLDER

ENCODER_S = 3.0
WITH_ENCODER = replace(COST, encoder_token_time_s=ENCODER_S)
IMAGE = FIRST_PLACEHOLDER + 5


def with_media(prompts: list[Prompt]) -> list[Prompt]:
    """The same with every other kind of token a placeholder."""
    return [
        tuple(FIRST_PLACEHOLDER + t if t % 2 else t for t in prompt)
        for prompt in prompts
    ]


def count(tokens: Prompt) -> int:
    return sum(FIRST_PLACEHOLDER <= token < END_OF_PLACEHOLDERS for token in tokens)


@given(PROMPTS, st.data())
@settings(deadline=None)  # the first one compiles
def test_placeholders_are_counted_along_the_tree(
    prompts: list[Prompt], data: Any
) -> None:
    prompts = with_media(prompts)
    tree = tree_of(prompts)
    kept = data.draw(st.lists(st.booleans(), min_size=len(prompts)))
    some = np.flatnonzero(np.array(kept[: len(prompts)], bool))
    for each in (tree, tree.restricted_to(some)):
        of_leaf = [prompts[request] for request in each.order]
        if not of_leaf:
            continue
        if tree.media is None:
            assert not any(map(count, prompts)) and each.media is None
            continue
        assert each.media is not None
        assert each.media.input_len.tolist() == [count(p) for p in of_leaf]
        shared = zip(of_leaf, each.lcp, strict=True)
        assert each.media.lcp.tolist() == [count(p[:n]) for p, n in shared]
        nodes = zip(each.leaf_begin, each.depth, strict=True)
        depth = each.media.depth(each.leaf_begin, each.leaf_end)
        assert depth.tolist() == [count(of_leaf[leaf][:n]) for leaf, n in nodes]
        below = [
            sum(p[-1] >= FIRST_PLACEHOLDER for p in prefixes(of_leaf[begin:end]))
            for begin, end in zip(each.leaf_begin, each.leaf_end, strict=True)
        ]
        assert each.unique_below(*each.media).tolist() == below


@given(PROMPTS)
@settings(deadline=None)
def test_each_image_is_encoded_once_in_the_work_of_a_job(prompts: list[Prompt]) -> None:
    tree = tree_of(with_media(prompts))
    unique = sum(p[-1] >= FIRST_PLACEHOLDER for p in prefixes(with_media(prompts)))
    lengths = outputs_of(len(prompts), 0)
    work = work_of(tree, lengths, WITH_ENCODER)
    more = ENCODER_S * unique

    def added(value: Any, before: Any) -> Any:
        return pytest.approx(np.asarray(before, float).sum() + more), np.sum(value)

    for expected, found in (
        added(leaf_compute(tree, WITH_ENCODER, work), leaf_compute(tree, COST, work)),
        added(
            node_work(tree, WITH_ENCODER, work)[0][0], node_work(tree, COST, work)[0][0]
        ),
        added(
            planned_work(tree, WITH_ENCODER, lengths, lengths**2)[0],
            planned_work(tree, COST, lengths, lengths**2)[0],
        ),
    ):
        assert found == expected
    memory = work.memory_s.sum()
    if memory:
        assert root_density(tree, WITH_ENCODER, work) == pytest.approx(
            root_density(tree, COST, work) + more / memory
        )


def test_a_plan_looks_for_placeholders_if_an_encoder_takes_time() -> None:
    requests = make_requests(with_media([(1, 3, 4), (1, 3, 5, 6), (2, 7)]))
    for cost, counted in ((COST, False), (WITH_ENCODER, True)):
        machine = Machine(cost, EngineLimits(1000))
        planner = JobPlanner(requests, np.arange(3), machine, OfflineBatchConfig())
        planned = Candidates(requests, machine, OrderSettings())
        for tree in (planner.tree, planned.tree):
            assert (tree.media is not None) is counted
            assert tree.media is None or tree.media.num_unique == 4


@pytest.mark.parametrize("as_sglang", [False, True])
def test_an_image_is_encoded_when_the_first_prompt_with_it_joins(
    as_sglang: bool,
) -> None:
    prompts = [(1, *[IMAGE] * 30, i) for i in (2, 3, 4)] + [(7, 8)]
    plain = run(make_job(prompts, [2] * 4, as_sglang=as_sglang))
    cost = unit_cost(encoder_token_time_s=100.0)
    done = run(make_job(prompts, [2] * 4, as_sglang=as_sglang, cost=cost))
    assert done.num_steps == plain.num_steps
    assert (done.samples[1] - plain.samples[1]).tolist() == [3000.0] + [0.0] * (
        done.num_steps - 1
    )


def test_an_encoder_by_hand() -> None:
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "spatial_merge_size": 2,
    }
    params = 32 * (4 * 1280**2 + 3 * 1280 * 3420)
    flops = encoder_flops_per_token({"vision_config": vision})
    assert flops == 2 * 4 * params == pytest.approx(5.04e9, rel=1e-3)
    assert encoder_flops_per_token({"thinker_config": {"vision_config": vision}}) == (
        flops
    )
    # Qwen2-VL: its hidden_size is that of the language model.
    older = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4}
    older |= {"spatial_merge_size": 2, "model_type": "qwen2_vl"}
    assert encoder_flops_per_token({"vision_config": older}) == (
        2 * 4 * 32 * (4 * 1280**2 + 2 * 1280 * 5120)
    )
    # Gemma 3: 64 x 64 patches become 256 tokens.
    gemma = {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304}
    gemma |= {"image_size": 896, "patch_size": 14}
    config = {"mm_tokens_per_image": 256, "vision_config": gemma}
    params = 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    assert encoder_flops_per_token(config) == 2 * 16 * params
    audio = {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120}
    assert encoder_flops_per_token({"audio_config": audio}) == (
        2 * 2 * 32 * (4 * 1280**2 + 2 * 1280 * 5120)
    )
    assert encoder_flops_per_token({"hidden_size": 64, "num_hidden_layers": 2}) == 0
    # Layers that differ are not counted.
    stages = {"embed_dim": [128, 256], "depth": [2, 4], "patch_size": [4, 2]}
    assert encoder_flops_per_token({"vision_config": stages}) == 0


def test_its_time_on_a_device() -> None:
    model = replace(TYPICAL_MODEL, encoder_flops_per_token=5e9)
    device = hardware("h100")
    cost = CostModel.of(model, device, tp=2)
    assert cost.encoder_token_time_s == 5e9 / (2 * device.compute_flops)
