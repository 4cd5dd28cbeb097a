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
from sgl_kernel_ext.shared_prefix_attention.configs import pick_tiles
from sgl_kernel_ext.shared_prefix_attention.shared_prefix_kernel import (
    shared_prefix_attention_kernel,
)
from sgl_kernel_ext.utils import next_power_of_two

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
    head_dim: int,
    max_tile: int,
    page_size: int,
    kv: str | None = None,
    **changed: Any,
) -> Any:
    """The attention kernel of a device. kv, changed: see ``FEATURES``."""
    target, family, _ = DEVICES[device]
    tiles = pick_tiles(family, head_dim, TYPES[value].itemsize)
    constants = {
        "NUM_Q_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_two(head_dim),
        "PAGE_SIZE": page_size,
        "MAX_TILE": max_tile,
        "HAS_LSE": True,
        "LOGIT_CAP": 0.0,
        "PRECISION": "tf32x3" if value == "fp32" else "ieee",
        "sinks_ptr": None,
        "v_scale": None,
        **changed,
    }
    for i, rows in enumerate((16, 64, 128)):
        constants[f"BLOCK_N_{rows}"] = tiles.block_n[i]
        constants[f"STAGES_{rows}"] = tiles.num_stages[i]
    for name in changed:
        if changed[name] is ...:  # given at the launch
            del constants[name]
    warps = tiles.num_warps_wide if max_tile > 64 else tiles.num_warps
    kernel = shared_prefix_attention_kernel
    return compiled(kernel, target, value, constants, warps, kv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "value", "head_dim", "max_tile", "page_size"),
    [
        ("h100", "bf16", 128, 64, 1),
        ("h100", "bf16", 80, 128, 16),
        ("h100", "fp32", 64, 64, 1),
        ("a100", "fp16", 128, 64, 1),
        ("l4", "bf16", 256, 128, 1),
        ("b200", "bf16", 128, 64, 1),
        ("b200", "bf16", 256, 128, 1),
        ("rtx5090", "bf16", 128, 128, 1),
        ("rtx5090", "bf16", 256, 64, 1),
        ("mi300", "bf16", 128, 64, 16),
        ("mi350", "bf16", 128, 64, 1),
    ],
)
def test_attention(
    device: str, value: str, head_dim: int, max_tile: int, page_size: int
) -> None:
    kernel = attention(device, value, head_dim, max_tile, page_size)
    assert kernel.metadata.shared <= DEVICES[device][2]


# The type of KV, if another than that of q, and constants; ... is given at the launch.
FEATURES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "cap": (None, {"LOGIT_CAP": 50.0}),
    "sinks": (None, {"sinks_ptr": ...}),
    "cap-and-sinks": (None, {"LOGIT_CAP": 50.0, "sinks_ptr": ...}),
    "fp8": ("fp8e4nv", {"v_scale": ...}),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100", "l4", "b200", "rtx5090"])
@pytest.mark.parametrize("max_tile", [64, 128])
@pytest.mark.parametrize("name", ["cap-and-sinks", "fp8"])
def test_features(name: str, max_tile: int, device: str) -> None:
    kv, changed = FEATURES[name]
    kernel = attention(device, "bf16", 128, max_tile, 1, kv, **changed)
    assert kernel.metadata.shared <= DEVICES[device][2]


# Of one program on an H100, by features, head_dim and max_tile: registers per thread, bytes
# of stack (spilled registers), bytes of shared memory, and programs per multiprocessor. The
# figures of the pinned Triton: a worse one is a slower kernel, a better one belongs here.
RESOURCES = {
    ("plain", 64, 64): (218, 0, 108_544, 2),
    ("plain", 128, 64): (254, 0, 115_200, 2),
    ("plain", 256, 64): (255, 128, 131_328, 1),
    ("plain", 64, 128): (238, 0, 107_520, 1),
    ("plain", 128, 128): (255, 0, 115_200, 1),
    ("plain", 256, 128): (255, 232, 131_328, 1),
    ("cap", 64, 64): (230, 0, 108_544, 2),
    ("cap", 128, 64): (230, 0, 115_200, 2),
    ("cap", 256, 64): (255, 312, 131_328, 1),
    ("sinks", 64, 64): (223, 0, 108_544, 2),
    ("sinks", 128, 64): (252, 0, 115_200, 2),
    ("sinks", 256, 64): (255, 144, 131_328, 1),
    ("fp8", 64, 64): (242, 0, 74_752, 2),
    ("fp8", 128, 64): (251, 0, 82_432, 2),
    ("fp8", 256, 64): (255, 96, 98_560, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_dim", "max_tile"), RESOURCES)
def test_machine_code_needs_no_more(
    name: str, head_dim: int, max_tile: int, tmp_path: Path
) -> None:
    kv, changed = FEATURES[name]
    kernel = attention("h100", "bf16", head_dim, max_tile, 1, kv, **changed)
    registers, stack = registers_and_stack(kernel.asm["cubin"], tmp_path)
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    most = RESOURCES[name, head_dim, max_tile]
    # A multiprocessor has 65,536 registers, which warps get by 256, and 228 KB of shared
    # memory, of which each program takes 1 KB more than it asks for.
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    programs = min(by_registers, (228 << 10) // (shared + 1024))
    found = registers, stack, shared, programs
    assert all(map(operator.le, found[:3], most[:3])), (found, most)
    assert programs >= most[3], (found, most)


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
