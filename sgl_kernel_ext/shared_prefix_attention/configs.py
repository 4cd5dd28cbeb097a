"""Tile sizes and planning constants per device family.

None of them was measured: they are reasoned defaults. The KV tiles of the loop (K and V x stages) fit into shared memory
about twice on NVIDIA, so that two programs share a multiprocessor, and once on AMD.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel_ext.utils import next_power_of_two


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the kernel is compiled: one value per tile of 16, 64 and 128 rows."""

    block_n: tuple[int, int, int]  # KV tokens per loop step
    num_stages: tuple[int, int, int]  # loop steps in flight
    num_warps: int = 4  # where tiles of at most 64 rows are in use
    num_warps_wide: int = 8  # where tiles of 128 rows are in use


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Planning constants of a device."""

    name: str
    num_sms: int  # multiprocessors
    flops_per_byte: int  # attention FLOPs in the time of one byte of memory traffic
    items_per_sm: int  # work items per multiprocessor below which spans are split
    min_split_tokens: int  # shortest split of a span, KV tokens
    task_bytes: int  # bytes one work item could have read while it starts and ends
    tiles: TileConfig


_SMALL = {
    128: TileConfig((64, 64, 64), (2, 2, 2)),
    256: TileConfig((32, 32, 32), (2, 2, 2)),
    512: TileConfig((16, 16, 16), (2, 2, 2)),
    1024: TileConfig((16, 16, 16), (1, 1, 1)),
}
_LARGE = {
    128: TileConfig((128, 128, 64), (5, 5, 3)),
    256: TileConfig((64, 64, 64), (5, 5, 3)),
    512: TileConfig((32, 32, 32), (5, 5, 3)),
    1024: TileConfig((16, 16, 16), (3, 3, 3)),
}
_AMD = {
    128: TileConfig((64, 64, 64), (2, 2, 2)),
    256: TileConfig((64, 64, 64), (2, 2, 2)),
    512: TileConfig((32, 32, 32), (1, 1, 1)),
    1024: TileConfig((16, 16, 16), (1, 1, 1)),
}
# Slots are read before K and V, so Triton keeps the loads of one loop step in flight
# for every two stages. 5 stages are two steps in flight, in 82 KB at 256 bytes per row
# (from the compiled kernel, sm_90).
# By device family, then by bytes of one padded KV row (head_dim x bytes per value).
TILES: dict[str, dict[int, TileConfig]] = {
    "hopper": _LARGE,
    # B200 and B300 have Hopper's shared memory, RTX 50 and RTX PRO that of Ada.
    "blackwell": _LARGE,
    "blackwell_rtx": _SMALL,
    "ampere": {
        128: TileConfig((64, 64, 64), (3, 3, 3)),
        256: TileConfig((64, 64, 64), (2, 2, 2)),
        512: TileConfig((32, 32, 16), (2, 2, 2)),
        1024: TileConfig((16, 16, 16), (2, 2, 2)),
    },
    # Ampere without HBM, and Ada: not much more than half of A100's shared memory.
    "ada": _SMALL,
    "mi300": _AMD,
    "mi350": _AMD,
    "default": _SMALL,
}

# flops_per_byte: published dense bf16 rate over memory bandwidth, halved because an
# attention loop reaches about half of that rate. task_bytes: one multiprocessor's
# share of the bandwidth x about one microsecond.
_FAMILIES: dict[str, tuple[int, int]] = {
    "hopper": (100, 32768),
    "ampere": (75, 16384),
    "ada": (75, 8192),
    "blackwell": (140, 49152),
    "blackwell_rtx": (65, 8192),
    "mi300": (120, 16384),
    "mi350": (140, 32768),
    "default": (75, 16384),
}


def device_family(device: torch.device) -> str:
    """The key of a device in ``TILES``."""
    if device.type != "cuda":
        return "default"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return {"gfx94": "mi300", "gfx95": "mi350"}.get(name[:5], "default")
    major, minor = torch.cuda.get_device_capability(device)
    if major == 8:
        return "ada" if minor else "ampere"
    families = {9: "hopper", 10: "blackwell", 12: "blackwell_rtx"}
    return families.get(major, "default")


def pick_tiles(family: str, head_dim: int, value_bytes: int) -> TileConfig:
    """The tile entry for heads of ``head_dim`` values of ``value_bytes`` bytes."""
    row_bytes = next_power_of_two(head_dim) * value_bytes
    table = TILES[family]
    return table[min(max(row_bytes, min(table)), max(table))]


def pick_config(device: torch.device, head_dim: int, value_bytes: int) -> DeviceConfig:
    """The planning constants and tiles for a device."""
    family = device_family(device)
    tiles = pick_tiles(family, head_dim, value_bytes)
    if device.type != "cuda":
        # One core runs all tasks, so splitting a span gains nothing.
        return DeviceConfig(device.type, 1, 16, 1, 1 << 20, 16384, tiles)
    flops_per_byte, task_bytes = _FAMILIES[family]
    return DeviceConfig(
        name=family,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        flops_per_byte=flops_per_byte,
        items_per_sm=8,
        min_split_tokens=128,
        task_bytes=task_bytes,
        tiles=tiles,
    )
