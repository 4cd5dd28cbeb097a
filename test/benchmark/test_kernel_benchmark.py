"""The kernel benchmark runs without a GPU, on the workloads that it names."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

KERNELS = Path(__file__).parents[2] / "benchmark" / "kernels"
SCRIPT = KERNELS / "bench_shared_prefix_attention.py"


@pytest.fixture(autouse=True)
def benchmark_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's files are in one directory and not a package."""
    for folder in (KERNELS.parent, KERNELS):
        monkeypatch.syspath_prepend(str(folder))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_quick_run() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--no-gpu"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # Times depend on other work on the machine.
    missed = [
        figure["name"]
        for figure in document["figures"]
        if figure["met"] is False and figure["unit"] != "us"
    ]
    assert missed == []
    timed = any(figure["met"] is False for figure in document["figures"])
    assert done.returncode == int(timed), done.stderr
    names = [figure["name"] for figure in document["figures"]]
    assert sum("plans in PyTorch" in name for name in names) == 4
    assert sum("interpreted kernel" in name for name in names) == 4
    assert sum("on the host: median" in name for name in names) == 2

    # 16 prefixes of 2,000 and 256 x 250 tokens of 4,096 bytes, at 4.3 TB/s.
    by_name = {each["shape"]: each for each in document["computed"]}
    groups = by_name["sd16: 16,256 2000,250"]
    assert groups["unique_mb"] == pytest.approx(393, abs=0.5)
    assert groups["unshared_mb"] == pytest.approx(2359, abs=0.5)
    assert groups["floor_us"] == pytest.approx(92.4, abs=0.1)
    assert groups["flops_us"] == pytest.approx(12, abs=0.5)
    assert groups["ratio"] == pytest.approx(6.0, abs=0.01)
    # The plan shares prefixes wherever there are any.
    assert groups["gain"] > 3
    alone = by_name["256 1024"]
    assert (alone["ratio"], alone["gain"]) == (1.0, 1.0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_layout_holds_every_token_once(page_size: int) -> None:
    from shapes import all_shapes, lay_out

    for shape in {shape.scaled_down() for shape in all_shapes()}:
        layout = lay_out(shape, page_size)
        seen: dict[int, tuple[int, int]] = {}  # slot -> owner and position
        for i, length in enumerate(layout.kv_len.tolist()):
            node = int(layout.request_node[i])
            path = []
            while node >= 0:
                path.append(node)
                node = int(layout.node_parent[node])
            for position in range(length):
                owner = next(
                    (n for n in path[::-1] if layout.node_end[n] > position), -1 - i
                )
                page = int(layout.table[i, position // page_size])
                slot = page * page_size + position % page_size
                assert seen.setdefault(slot, (owner, position)) == (owner, position)
        assert len(seen) == layout.num_unique_tokens
        assert max(seen) < layout.num_slots


def small_inputs(forest: str, page_size: int) -> Any:
    from inputs import make_inputs
    from shapes import lay_out, parse_shape

    torch.manual_seed(0)
    layout = lay_out(parse_shape("test", forest), page_size)
    device = torch.device("cpu")
    return make_inputs(layout, (4, 2), 32, torch.float32, device, layers=2)


FORESTS = ["1,4,8 20,37,19", "1,2,6 9,40,5", "2,6 48,33", "5 70"]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("forest", FORESTS)
def test_the_baselines_of_torch(
    forest: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inputs import worst_error
    from library_variants import flex, sdpa

    # The compiled code differs from a GPU's. Only the mask is tested.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    inputs = small_inputs(forest, page_size)
    for builder in (sdpa, flex):
        out = run_quietly(builder(inputs).launch)
        assert worst_error(out, inputs.truth()) < 1e-5


def run_quietly(launch: Any) -> torch.Tensor:
    """The first layer, without FlexAttention's warning that it is not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: torch.Tensor = launch(0)
    return out


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("forest", FORESTS)
def test_the_levels_of_the_cascade_cover_each_request(
    forest: str, page_size: int
) -> None:
    from library_variants import cascade_levels

    inputs = small_inputs(forest, page_size)
    layout = inputs.layout
    found: list[list[int]] = [[] for _ in layout.kv_len]
    for queries, bounds, pages, last in zip(*cascade_levels(inputs), strict=True):
        assert queries[-1] == len(layout.kv_len)
        for node in range(len(queries) - 1):
            own = pages[bounds[node] : bounds[node + 1]]
            slots = (own[:, None] * page_size + np.arange(page_size)).ravel()
            slots = slots[: len(slots) - page_size + last[node]]
            for request in range(queries[node], queries[node + 1]):
                found[request] += slots.tolist()
    for request, length in enumerate(layout.kv_len.tolist()):
        position = np.arange(length)
        page = layout.table[request, position // page_size]
        assert found[request] == (page * page_size + position % page_size).tolist()


def attend_levels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, page_table: torch.Tensor,
    cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int,
    softmax_scale: float, causal: bool, return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention's ``flash_attn_with_kvcache`` of these arguments, in torch."""
    assert return_softmax_lse
    assert not causal
    assert cu_seqlens_q.diff().max() == max_seqlen_q
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2])
    group = q.shape[1] // k.shape[2]
    bounds = cu_seqlens_q.tolist()
    for node, (begin, end) in enumerate(pairwise(bounds)):
        length = int(cache_seqlens[node])
        key, value = (
            cache[page_table[node].long()].flatten(0, 1)[:length]
            .repeat_interleave(group, 1)
            for cache in (k, v)
        )  # fmt: skip
        logits = torch.einsum("nhd,shd->nhs", q[begin:end], key) * softmax_scale
        lse[begin:end] = logits.logsumexp(-1)
        out[begin:end] = torch.einsum("nhs,shd->nhd", logits.softmax(-1), value)
    return out, lse.T


def merge_levels(
    a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(a_lse, b_lse)
    parts = (
        (x * (x_lse - lse).exp()[..., None]) for x, x_lse in ((a, a_lse), (b, b_lse))
    )
    return sum(parts, torch.zeros_like(a)), lse


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("forest", FORESTS)
def test_a_cascade_of_flash_attention_is_attention(forest: str, page_size: int) -> None:
    from inputs import worst_error
    from library_variants import cascade_of

    inputs = small_inputs(forest, page_size)
    out = cascade_of(inputs, attend_levels, merge_levels)(0)
    assert worst_error(out, inputs.truth()) < 1e-5


def test_splits_cover_every_request_once() -> None:
    from split_kv_decode import DecodeConfig, split_items

    lengths = np.array([1, 130, 4000, 257, 64], np.int32)
    config = DecodeConfig(32, 3, 4, 8)
    items, indptr = split_items(lengths, 2, 8, config)
    covered = [np.zeros(length, int) for length in lengths]
    for request, begin, end, part in items:
        assert begin < end <= lengths[request]
        covered[request][begin:end] += 1
        alone = indptr[request] == indptr[request + 1]
        assert (part == -1) if alone else indptr[request] <= part < indptr[request + 1]
    assert all((each == 1).all() for each in covered)
    parts = [part for part in items[:, 3].tolist() if part >= 0]
    assert sorted(parts) == list(range(indptr[-1]))
    assert max(np.diff(indptr)) > 4


# Of the model of a plan's time, over the floor. The targets are 1.35 where bytes bind and 1.6 where
# products do. Three are above. Their items, if they filled all places evenly, are a bound, in us:
# - system prompt: KV 102, parts 14, starts of items 17, launches 4: 137 of 58, 2.36. In rounds 141,
#   2.43: the fourth of packed suffixes is not full, and smaller packs cost more starts.
# - long system prompt: KV 350, parts 5, starts 6, launches 4: 365 of 231, 1.58. In rounds 376, 1.63:
#   halves of the node on 128 of 132 multiprocessors (307), packs on 432 of 528 places (63), 7 more.
# - few: KV 8, parts 1, starts 3, launches 4: 16 of 8.5, 1.89. In one round of unequal tasks 17.7,
#   2.08: a block of 64 tokens is a third of a split.
MODELLED = {
    "sd16: 16,256 2000,250": 1.25,
    "sd4: 64,256 2000,250": 1.1,
    "sd16, long answers: 16,256 2000,1050": 1.15,
    "sd16, long prompts: 16,256 16000,250": 1.25,
    "sd3: 85,255 1570,60": 1.2,
    "few-shot: 57,513 695,110": 1.35,
    "system prompt: 1,1024 2048,32": 2.45,
    "long system prompt: 1,256 32768,256": 1.65,
    "few: 1,10 4000,400": 2.1,
    "8 16384": 1.1,
    "512 300": 1.1,
    "ragged: 256 1000": 1.1,
}


def test_the_model_of_time() -> None:
    from time_model import all_modelled

    found = {each.shape: each for each in all_modelled()}
    assert list(found) == list(MODELLED)
    over = {name: each.ratio for name, each in found.items()}
    assert all(1 <= over[name] <= most for name, most in MODELLED.items()), over
    assert found["system prompt: 1,1024 2048,32"].items <= 3100
