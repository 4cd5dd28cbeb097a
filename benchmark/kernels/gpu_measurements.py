"""Measurements on a GPU: ceilings, checks against float32, alternating times."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections.abc import Sequence

import library_variants
import numpy as np
import timing
import torch
import variants
from gpu_results import Measured, Result, Time
from inputs import Inputs, make_inputs, worst_error
from report import print_table
from shapes import Shape, lay_out
from variants import Builder, Variant

# Largest relative error of one token and head. bf16 has 8 bits.
TOLERANCE = 5e-2
# Share of the free memory that the KV copies of one workload may take.
MEMORY_SHARE = 0.6
# FlexAttention compiles for every workload anew: one with sharing, one without.
FLEX_SHAPES = ("1,16,64 1024,256,32", "256 1024")

# A variant, its graph over all layers, and its worst relative error.
Ready = tuple[Variant, torch.cuda.CUDAGraph, float]


def triton_version() -> str:
    """The installed Triton's version."""
    return importlib.metadata.version("triton")


def measure(
    workloads: Sequence[tuple[Shape, int]],
    heads: tuple[int, int],
    head_dim: int,
    rounds: int,
    minutes: float,
    without: Sequence[str] = (),
) -> Measured:
    """Time all variants but those ``without`` of all workloads, printing as it goes.

    After ``minutes`` no workload is begun any more.
    """
    begin = time.monotonic()
    device = timing.gpu()
    torch.manual_seed(0)
    ceilings = timing.measure_ceilings(device)
    measured = Measured(torch.cuda.get_device_name(device), ceilings)
    print(
        f"\n{measured.device}: reads {ceilings.read / 1e12:.2f} TB/s, copies "
        f"{ceilings.copy / 1e12:.2f} TB/s, multiplies {ceilings.flops / 1e12:.0f} "
        "TFLOP/s (bf16)"
    )
    for i, (shape, page_size) in enumerate(workloads):
        if time.monotonic() - begin > 60 * minutes:
            print(f"\n{len(workloads) - i} workloads left out: the time is up")
            break
        gc.collect()
        torch.cuda.empty_cache()
        result = _measure_one(
            shape, page_size, heads, head_dim, rounds, measured, without
        )
        if result is None:
            continue
        measured.results.append(result)
        print_table(
            f"{shape.family}, page {page_size}, {result.layers} KV copies: floor "
            f"{result.floor_us:.1f} us, {result.ratio:.2f}x the bytes unshared",
            [
                "shape", "variant", "us", "spread", "unique GB/s", "of floor",
                "x no sharing", "x cascade", "error", "plan us", "",
            ],
            result.rows,
        )  # fmt: skip
    return measured


def _measure_one(
    shape: Shape,
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    rounds: int,
    measured: Measured,
    without: Sequence[str],
) -> Result | None:
    device = timing.gpu()
    layout = lay_out(shape, page_size)
    token_bytes = 2 * heads[1] * head_dim * torch.bfloat16.itemsize
    unique_bytes = layout.num_unique_tokens * token_bytes
    layers = timing.num_layers(unique_bytes, device)
    needed = layers * layout.num_slots * token_bytes
    if needed > MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
        print(f"\n{shape.name}: left out, {needed / 2**30:.0f} GiB are too much here")
        return None
    inputs = make_inputs(layout, heads, head_dim, torch.bfloat16, device, layers)
    unshared = int(layout.kv_len.sum(dtype=np.int64)) * token_bytes
    return Result(
        shape=shape,
        page_size=page_size,
        layers=layers,
        unique_bytes=unique_bytes,
        ratio=unshared / unique_bytes,
        bytes_us=1e6 * inputs.floor_bytes / measured.ceilings.read,
        flops_us=1e6 * inputs.flops / measured.ceilings.flops,
        times=_times(inputs, rounds, without),
    )


def _times(inputs: Inputs, rounds: int, without: Sequence[str]) -> list[Time]:
    """Build, check and time the variants of a workload."""
    truth = inputs.truth()
    built: list[Ready] = []
    failed: list[Time] = []
    with_flex = inputs.layout.shape.name in FLEX_SHAPES
    builders = variants.builders(inputs)
    builders += library_variants.library_builders(inputs, with_flex)
    for name, builder in builders:
        if name in without:
            continue
        done = _try(name, builder, inputs, truth)
        if isinstance(done, Time):
            failed.append(done)
        else:
            built.append(done)
    taken = timing.replay_by_turns([graph for _, graph, _ in built], rounds)
    layers = len(inputs.k_caches)
    times = []
    for (variant, _, error), each in zip(built, taken, strict=True):
        low, middle, high = np.percentile(each * 1e3 / layers, (10, 50, 90))
        times.append(
            Time(
                variant=variant.name,
                us=float(middle),
                spread=float((high - low) / middle),
                error=error,
                plan_us=variant.plan_us,
                note=variant.note,
            )
        )
    return times + failed


def _checked(variant: Variant, inputs: Inputs, truth: torch.Tensor) -> float:
    """Largest relative error of the first layer. The output is NaN before."""
    inputs.out.fill_(torch.nan)
    out = variant.launch(0)
    torch.cuda.synchronize()
    return worst_error(inputs.out if out is None else out, truth)


def _try(
    name: str, builder: Builder, inputs: Inputs, truth: torch.Tensor
) -> Ready | Time:
    """A variant, or why there is none: whatever it fails with is the reason."""
    try:
        variant = builder(inputs)
        error = _checked(variant, inputs, truth)
        if not error <= TOLERANCE:
            return Time(name, error=error, note=f"wrong: relative error {error:.1e}")
        graph = timing.capture(variant.launch, len(inputs.k_caches))
        return variant, graph, error
    except variants.Unavailable as reason:
        return Time(name, note=str(reason))
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")[:100]
        return Time(name, note=f"fails: {type(error).__name__}: {first_line}")
