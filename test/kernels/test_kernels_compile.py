"""The kernels compile for the supported devices. No device is needed."""

from __future__ import annotations

import inspect
import operator
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_kernel_ext.merge_state.merge_state_kernel import merge_parts_kernel
from sgl_kernel_ext.shared_prefix_attention.configs import block_size, pick_tiles
from sgl_kernel_ext.shared_prefix_attention.shared_prefix_kernel import (
    shared_prefix_attention_kernel,
)
from sgl_kernel_ext.shared_prefix_attention.tasks import TILE_ROWS

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are interpreted"
)

# Target, family in the tile table, and shared memory that one program may use.
DEVICES = {
    "h100": (GPUTarget("cuda", 90, 32), "hopper", 227 << 10),
    "a100": (GPUTarget("cuda", 80, 32), "ampere", 163 << 10),
    "l4": (GPUTarget("cuda", 89, 32), "ada", 99 << 10),
    "b200": (GPUTarget("cuda", 100, 32), "blackwell", 227 << 10),
    "rtx5090": (GPUTarget("cuda", 120, 32), "blackwell_rtx", 99 << 10),
    "mi300": (GPUTarget("hip", "gfx942", 64), "mi300", 64 << 10),
    "mi350": (GPUTarget("hip", "gfx950", 64), "mi350", 160 << 10),
}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INDEX_POINTERS = {
    "header_ptr",
    "tasks_ptr",
    "gather_ptr",
    "indptr_ptr",
    "rows_ptr",
    "num_tokens_ptr",
    "table_ptr",
}
KV_POINTERS = {"k_ptr", "v_ptr"}
VALUE_POINTERS = {"q_ptr", "out_ptr", "sinks_ptr"}
FACTORS = {"scale_log2", "v_scale"}


def compiled(
    kernel: Any,
    target: GPUTarget,
    value: str,
    constants: dict[str, Any],
    warps: int,
    kv: str | None = None,
) -> Any:
    """Compile as a launch with aligned pointers and strides would."""
    signature, attributes = {}, {}
    for i, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in INDEX_POINTERS:
            signature[name] = "*i32"
        elif name == "kv_len_ptr":
            signature[name] = "*i64"
        elif name in VALUE_POINTERS:
            signature[name] = f"*{value}"
        elif name in KV_POINTERS:
            signature[name] = f"*{kv or value}"
        elif name.endswith("_ptr") or name in FACTORS:
            signature[name] = "*fp32" if name.endswith("_ptr") else "fp32"
        else:
            signature[name] = "i32"
        if name not in {*FACTORS, "stride_lt"}:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options={"num_warps": warps})


def attention(
    device: str,
    value: str,
    sizes: int | tuple[int, int],
    rows: int,
    page_size: int,
    kv: str | None = None,
    **changed: Any,
) -> Any:
    """The attention kernel of a device for tiles of so many rows. kv, changed: see
    ``FEATURES``.

    sizes: of the heads of K and V, or of both. With ``LATENT``, V is a part of K.
    """
    target, family, _ = DEVICES[device]
    head_dim, v_head_dim = (sizes, sizes) if isinstance(sizes, int) else sizes
    latent = bool(changed.get("LATENT"))
    blocks = block_size(head_dim - v_head_dim * latent), block_size(v_head_dim)
    tiles = pick_tiles(family, max(blocks), TYPES[value].itemsize)
    tile = TILE_ROWS.index(rows)
    constants = {
        "NUM_Q_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "V_DIM": v_head_dim,
        "LATENT": latent,
        "BLOCK_D": blocks[0],
        "BLOCK_V": blocks[1],
        "PAGE_SIZE": page_size,
        "TILE": tile,
        "BLOCK_M": rows,
        "BLOCK_N": tiles.block_n[tile],
        "STAGES": tiles.num_stages[tile],
        "HAS_LSE": True,
        "LOGIT_CAP": 0.0,
        "PRECISION": "tf32x3" if value == "fp32" else "ieee",
        "sinks_ptr": None,
        "v_scale": None,
        **changed,
    }
    for name in changed:
        if changed[name] is ...:  # given at the launch
            del constants[name]
    kernel, warps = shared_prefix_attention_kernel, tiles.num_warps[tile]
    return compiled(kernel, target, value, constants, warps, kv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "value", "head_dim", "page_size"),
    [
        ("h100", "bf16", 128, 1),
        ("h100", "bf16", 80, 16),
        ("h100", "fp32", 64, 1),
        ("a100", "fp16", 128, 1),
        ("l4", "bf16", 256, 1),
        ("b200", "bf16", 128, 1),
        ("b200", "bf16", 256, 1),
        ("rtx5090", "bf16", 128, 1),
        ("rtx5090", "bf16", 256, 1),
        ("mi300", "bf16", 128, 16),
        ("mi350", "bf16", 128, 1),
    ],
)
@pytest.mark.parametrize("rows", TILE_ROWS)
def test_attention(
    rows: int, device: str, value: str, head_dim: int, page_size: int
) -> None:
    kernel = attention(device, value, head_dim, rows, page_size)
    assert kernel.metadata.shared <= DEVICES[device][2]


