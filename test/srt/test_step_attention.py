"""Attention of a step on a CPU, and its linear layers, against PyTorch and SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization import unquant
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    WeightUpdater,
)
from torch.nn import functional

from sgl_kernel_ext import block_attention, decode_attention
from sgl_kernel_ext.block_attention import attend_blocks, block_size
from sgl_kernel_ext.decode_attention import attend_decodes
from sgl_kernel_ext.host_kernels import array
from sgl_kernel_ext.vector_products import HAS_PAIRS
from sglang_batch.srt.cpu import packed_linears
from sglang_batch.srt.cpu.cpu_attention import FastAttention, attend
from sglang_batch.srt.cpu.step_attention import StepAttention, shared_spans

SLOTS, ROWS, WIDTH = 4_000, 32, 600


class Step:
    """Requests whose rows begin alike, by a tree: all share 40 tokens, those of a group 60 or
    100 more, and every fifth request shares nothing."""

    def __init__(self, seed: int, kind: str, number: int = 14) -> None:
        random = np.random.default_rng(seed)
        free = iter(random.permutation(SLOTS))

        def take(count: int) -> list[int]:
            return [int(next(free)) for _ in range(count)]

        common, groups = take(40), [take(100) for _ in range(3)]
        self.rows = random.permutation(ROWS)[:number].astype(np.int64)
        # What other requests left in a row is no part of the present one.
        self.table = torch.from_numpy(
            random.integers(0, SLOTS, (ROWS, WIDTH), np.int32)
        )
        self.ends = np.zeros(number, np.int64)
        self.counts = np.ones(number, np.int64)
        for i, row in enumerate(self.rows):
            own = int(random.integers(1, 30))
            shared = common + groups[i % 3][: 60 if i % 2 else 100]
            slots = take(own) if i % 5 == 4 else shared + take(own)
            self.table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
            self.ends[i] = len(slots)
            if kind == "prompts" or (kind == "mixed" and i % 2):
                self.counts[i] = own

    def tensors(
        self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(int(self.ends.sum()))
        q = torch.randn(int(self.counts.sum()), heads, dim, generator=made)
        k, v = torch.randn(2, SLOTS, kv_heads, dim, generator=made)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def expected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        parts, begin = [], 0
        for row, end, count in zip(self.rows, self.ends, self.counts, strict=True):
            slots = self.table[row, :end].long()
            own = q[begin : begin + count].float()
            keys, values = k[slots].float(), v[slots].float()
            parts.append(
                attend(own, keys, values, scale=0.25, window=window, sinks=None)
            )
            begin += count
        return torch.cat(parts)


@pytest.mark.parametrize("kind", ["decodes", "prompts", "mixed"])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(
    ("dtype", "shape", "tolerance"),
    [
        (torch.float32, (4, 4, 16), 2e-5),
        (torch.float32, (9, 3, 64), 2e-5),
        (torch.bfloat16, (6, 2, 80), 2e-2),
    ],
)
@pytest.mark.parametrize("worth", [0, 100, 1 << 40])
def test_all_requests_of_a_step_at_once(
    kind: str,
    window: int | None,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tolerance: float,
    worth: int,
) -> None:
    for seed in range(3):
        step = Step(seed, kind)
        q, k, v = step.tensors(dtype, *shape)
        size = (1, 5, block_size(*shape[:2]))[seed]
        ours = StepAttention(step.table, step.rows, step.ends, step.counts, size, worth)
        found = ours.attend(q, k, v, 0.25, window)
        wanted = step.expected(q, k, v, window)
        torch.testing.assert_close(
            found.float(), wanted, atol=tolerance, rtol=tolerance
        )


def test_spans_have_the_same_slots_and_save_enough() -> None:
    for seed in range(20):
        step = Step(seed, "decodes")
        for worth in (0, 60, 200, 10_000):
            spans = shared_spans(step.table.numpy(), step.rows, step.ends - 1, worth)
            until = np.zeros(len(step.rows), np.int64)
            for span in spans:
                slots = step.table.numpy()[step.rows[span.requests]]
                assert (slots[:, : span.end] == slots[0, : span.end]).all()
                assert (len(span.requests) - 2) * (span.end - span.begin) >= worth
                # Each request reads its spans one after the other, and nothing twice.
                assert (until[span.requests] == span.begin).all()
                until[span.requests] = span.end
            assert (until < step.ends).all()
            if worth == 0:
                # All that is shared: the common tokens once, and those of three groups.
                read = sum(span.end - span.begin for span in spans)
                assert 40 + 3 * 60 <= read <= 40 + 3 * 100
            if worth == 10_000:
                assert spans == []


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
def test_numbers_that_are_none_stay_with_their_request(
    dtype: torch.dtype, tolerance: float
) -> None:
    step = Step(0, "decodes")
    q, k, v = step.tensors(dtype, 4, 2, 32)
    q[3], q[5] = float("nan"), float("inf")
    ours = StepAttention(step.table, step.rows, step.ends, step.counts, 3, 0)
    found = ours.attend(q, k, v, 0.25, None)
    others = [i for i in range(len(q)) if i not in (3, 5)]
    wanted = step.expected(q, k, v, None)
    torch.testing.assert_close(
        found[others], wanted[others], atol=tolerance, rtol=tolerance
    )
    assert found[3].isnan().all()


ATTEND = """
import sys
import numpy as np
from sgl_kernel_ext.vector_products import HAS_PAIRS
from sgl_kernel_ext.block_attention import attend_blocks
from sgl_kernel_ext.decode_attention import attend_decodes
with np.load(sys.argv[1]) as given:
    *cache, table, rows, blocks, row_of, tokens, begin, end = given.values()
