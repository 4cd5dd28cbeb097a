"""The CPU engine's attention and linear layers, on one core, without an engine.

    python benchmark/bench_cpu_attention.py [--save PATH]

Attention of one layer for requests that share a prefix and have 20 tokens of their own: by
SGLang's ``torch_native``, by ours with the prefix read by each request, and read once. Then
the attention of a prompt with all its tokens in one call of PyTorch, and token by token, and a
linear layer by torch, and packed for oneDNN.
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

from sglang_batch.srt.cpu import step_attention
from sglang_batch.srt.cpu.step_attention import StepAttention

SLOTS, OWN = 40_000, 20
# Heads, KV heads and their size, of SmolLM2-135M and of Llama-3.1-8B.
SHAPES = ((9, 3, 64), (32, 8, 128))
# Requests, tokens of the prefix, and tokens of each that are computed.
STEPS = (
    *((n, p, 1) for n in (2, 16, 32) for p in (100, 400, 1600)),
    *((n, p, OWN) for n in (2, 4, 16) for p in (50, 400, 1600)),
)

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


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The least of some calls."""
    call()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return 1e3 * min(found)


def attention(
    shape: tuple[int, int, int], dtype: torch.dtype, step: Any
) -> list[float]:
    """Milliseconds of SGLang's, of ours, and of ours with the prefix read once."""
    (heads, kv_heads, dim), (requests, prefix, count) = shape, step
    length = prefix + OWN
    made = torch.Generator().manual_seed(0)
    table = torch.randint(
        0, SLOTS, (requests, length), generator=made, dtype=torch.int32
    )
    table[:, :prefix] = table[0, :prefix]
    q = torch.randn(requests * count, heads, dim, generator=made).to(dtype)
    k, v = torch.randn(2, SLOTS, kv_heads, dim, generator=made).to(dtype)
    rows, ends = np.arange(requests), np.full(requests, length)
    counts = np.full(requests, count)
    repeats = 5 if count > 1 or prefix > 400 else 15
    stock = object.__new__(TorchNativeAttnBackend)
    given = [torch.from_numpy(each) for each in (rows, ends, ends - counts, counts)]
    options: dict[str, Any] = {"scaling": 0.1, "enable_gqa": True}

    def stock_step() -> None:
        out, at = torch.empty_like(q), (q, None, k, v, table)
        if count == 1:
            stock._run_sdpa_forward_decode(*at[:1], out, *at[2:], *given[:2], **options)
        else:
            stock._run_sdpa_forward_extend(
                *at[:1], out, *at[2:], *given, causal=True, **options
            )

    found = [milliseconds(stock_step, repeats)]
    for least in (1 << 60, 1):
        step_attention._LEAST_VALUES = step_attention._LEAST_TOKENS = least
        ours = StepAttention(table, rows, ends, counts, 2 * k[0].numel())
        found.append(milliseconds(lambda o=ours: o.attend(q, k, v, 0.1, None), repeats))  # type: ignore[misc]
    return found


def prompt(
    shape: tuple[int, int, int], dtype: torch.dtype, count: int, before: int
) -> list[float]:
    """Milliseconds of the last tokens of a prompt together, and of each alone."""
    heads, kv_heads, dim = shape
    made = torch.Generator().manual_seed(0)
    table = torch.randperm(SLOTS, generator=made)[: before + count].int().unsqueeze(0)
    q = torch.randn(count, heads, dim, generator=made).to(dtype)
    k, v = torch.randn(2, SLOTS, kv_heads, dim, generator=made).to(dtype)
    rows, ends, counts = np.zeros(1, int), np.array([before + count]), np.array([count])
    found = []
    for most in (0, 1 << 60):
        step_attention._MOST_ALONE = step_attention._MOST_PAIRS = most
        ours = StepAttention(table, rows, ends, counts, 2 * k[0].numel())
        found.append(milliseconds(lambda o=ours: o.attend(q, k, v, 0.1, None), 7))  # type: ignore[misc]
    return found


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
    return [work / milliseconds(call, 30) for call in calls]


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
        header = ["heads", "dtype", "requests", "prefix", "computed each"]
        header += ["SGLang ms", "each reads it ms", "read once ms"]
        tables.append(("Attention of one layer", header, rows))
        rows = [
            ["x".join(map(str, shape)), str(dtype)[6:], *of]
            + [round(each, 3) for each in prompt(shape, dtype, *of)]
            for shape in SHAPES
            for dtype in (torch.float32, torch.bfloat16)
            for of in PROMPTS
        ]
        header = ["heads", "dtype", "tokens", "before", "together ms", "alone ms"]
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
