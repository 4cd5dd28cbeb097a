"""Tile sizes and planning constants per device family.

Each tile of 16, 64 or 128 rows has a binary of its own. Small tiles spend their time on reading
KV, so several programs share a multiprocessor. None of the sizes was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel_ext.utils import next_power_of_two


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How the kernel is compiled: one value per tile of 16, 64 and 128 rows.

    programs: resident per multiprocessor, from the registers and shared memory of the kernel
        compiled for 16-bit KV. With e4m3 KV of 128 values or more, tiles of 16 rows have one fewer.
    """

    block_n: tuple[int, int, int]  # KV tokens per loop step
    num_stages: tuple[int, int, int]  # loop steps in flight
    num_warps: tuple[int, int, int] = (4, 4, 8)
    programs: tuple[int, int, int] = (4, 2, 1)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Planning constants of a device."""

    name: str
    num_sms: int  # multiprocessors
    flops_per_byte: tuple[int, int, int]  # by tile, in the time of a byte from memory
    min_split_tokens: int  # shortest split of a span, KV tokens
    task_bytes: int  # bytes one work item could have read while it starts and ends
    tiles: TileConfig


_SMALL = {
    128: TileConfig((64, 64, 64), (2, 2, 2)),
    256: TileConfig((32, 32, 32), (2, 2, 2)),
    512: TileConfig((16, 16, 16), (2, 2, 2)),
    1024: TileConfig((16, 16, 16), (2, 2, 2), (4, 8, 8), (3, 1, 1)),
}
_LARGE = {
    128: TileConfig((64, 128, 64), (5, 5, 3)),
    256: TileConfig((64, 64, 64), (3, 5, 3)),
    512: TileConfig((32, 32, 32), (3, 5, 5), (4, 8, 8), (3, 1, 1)),
    1024: TileConfig((16, 32, 16), (3, 2, 3), (4, 8, 8), (2, 1, 1)),
}
_AMD = {
    128: TileConfig((64, 64, 64), (2, 2, 2)),
    256: TileConfig((64, 64, 64), (2, 2, 2)),
    512: TileConfig((32, 32, 32), (1, 1, 1)),
    1024: TileConfig((16, 16, 16), (1, 1, 1), (4, 8, 8), (2, 1, 1)),
}
# Slots are read before K and V, so Triton keeps the loads of one loop step in flight
# for every two stages.
# By device family, then by bytes of one padded KV row (head_dim x bytes per value).
TILES: dict[str, dict[int, TileConfig]] = {
    "hopper": _LARGE,
    # B200 and B300 have Hopper's shared memory, RTX 50 and RTX PRO that of Ada.
    "blackwell": _LARGE
    | {1024: TileConfig((16, 16, 16), (3, 2, 3), (4, 16, 8), (2, 1, 1))},
    "blackwell_rtx": _SMALL,
    "ampere": {
        128: TileConfig((64, 64, 64), (3, 3, 3)),
        256: TileConfig((64, 64, 64), (2, 2, 2)),
        512: TileConfig((32, 32, 16), (2, 2, 2), (4, 8, 8), (3, 1, 1)),
        1024: TileConfig((16, 16, 16), (2, 2, 2), (4, 8, 8), (3, 1, 1)),
    },
    # Ampere without HBM, and Ada: not much more than half of A100's shared memory.
    "ada": _SMALL,
    "mi300": _AMD,
    "mi350": _AMD,
    "default": _SMALL,
}

# flops_per_byte: published dense bf16 rate over memory bandwidth, halved because an
# attention loop reaches about half of that rate. On an H200 (4.69 TB/s) tiles of 64 rows reached
# about 250 TFLOP/s; tiles of 128 rows were not measured. task_bytes: one multiprocessor's share
# of the bandwidth x about one microsecond.
_FAMILIES: dict[str, tuple[tuple[int, int, int], int]] = {
    "hopper": ((100, 53, 100), 32768),
    "ampere": ((75,) * 3, 16384),
    "ada": ((75,) * 3, 8192),
    "blackwell": ((140,) * 3, 49152),
    "blackwell_rtx": ((65,) * 3, 8192),
    "mi300": ((120,) * 3, 16384),
    "mi350": ((140,) * 3, 32768),
    "default": ((75,) * 3, 16384),
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


def block_size(head_dim: int) -> int:
    """Values of the kernel's block of a row of K or V. Its products take at least 16."""
    return max(16, next_power_of_two(head_dim))


def pick_tiles(family: str, head_dim: int, value_bytes: int) -> TileConfig:
    """The tile entry for heads of ``head_dim`` values of ``value_bytes`` bytes."""
    row_bytes = block_size(head_dim) * value_bytes
    table = TILES[family]
    return table[min(max(row_bytes, min(table)), max(table))]


def pick_config(device: torch.device, head_dim: int, value_bytes: int) -> DeviceConfig:
    """The planning constants and tiles for a device.

    head_dim: values of the widest block of K or V.
    """
    family = device_family(device)
    tiles = pick_tiles(family, head_dim, value_bytes)
    if device.type != "cuda":
        # One core runs all tasks, so splitting a span gains nothing.
        return DeviceConfig(device.type, 1, (16,) * 3, 1 << 20, 16384, tiles)
    flops_per_byte, task_bytes = _FAMILIES[family]
    return DeviceConfig(
        name=family,
        num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
        flops_per_byte=flops_per_byte,
        min_split_tokens=128,
        task_bytes=task_bytes,
        tiles=tiles,
    )
