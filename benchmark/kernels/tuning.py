"""The search behind ``--tune``: tiles and planning constants of the fused kernel.

One value is changed at a time, and kept where that is faster, until a round changes
nothing. The score is the geometric mean of the time over three workloads: groups of 16
(tiles of 64 rows), nothing shared (16 rows), and prefill chunks with decodes (128).
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import timing
import torch
from inputs import Inputs, make_inputs
from report import write_unfinished
from shapes import all_shapes, lay_out
from variants import ours

from sgl_kernel_ext.shared_prefix_attention import DeviceConfig, pick_config

SHAPES = (
    "sd16: 16,256 2000,250",
    "256 1024",
    "7 chunks, sd16: 16,256 2000,250",
)
BLOCK_N = (32, 64, 128)
# K and V are read through the page table, which takes every second stage.
STAGES = (3, 5, 7)
WARPS = (4, 8)
MIN_SPLIT = (64, 128, 256)
ROUNDS = 20
# Of this search, for the JSON document.
RESULTS: dict[str, Any] = {"tries": []}
# A change counts if it gains clearly more than two runs of the same differ by.
LEAST_GAIN = 1.01


def neighbours(config: DeviceConfig) -> list[tuple[str, DeviceConfig]]:
    """Every config that differs in one value, and the difference."""
    found: list[tuple[str, DeviceConfig]] = []
    tiles = config.tiles

    def with_tiles(what: str, **changes: object) -> None:
        changed = replace(tiles, **changes)  # type: ignore[arg-type]
        if changed != tiles:
            found.append((what, replace(config, tiles=changed)))

    for i, rows in enumerate((16, 64, 128)):
        for stages in STAGES:
            value = tuple(stages if i == j else tiles.num_stages[j] for j in range(3))
            with_tiles(f"num_stages of {rows} rows {stages}", num_stages=value)
        for block_n in BLOCK_N:
            value = tuple(block_n if i == j else tiles.block_n[j] for j in range(3))
            with_tiles(f"block_n of {rows} rows {block_n}", block_n=value)
        for warps in WARPS:
            value = tuple(warps if i == j else tiles.num_warps[j] for j in range(3))
            with_tiles(f"num_warps of {rows} rows {warps}", num_warps=value)
    for constant in MIN_SPLIT:
        if constant != config.min_split_tokens:
            changed = replace(config, min_split_tokens=constant)
            found.append((f"min_split_tokens {constant}", changed))
    return found


def score(config: DeviceConfig, inputs: list[Inputs]) -> list[float]:
    """Microseconds per layer of each workload, infinite if it does not compile."""
    times = []
    for each in inputs:
        layers = len(each.k_caches)
        try:
            graph = timing.capture(ours(each, config).launch, layers)
        except Exception as error:
            # Too much shared memory or too many registers: of no use here.
            print(f"    {type(error).__name__}: {str(error)[:80]}")
            return [float("inf")] * len(inputs)
        taken = timing.replay_by_turns([graph], ROUNDS)[0]
        times.append(float(np.median(taken)) * 1e3 / layers)
    return times


def _mean(times: list[float]) -> float:
    return float(np.exp(np.mean(np.log(times))))


def search(config: DeviceConfig, inputs: list[Inputs], minutes: float) -> DeviceConfig:
    """Climb from a config until nothing helps or the time is up. Prints every try."""
    end = time.monotonic() + 60 * minutes
    times = score(config, inputs)
    tried = {config}
    print(f"  start: {_shown(times)}")
    keep("start", times, taken=True)
    changed = True
    while changed:
        changed = False
        for what in dict(neighbours(config)):
            # Of the config now, which a step before this one may have changed.
            other = dict(neighbours(config)).get(what)
            if other is None or other in tried:
                continue
            if time.monotonic() > end:
                print("  the time is up: there may be better ones")
                return config
            tried.add(other)
            now = score(other, inputs)
            better = _mean(now) * LEAST_GAIN < _mean(times)
            print(f"  {what}: {_shown(now)}{'  taken' if better else ''}", flush=True)
            keep(what, now, taken=better)
            if better:
                config, times, changed = other, now, True
    return config


def keep(what: str, times: list[float], *, taken: bool) -> None:
    """Add a try to the results, where ``--save`` finds it."""
    us = [time if math.isfinite(time) else None for time in times]  # JSON has no inf
    RESULTS["tries"].append({"change": what, "us": us, "taken": taken})
    write_unfinished()


def _shown(times: list[float]) -> str:
    each = ", ".join(f"{time:.1f}" for time in times)
    return f"{_mean(times):.1f} us ({each})"


def main(
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    has_gpu: bool,
    minutes: float,
) -> int:
    """Search on this GPU and print entries for configs.py. Returns 1 without a GPU."""
    if not has_gpu:
        print("--tune measures on a GPU, and there is none.")
        return 1
    device = timing.gpu()
    inputs = []
    for name in SHAPES:
        layout = lay_out(next(s for s in all_shapes() if s.name == name), page_size)
        unique = layout.num_unique_tokens * 2 * heads[1] * head_dim * 2
        layers = timing.num_layers(unique, device)
        inputs.append(
            make_inputs(layout, heads, head_dim, torch.bfloat16, device, layers)
        )
    gc.collect()
    print(f"us per layer on {torch.cuda.get_device_name(device)}: mean ({SHAPES})")
    RESULTS["device"] = torch.cuda.get_device_name(device)
    best = search(pick_config(device, head_dim, 2), inputs, minutes)
    RESULTS["best"] = asdict(best)
    t = best.tiles
    print(f'\nTILES["{best.name}"]:')
    print(
        f"    {2 * head_dim}: TileConfig({t.block_n}, {t.num_stages}, {t.num_warps}, "
        f"{t.programs}),"
    )
    print("pick_config:")
    print(f"    min_split_tokens={best.min_split_tokens},")
    return 0
