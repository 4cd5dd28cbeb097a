"""The CPU engine's attention and linear layers, on one core, without an engine.

    python benchmark/bench_cpu_attention.py [--save PATH]

Attention of one layer for requests that share a prefix and have 20 tokens of their own: by
SGLang's ``torch_native``, by ours with the prefix read by each request, and read once. Then
the attention of a prompt by SGLang's, and by ours with its tokens one by one, and in blocks,
and a linear layer by torch, and packed for oneDNN.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import finish, print_table
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_kernel_ext.block_attention import block_size
from sgl_kernel_ext.decode_attention import attend_decodes
from sgl_kernel_ext.host_kernels import array
from sglang_batch.srt.cpu.step_attention import StepAttention

SLOTS, OWN = 40_000, 20
# Heads, KV heads and their size, of SmolLM2-135M and of Llama-3.1-8B.
SHAPES = ((9, 3, 64), (32, 8, 128))
# Requests, and tokens of the prefix.
STEPS = tuple((n, p) for n in (2, 4, 8, 32) for p in (100, 400, 1600))

# Tokens of a prompt that are computed, and tokens before them.
PROMPTS = (
    (16, 0),
    (64, 0),
    (256, 0),
    (512, 0),
    (1024, 0),
    (16, 300),
    (64, 500),
    (256, 1000),
)


def milliseconds(call: Callable[[], object]) -> float:
    """The least of some calls, in a fifth of a second and at least five of them."""
    call()
    found: list[float] = []
    while len(found) < 5 or sum(found) < 0.2:
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return 1e3 * min(found)


class Step:
    """Attention of requests that share a prefix, of the last ``count`` tokens of each."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        requests: int,
        prefix: int,
        own: int,
        count: int,
    ) -> None:
        (heads, kv_heads, dim), length = shape, prefix + own
        made = torch.Generator().manual_seed(0)
        slots = torch.randperm(SLOTS, generator=made)[: prefix + requests * own]
        table = torch.empty(requests, length, dtype=torch.int32)
        table[:, :prefix] = slots[:prefix]
        table[:, prefix:] = slots[prefix:].view(requests, own)
        self.table, self.count = table, count
        self.q = torch.randn(requests * count, heads, dim, generator=made).to(dtype)
        kv = torch.randn(2, SLOTS, kv_heads, dim, generator=made).to(dtype)
        self.kv = kv[0], kv[1]
        self.rows, self.ends = np.arange(requests), np.full(requests, length)
        self.counts = np.full(requests, count)
        self.most = block_size(heads, kv_heads)

    def ours(self, worth: int, most: int | None = None) -> float:
        """Milliseconds, where prefixes of so much worth are read once, in blocks of so many."""
        size = self.most if most is None else most
        made = StepAttention(self.table, self.rows, self.ends, self.counts, size, worth)
        return milliseconds(lambda: made.attend(self.q, *self.kv, 0.1, None))

    def one_by_one(self) -> float:
        """Milliseconds, where each token reads its KV by itself."""
        first = self.ends[0] - self.count
        end, tokens = np.arange(first, self.ends[0]) + 1, np.arange(self.count)
        rows, begin = np.zeros_like(tokens), np.zeros_like(tokens)
        out = np.empty(self.q.shape, np.float32)
        lse = np.full(self.q.shape[:2], -np.inf, np.float32)
        q, k, v = map(array, (self.q, *self.kv))
        at = self.table.numpy(), rows, tokens, begin, end
        return milliseconds(lambda: attend_decodes(q, k, v, *at, 0.1, out, lse))

    def stock(self) -> float:
        """Milliseconds of SGLang's."""
        backend = object.__new__(TorchNativeAttnBackend)
        ends, counts = torch.from_numpy(self.ends), torch.from_numpy(self.counts)
        rows = torch.from_numpy(self.rows)
        options: dict[str, Any] = {"scaling": 0.1, "enable_gqa": True}

        def call() -> None:
            at = self.q, torch.empty_like(self.q), *self.kv, self.table, rows, ends
            if self.count == 1:
                backend._run_sdpa_forward_decode(*at, **options)
            else:
                known = ends - counts
                backend._run_sdpa_forward_extend(
                    *at, known, counts, causal=True, **options
                )

        return milliseconds(call)


def attention(
    shape: tuple[int, int, int], dtype: torch.dtype, step: tuple[int, int]
) -> list[float]:
    """Milliseconds of SGLang's, of ours, and of ours with the prefix read once."""
    of = Step(shape, dtype, *step, OWN, 1)
    return [of.stock(), of.ours(1 << 60), of.ours(0)]


def prompt(
    shape: tuple[int, int, int], dtype: torch.dtype, count: int, before: int
) -> list[float]:
    """Milliseconds of the last tokens of a prompt by SGLang's, one by one, and in blocks."""
    of = Step(shape, dtype, 1, before, count, count)
    return [of.stock(), of.one_by_one(), of.ours(0)]


def linear(rows: int, dtype: torch.dtype) -> list[float]:
    """GFLOP/s of 576 x 3,072 by torch, and packed."""
    weight, x = torch.randn(3072, 576, dtype=dtype), torch.randn(rows, 576, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    by_packed = torch.ops.mkldnn._linear_pointwise
    calls = (
        lambda: torch.nn.functional.linear(x, weight),
        lambda: by_packed(x, packed, None, "none", [], ""),
    )
    work = 2e-6 * rows * weight.numel()
    return [work / milliseconds(call) for call in calls]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, metavar="PATH", help="file for the JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    with torch.inference_mode():
        rows: list[list[object]] = []
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                for step in STEPS:
                    ms = [round(each, 3) for each in attention(shape, dtype, step)]
                    rows.append(["x".join(map(str, shape)), str(dtype)[6:], *step, *ms])
        header = ["heads", "dtype", "requests", "prefix"]
        header += ["SGLang ms", "each reads it ms", "read once ms"]
        tables.append(("Decodes, one layer", header, rows))
        rows = [
            ["x".join(map(str, shape)), str(dtype)[6:], *of]
            + [round(each, 3) for each in prompt(shape, dtype, *of)]
            for shape in SHAPES
            for dtype in (torch.float32, torch.bfloat16)
            for of in PROMPTS
        ]
        header = ["heads", "dtype", "tokens", "before"]
        header += ["SGLang ms", "one by one ms", "in blocks ms"]
        tables.append(("The last tokens of a prompt", header, rows))
        rows = [
            [str(dtype)[6:], n, *(round(each, 1) for each in linear(n, dtype))]
            for dtype in (torch.float32, torch.bfloat16)
            for n in (1, 8, 32, 256)
        ]
        header = ["dtype", "rows", "torch GFLOP/s", "packed GFLOP/s"]
        tables.append(("A linear layer, 576 x 3,072", header, rows))
    for each in tables:
        print_table(*each)
    named = [dict(zip(("title", "header", "rows"), t, strict=True)) for t in tables]
    finish({"tables": named}, options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