found = [HAS_PAIRS]
for dim in (80, 64):  # the second one is whole vectors
    q, k, v = (np.ascontiguousarray(x[..., :dim]) for x in cache)
    seen = tokens, begin, end, 0.25
    for attend, at in ((attend_blocks, (rows, blocks)), (attend_decodes, (row_of,))):
        out, lse = np.empty(q.shape, np.float32), np.full((20, 6), -np.inf, np.float32)
        attend(q, k, v, table, *at, *seen, out, lse)
        found += [out, lse]
np.savez(sys.argv[2], *found)
"""


@pytest.mark.skipif(not HAS_PAIRS, reason="the processor has no pairs of bfloat16")
def test_bfloat16_with_and_without_pairs(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = (20, 6, 80), (SLOTS, 2, 80), (SLOTS, 2, 80)
    q, k, v = (
        torch.from_numpy(random.normal(size=shape)).bfloat16() for shape in shapes
    )
    table = random.integers(0, SLOTS, (3, WIDTH), np.int32)
    rows, blocks = np.array([2, 0]), np.array([0, 13, 20])
    row_of, end = random.integers(0, 3, 20), random.integers(300, WIDTH, 20)
    seen = random.permutation(20), random.integers(0, 290, 20), end
    arrays = *(array(x) for x in (q, k, v)), table, rows, blocks, row_of, *seen
    np.savez(tmp_path / "given.npz", *arrays)
    found = []
    for name in ("", "x86-64-v3"):
        path = tmp_path / f"found-{name}.npz"
        subprocess.run(
            [sys.executable, "-c", ATTEND, tmp_path / "given.npz", path],
            env=os.environ | {"NUMBA_CPU_NAME": name} if name else None,
            check=True,
        )
        with np.load(path) as read:
            found.append(list(read.values()))
    (with_pairs, *ours), (without, *others) = found
    assert with_pairs
    assert not without
    for one, other in zip(ours, others, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("together", [False, True])
def test_tokens_go_on_from_a_part_on_any_number_of_threads(
    threads: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (decode_attention, block_attention):
        monkeypatch.setattr(module, "_PART", 1)
    step = Step(0, "decodes")
    q, k, v = step.tensors(torch.float32, 4, 2, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        begin = step.ends // 3
        out, lse = torch.empty_like(q), torch.full((len(q), 4), float("-inf"))
        whole = torch.empty_like(lse)
        for i, slots in enumerate(step.table[torch.from_numpy(step.rows)].long()):
            keys, values = (x[slots].repeat_interleave(2, 1) for x in (k, v))
            logits = torch.einsum("hd,khd->hk", q[i], keys) * 0.25
            whole[i] = logits[:, : step.ends[i]].logsumexp(-1)
            if not begin[i]:
                continue
            logits = logits[:, : begin[i]]
            lse[i] = logits.logsumexp(-1)
            out[i] = torch.einsum("hk,khd->hd", logits.softmax(-1), values[: begin[i]])
        tokens, seen = np.arange(len(q)), (begin, step.ends)
        arguments = *(x.numpy() for x in (q, k, v, step.table)), step.rows
        found = out.numpy(), lse.numpy()
        if together:
            blocks = np.arange(len(q) + 1)
            attend_blocks(*arguments, blocks, tokens, *seen, 0.25, *found)
            torch.testing.assert_close(lse, whole, atol=2e-5, rtol=2e-5)
        else:
            attend_decodes(*arguments, tokens, *seen, 0.25, *found)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, step.expected(q, k, v, None), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["decodes", "prompts"])
def test_the_backend_computes_as_sglangs(kind: str) -> None:
    step = Step(3, kind)
    q, k, v = step.tensors(torch.float32, 4, 2, 32)
    found = []
    for backend in (TorchNativeAttnBackend, FastAttention):
        made = object.__new__(backend)
        rows = [torch.from_numpy(each) for each in (step.rows, step.ends)]
        options: dict[str, Any] = {"scaling": 0.25, "enable_gqa": True}
        arguments = [q, torch.empty_like(q), k, v, step.table, *rows]
        if kind == "decodes":
            out = made._run_sdpa_forward_decode(*arguments, None, **options)
        else:
            counts = torch.from_numpy(step.counts)
            out = made._run_sdpa_forward_extend(
                *arguments, rows[1] - counts, counts, None, causal=True, **options
            )
        found.append(out)
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)


# --- linear layers


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[packed_linears._Copies]:
    """Packing for one test; SGLang's classes are as they were afterwards."""
    method = unquant.UnquantizedLinearMethod
    kept = [
        (owner, name, getattr(owner, name))
        for owner, names in (
            (method, ("process_weights_after_loading", "apply")),
            (LogitsProcessor, ("_compute_lm_head",)),
            (WeightUpdater, packed_linears._UPDATES),
        )
        for name in names
    ]
    was_used = hasattr(method, packed_linears._PACKED)
    monkeypatch.setattr(packed_linears, "_copies", packed_linears._Copies())
    packed_linears.use()
    yield packed_linears._copies
    if not was_used:
        delattr(method, packed_linears._PACKED)
        for owner, name, value in kept:
            setattr(owner, name, value)


