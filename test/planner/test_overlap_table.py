"""Which mixed steps are split, from tables of a trial that are made up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.planner.costs.bounds import lower_bounds
from sglang_batch.planner.costs.cost_model import MIN_SPLIT_GAIN, CostModel, overlapped
from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import step_costs
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.simulator.simulator import simulate
from sglang_batch.prediction.models import MODELS
from sglang_batch.srt.overlap.overlap_table import (
    MixedStep,
    OverlapTable,
    TrialCell,
)


def cell(
    prompt_tokens: int = 1024,
    rows: int = 128,
    context: int = 2048,
    share: int | None = None,
    gain: float = 0.1,
    k: float = 1.5,
) -> TrialCell:
    """A cell whose split step follows the law with exponent k."""
    prompts_s, decodes_s = 0.02, 0.015
    split_s = overlapped(prompts_s, decodes_s, k)
    return TrialCell(
        prompt_tokens=prompt_tokens,
        rows=rows,
        context=context,
        sm_share=share,
        fused_s=split_s * (1 + gain),
        split_s=split_s,
        prompts_s=prompts_s,
        decodes_s=decodes_s,
    )


def test_a_measured_shape_is_split_at_5_percent_or_more() -> None:
    step = MixedStep(1024, 128, 2048.0)
    for gain, is_split in ((0.051, True), (0.049, False), (-0.3, False)):
        table = OverlapTable([cell(gain=gain)])
        choice = table.choose(step)
        assert (choice is not None) == is_split == bool(table.on)
        assert choice is None or choice.gain == pytest.approx(gain)


def test_the_fastest_share_is_taken() -> None:
    table = OverlapTable(
        [
            cell(gain=0.06),
            cell(share=72, gain=0.02),
            cell(share=104, gain=0.2),
            cell(share=120, gain=0.1),
        ]
    )
    choice = table.choose(MixedStep(1024, 128, 2048.0))
    assert choice is not None
    assert (choice.sm_share, round(choice.gain, 6)) == (104, 0.2)
    assert [each.sm_share for each in table.on] == [104]


def test_between_prompt_lengths_the_gain_is_interpolated() -> None:
    table = OverlapTable([cell(512, gain=0.0), cell(2048, gain=0.2)])

    def gain(prompt_tokens: int) -> float | None:
        choice = table.choose(MixedStep(prompt_tokens, 128, 2048.0))
        return None if choice is None else choice.gain

    assert gain(1024) == pytest.approx(0.1)  # half way, on a logarithmic scale
    assert gain(2048) == pytest.approx(0.2)
    assert gain(2800) == pytest.approx(0.2)
    assert gain(512) is None
    assert gain(3000) is None  # too far from what was measured


def test_the_nearest_decodes_count() -> None:
    table = OverlapTable([cell(rows=32, gain=0.3), cell(rows=256, gain=-0.1)])

    def is_split(rows: int, context: float = 2048.0) -> bool:
        return table.choose(MixedStep(1024, rows, context)) is not None

    assert is_split(32) and is_split(16) and is_split(60)
    assert not is_split(15)  # fewer than half of what was measured
    assert not is_split(200)
    assert not is_split(32, context=4100.0)
    assert is_split(32, context=1025.0)


def test_without_cells_nothing_is_split() -> None:
    table = OverlapTable([])
    assert table.choose(MixedStep(1, 1, 1.0)) is None
    assert table.exponent == 1.0


@pytest.mark.parametrize("k", [1.0, 1.2, 1.47, 2.5, 6.0])
def test_the_exponent_of_the_law_is_found(k: float) -> None:
    table = OverlapTable([cell(k=k), cell(2048, k=k), cell(512, gain=0.0, k=9.0)])
    assert table.exponent == pytest.approx(k, rel=1e-3)


def test_perfect_overlap_has_an_infinite_exponent() -> None:
    assert OverlapTable([cell(k=math.inf)]).exponent > 100


@given(
    st.lists(
        st.builds(
            cell,
            prompt_tokens=st.sampled_from([512, 1024, 2048, 4096]),
            rows=st.sampled_from([32, 128, 256]),
            share=st.sampled_from([None, 72, 104]),
            gain=st.floats(-0.5, 0.5),
            k=st.floats(1.0, 8.0),
        )
    ),
    st.integers(1, 20_000),
    st.integers(1, 2_000),
    st.floats(1.0, 1e5),
)
def test_a_step_is_split_only_for_the_least_gain(
    cells: list[TrialCell], prompt_tokens: int, rows: int, context: float
) -> None:
    table = OverlapTable(cells)
    choice = table.choose(MixedStep(prompt_tokens, rows, context))
    largest = max((each.gain for each in cells), default=0.0)
    assert choice is None or MIN_SPLIT_GAIN <= choice.gain <= largest + 1e-9
    assert table.exponent >= 1


def test_a_simulated_engine_splits_the_steps_that_gain() -> None:
    """With the trial's exponent a job of mixed steps is faster, and never below its bounds."""
    spec = ModelSpec.from_hf_config(MODELS["llama-3.1-8b"])
    whole = step_costs(spec, hardware("h100"), Parallelism())
    n = 300
    tree = build_prefix_tree(
        np.arange(n * 1500, dtype=np.int32), np.arange(n + 1, dtype=np.int64) * 1500
    )
    output_len = np.random.default_rng(0).integers(50, 400, n).astype(np.int32)

    def seconds(cost: CostModel) -> float:
        limits = EngineLimits(200_000, step_tokens=2048, as_sglang=True)
        run = simulate(
            tree, cost, limits, order=Order(np.arange(n)), output_len=output_len
        )
        bounds = lower_bounds(tree, cost, output_len, 200_000)
        assert run.seconds >= bounds.tightest_s
        return run.seconds

    none, some, perfect = (
        seconds(replace(whole, split_exponent=k)) for k in (1.0, 1.5, math.inf)
    )
    assert perfect < some < none == seconds(whole)
    # Too small a gain splits nothing: the weights are read twice.
    assert seconds(replace(whole, split_exponent=1.01)) == none
