"""Which way to run a job is chosen, and why the others are not."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_batch.planner.choosing.chooser import (
    Choices,
    Chooser,
    for_deadline,
    reason,
    time_by_limit,
)
from sglang_batch.planner.choosing.ways import (
    Box,
    ModelParts,
    Precision,
    Way,
    possible_ways,
    spreads,
)
from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.ordering.order import OrderSettings
from sglang_batch.planner.requests import PlanRequests
from sglang_batch.prediction.models import MODELS

FP8 = ("fp8", "fp8_e4m3")
R1 = MODELS["deepseek-r1"] | {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
}


def job(n: int, input_len: int, output_len: int, spread: bool = False) -> PlanRequests:
    """Requests that share nothing, of these lengths or of exponential ones."""
    rng = np.random.default_rng(0)
    inputs, outputs = np.full(n, input_len), np.full(n, output_len)
    if spread:
        inputs = np.maximum(4, rng.exponential(input_len, n)).astype(int)
        outputs = np.maximum(4, rng.exponential(output_len, n)).astype(int)
    offsets = np.concatenate([[0], np.cumsum(inputs)]).astype(np.int64)
    tokens = rng.integers(0, 30_000, offsets[-1]).astype(np.int32)
    lengths = outputs.astype(np.int32)
    return PlanRequests(tokens, offsets, lengths, lengths)


def chosen(
    config: dict[str, object],
    device: str,
    devices: int,
    requests: PlanRequests,
    *others: tuple[str | None, str | None],
) -> Choices:
    precisions = [
        Precision(
            ModelSpec.from_hf_config(config, quantization=method, kv_dtype=dtype),
            method,
            dtype,
        )
        for method, dtype in ((None, None), *others)
    ]
    box = Box(hardware(device), devices, price_per_hour=2.0)
    chooser = Chooser(requests, OrderSettings())
    return chooser.choose(box, ModelParts.of(config), precisions)


def spread_of(found: Choices) -> Parallelism:
    assert found.chosen is not None
    return found.chosen.way.parallel


@pytest.mark.slow
def test_one_replica_over_all_devices_is_wrong_for_llama_70b_on_h200() -> None:
    found = chosen(MODELS["llama-3.1-70b"], "h200", 8, job(16_000, 1000, 1000), FP8)
    assert spread_of(found).tp <= 2
    by_spread = {
        (str(x.way.parallel), x.way.precision.changes_answers): x
        for x in found.outlooks
    }
    assert found.chosen is not None
    base = found.chosen.outlook
    whole = by_spread["TP8", False]
    assert whole.seconds > 1.2 * base.seconds
    assert "links between devices +" in reason(whole, base)
    # A device has room for the weights alone only in 8 bits.
    assert "70.6" not in by_spread["DP8", False].refusal
    assert "141.1 GB" in by_spread["DP8", False].refusal
    fastest = found.simulated[0]
    assert fastest.way.precision.changes_answers
    assert fastest.seconds < 0.6 * found.chosen.seconds


def test_a_replica_on_each_device_is_wrong_for_qwen3_30b_on_h100() -> None:
    found = chosen(MODELS["qwen3-30b-a3b"], "h100", 4, job(8000, 1000, 1000))
    assert spread_of(found).tp == 4
    alone = next(x for x in found.outlooks if str(x.way.parallel) == "DP4")
    assert found.chosen is not None
    assert alone.seconds > 2 * found.chosen.outlook.seconds
    assert "reading weights +" in reason(alone, found.chosen.outlook)


@pytest.mark.parametrize(
    ("device", "precision", "replicas"),
    [("h200", FP8, 8), ("b200", ("nvfp4", "fp8_e4m3"), 8), ("h100", FP8, 4)],
)
def test_llama_2_70b_as_submitters_of_mlperf_run_it(
    device: str, precision: tuple[str, str], replicas: int
) -> None:
    """One replica per device where the weights leave room for KV, otherwise on two."""
    requests = job(24_576, 294, 292, spread=True)
    found = chosen(MODELS["llama-2-70b"], device, 8, requests, precision)
    best = found.simulated[0].way
    assert best.precision.changes_answers
    assert best.parallel.replicas == replicas


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_deepseek_r1_has_an_attention_rank_on_each_device(device: str) -> None:
    """Under TP each device would have a copy of all latent KV."""
    found = chosen(R1, device, 8, job(3000, 800, 3700, spread=True))
    assert spread_of(found) == Parallelism(tp=8, attention_ranks=8, ep=8)


def test_the_closed_form_is_near_the_simulation() -> None:
    found = chosen(MODELS["llama-3.1-8b"], "h100", 2, job(8000, 500, 300, spread=True))
    for choice in found.simulated:
        assert choice.outlook.seconds == pytest.approx(choice.seconds, rel=0.2)


@pytest.mark.slow
def test_a_shared_prefix_is_held_and_computed_once() -> None:
    """So long prefixes need no more devices for a replica than short ones."""
    n, prefix, own = 4000, 20_000, 100
    tokens = np.concatenate(
        [
            np.concatenate([np.full(prefix, 7), np.arange(own) + 1000 + i * own])
            for i in range(n)
        ]
    ).astype(np.int32)
    offsets = np.arange(n + 1, dtype=np.int64) * (prefix + own)
    lengths = np.full(n, 50, np.int32)
    found = chosen(
        MODELS["llama-3.1-8b"],
        "h100",
        2,
        PlanRequests(tokens, offsets, lengths, lengths),
    )
    assert found.chosen is not None
    sharing = found.chosen.simulation.achieved_prefix_sharing_ratio
    assert sharing > 0.99
    assert found.chosen.outlook.steady is not None
    assert found.chosen.outlook.steady.rows > 500


def test_spreads_use_all_devices_and_what_sglang_allows() -> None:
    dense = list(spreads(8, ModelParts(64, 8, 80, 0)))
    assert all(each.devices == 8 for each in dense)
    assert len(dense) == len(set(dense)) == 10
    assert not any(each.attention_ranks > 1 or each.ep > 1 for each in dense)
    mixture = list(spreads(8, ModelParts(64, 8, 80, 128)))
    ranks = [each for each in mixture if each.attention_ranks > 1]
    assert ranks
    assert all(each.replicas == each.pp == 1 for each in ranks)


@pytest.mark.parametrize(
    ("parts", "parallel", "text"),
    [
        (ModelParts(28, 4, 28, 0), Parallelism(tp=8), "28 attention heads"),
        (ModelParts(24, 6, 28, 0), Parallelism(tp=4), "6 KV heads and 4 devices"),
        (ModelParts(32, 8, 2, 0), Parallelism(pp=4), "2 layers are fewer than 4"),
        (ModelParts(32, 8, 32, 6), Parallelism(tp=4, ep=4), "6 experts"),
    ],
)
def test_what_a_model_cannot_be_divided_by(
    parts: ModelParts, parallel: Parallelism, text: str
) -> None:
    refusal = parts.refusal(parallel)
    assert refusal is not None
    assert text in refusal


def test_parts_are_those_of_the_language_model() -> None:
    assert ModelParts.of(R1) == ModelParts(128, 1, 61, 256)
    inside = {"text_config": MODELS["llama-3.1-8b"], "model_type": "llava"}
    assert ModelParts.of(inside) == ModelParts(32, 8, 32, 0)


def test_memory_is_kept_for_activations_and_graphs() -> None:
    precision = Precision(ModelSpec.from_hf_config(MODELS["llama-3.1-8b"]))
    h100 = hardware("h100")
    small = Way(Parallelism(), precision, 2048, rows=256)
    assert small.mem_fraction(h100) == pytest.approx(1 - 10 / 80)
    large = Way(Parallelism(), precision, 16384, rows=2000)
    assert large.graph_rows == 1024
    kept = 512 + 1.5 * 16384 + 128 + 2 * 1024
    assert large.mem_fraction(h100) == pytest.approx(1 - kept / (80 * 1024))
    assert "--cuda-graph-max-bs-decode" in large.arguments(h100)


def test_limits_that_sglang_divides_among_attention_ranks() -> None:
    precision = Precision(ModelSpec.from_hf_config(R1), "fp8", "fp8_e4m3")
    way = Way(Parallelism(tp=8, attention_ranks=8, ep=8), precision, 2048, rows=100)
    said = way.arguments(hardware("b200"))
    assert said[: said.index("--cuda-graph-max-bs-decode")] == [
        *("--tp-size", "8", "--attn-dp-size", "8", "--ep-size", "8"),
        *("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3"),
        *("--chunked-prefill-size", "16384", "--max-running-requests", "800"),
    ]


def test_time_is_divided_by_what_limits_it() -> None:
    found = chosen(MODELS["llama-3.1-8b"], "h100", 1, job(2000, 500, 300))
    assert found.chosen is not None
    outlook = found.chosen.outlook
    assert outlook.steady is not None
    seconds = sum(time_by_limit(outlook).values())
    assert seconds == pytest.approx(1 / outlook.steady.requests_per_s)
    assert found.chosen.price == pytest.approx(found.chosen.seconds / 3600 * 2.0)
    assert for_deadline(found.chosen, found.chosen.seconds / 2.5) == 3


def test_ways_are_the_same_in_every_run() -> None:
    box = Box(hardware("h200"), 8)
    parts = ModelParts.of(R1)
    precisions = [Precision(ModelSpec.from_hf_config(R1))]
    assert list(possible_ways(box, parts, precisions)) == list(
        possible_ways(box, parts, precisions)
    )
    twice = [chosen(R1, "h200", 8, job(500, 800, 900, spread=True)) for _ in range(2)]
    seconds = [[choice.seconds for choice in each.simulated] for each in twice]
    assert seconds[0] == seconds[1]