# The type of KV, if another than that of q, and constants; ... is given at the launch.
FEATURES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "cap": (None, {"LOGIT_CAP": 50.0}),
    "sinks": (None, {"sinks_ptr": ...}),
    "cap-and-sinks": (None, {"LOGIT_CAP": 50.0, "sinks_ptr": ...}),
    "fp8": ("fp8e4nv", {"v_scale": ...}),
    "latent": (None, {"LATENT": True}),
}
# Of keys and values: latents, heads of 512 values, and of K larger than those of V.
SIZES = {
    (576, 512, True): (16, 64),
    (512, 512, False): (16, 64),
    (192, 128, False): (16, 64, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
def test_keys_and_values_of_two_sizes(
    sizes: tuple[int, int, bool], device: str
) -> None:
    *dims, latent = sizes
    for rows in SIZES[sizes]:
        kernel = attention(device, "bf16", tuple(dims), rows, 1, LATENT=latent)
        assert kernel.metadata.shared <= DEVICES[device][2]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100", "l4", "b200", "rtx5090"])
@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("name", ["cap-and-sinks", "fp8"])
def test_features(name: str, rows: int, device: str) -> None:
    kv, changed = FEATURES[name]
    kernel = attention(device, "bf16", 128, rows, 1, kv, **changed)
    assert kernel.metadata.shared <= DEVICES[device][2]


# Of one program on an H100, by features, head_dim and rows of the tile: registers per thread,
# bytes of stack (spilled registers), bytes of shared memory, and programs per multiprocessor.
# The figures of the pinned Triton: a worse one is a slower kernel, a better one belongs here.
RESOURCES: dict[tuple[str, int | tuple[int, int], int], tuple[int, ...]] = {
    ("plain", 64, 16): (100, 0, 37_376, 4),
    ("plain", 64, 64): (254, 0, 108_544, 2),
    ("plain", 64, 128): (191, 0, 49_408, 1),
    ("plain", 80, 16): (118, 0, 39_168, 4),
    ("plain", 80, 64): (251, 0, 115_200, 2),
    ("plain", 80, 128): (243, 0, 98_560, 1),
    ("plain", 96, 16): (118, 0, 39_168, 4),
    ("plain", 96, 64): (251, 0, 115_200, 2),
    ("plain", 96, 128): (243, 0, 98_560, 1),
    ("plain", 128, 16): (108, 0, 39_168, 4),
    ("plain", 128, 64): (251, 0, 115_200, 2),
    ("plain", 128, 128): (245, 0, 98_560, 1),
    ("plain", 256, 16): (168, 0, 42_112, 3),
    ("plain", 256, 64): (234, 0, 131_328, 1),
    ("plain", 256, 128): (250, 0, 164_096, 1),
    ("cap", 64, 16): (100, 0, 37_376, 4),
    ("cap", 64, 64): (192, 0, 108_544, 2),
    ("cap", 64, 128): (197, 0, 49_408, 1),
    ("cap", 128, 16): (109, 0, 39_168, 4),
    ("cap", 128, 64): (228, 0, 115_200, 2),
    ("cap", 128, 128): (212, 0, 98_560, 1),
    ("cap", 256, 16): (168, 0, 42_112, 3),
    ("cap", 256, 64): (234, 0, 131_328, 1),
    ("cap", 256, 128): (249, 0, 164_096, 1),
    ("sinks", 64, 16): (110, 0, 37_376, 4),
    ("sinks", 64, 64): (243, 0, 108_544, 2),
    ("sinks", 64, 128): (189, 0, 49_408, 1),
    ("sinks", 128, 16): (108, 0, 39_168, 4),
    ("sinks", 128, 64): (252, 0, 115_200, 2),
    ("sinks", 128, 128): (247, 0, 98_560, 1),
    ("sinks", 256, 16): (199, 0, 42_112, 2),
    ("sinks", 256, 64): (236, 0, 131_328, 1),
    ("sinks", 256, 128): (254, 0, 164_096, 1),
    ("fp8", 64, 16): (128, 0, 20_992, 4),
    ("fp8", 64, 64): (243, 0, 74_752, 2),
    ("fp8", 64, 128): (182, 0, 41_216, 1),
    ("fp8", 128, 16): (168, 0, 22_784, 3),
    ("fp8", 128, 64): (251, 0, 82_432, 2),
    ("fp8", 128, 128): (241, 0, 82_176, 1),
    ("fp8", 256, 16): (190, 0, 25_728, 2),
    ("fp8", 256, 64): (255, 32, 98_560, 1),
    ("fp8", 256, 128): (255, 24, 131_328, 1),
    ("plain", 512, 16): (205, 0, 49_728, 2),
    ("plain", 512, 64): (255, 40, 196_608, 1),
    ("plain", (192, 128), 16): (152, 0, 34_048, 3),
    ("plain", (192, 128), 64): (200, 0, 107_008, 1),
    ("plain", (192, 128), 128): (230, 0, 139_776, 1),
    ("latent", (576, 512), 16): (202, 0, 37_440, 2),
    ("latent", (576, 512), 64): (255, 32, 147_456, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "rows"), RESOURCES)
def test_machine_code_needs_no_more(
    name: str, sizes: int | tuple[int, int], rows: int, tmp_path: Path
) -> None:
    kv, changed = FEATURES[name]
    kernel = attention("h100", "bf16", sizes, rows, 1, kv, **changed)
    registers, stack = registers_and_stack(kernel.asm["cubin"], tmp_path)
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    most = RESOURCES[name, sizes, rows]
    # A multiprocessor has 65,536 registers, which warps get by 256, and 228 KB of shared
    # memory, of which each program takes 1 KB more than it asks for.
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    programs = min(by_registers, (228 << 10) // (shared + 1024))
    found = registers, stack, shared, programs
    assert all(map(operator.le, found[:3], most[:3])), (found, most)
    assert programs >= most[3], (found, most)
    if name == "plain":  # what the planner counts on
        tiles = pick_tiles(
            "hopper", max(sizes) if isinstance(sizes, tuple) else sizes, 2
        )
        assert tiles.programs[TILE_ROWS.index(rows)] == programs


def registers_and_stack(cubin: bytes, folder: Path) -> tuple[int, int]:
    """What cuobjdump, which Triton brings along, says of the kernel."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found is not None, text
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_merges(device: str) -> None:
    target = DEVICES[device][0]
    shape = {"NUM_HEADS": 32, "HEAD_DIM": 80, "BLOCK_H": 4, "BLOCK_D": 128}
    shape |= {"BLOCK_P": 4, "HAS_LSE": True}
    compiled(merge_parts_kernel, target, "bf16", shape, 4)
    compiled(merge_parts_kernel, target, "bf16", shape | {"sinks_ptr": None}, 4)