def layer_of(weight: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_layers_compute_as_before(
    packing: packed_linears._Copies, dtype: torch.dtype
) -> None:
    method = unquant.UnquantizedLinearMethod()
    layer = layer_of(torch.randn(96, 64).to(dtype))
    method.process_weights_after_loading(layer)
    is_packed = dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    assert (packing.of(layer) is not None) == is_packed
    for shape in ((0, 64), (1, 64), (33, 64), (2, 5, 64)):
        x = torch.randn(shape).to(dtype)
        for bias in (None, torch.randn(96).to(dtype)):
            wanted = functional.linear(x, layer.weight, bias)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(
                method.apply(layer, x, bias), wanted, atol=tolerance, rtol=tolerance
            )


def test_weights_that_are_updated_are_packed_again(
    packing: packed_linears._Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = unquant.UnquantizedLinearMethod()
    layer, x = layer_of(torch.randn(8, 16)), torch.randn(3, 16)
    method.process_weights_after_loading(layer)
    size = packing.num_bytes
    model = torch.nn.Module()
    object.__setattr__(model, "load_weights", layer.weight.data.copy_)
    updater = object.__new__(WeightUpdater)
    # It is frozen.
    object.__setattr__(updater, "get_model", lambda: model)
    monkeypatch.setattr(WeightUpdater, "_assert_weight_cache_inactive", print)
    new = torch.randn(8, 16)
    done, message = updater.load_weights_from_distributed(new)
    assert done, message
    torch.testing.assert_close(method.apply(layer, x), x @ new.T)
    assert packing.num_bytes == size


def test_a_weight_that_is_replaced_is_packed_again(
    packing: packed_linears._Copies,
) -> None:
    """Such as the head of a draft model, by that of its target."""
    method = unquant.UnquantizedLinearMethod()
    layer, x = layer_of(torch.randn(8, 16)), torch.randn(3, 16)
    method.process_weights_after_loading(layer)
    for new in (torch.nn.Parameter(torch.randn(8, 16), False), torch.randn(8, 16)):
        if isinstance(new, torch.nn.Parameter):
            layer.weight = new
        else:
            layer.weight.data = new
        torch.testing.assert_close(method.apply(layer, x), x @ new.T)


def test_a_head_that_is_the_embedding_too(packing: packed_linears._Copies) -> None:
    head = layer_of(torch.randn(50, 16))
    processor = SimpleNamespace(rl_on_policy_target=None, use_fp32_lm_head=False)
    hidden = torch.randn(3, 16)
    found = LogitsProcessor._compute_lm_head(processor, hidden, head)
    assert packing.num_bytes == head.weight.nbytes
    torch.testing.assert_close(found, hidden @ head.weight.T)


def test_layers_beyond_the_memory_for_copies_stay_with_torch(
    packing: packed_linears._Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linears, "_MOST_MEMORY", 0.0)
    method = unquant.UnquantizedLinearMethod()
    layer, x = layer_of(torch.randn(8, 16)), torch.randn(3, 16)
    method.process_weights_after_loading(layer)
    assert packing.num_bytes == 0
    assert torch.equal(method.apply(layer, x), functional.linear(x, layer.weight))
