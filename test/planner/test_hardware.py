"""The table of devices and the matching of their names."""

from __future__ import annotations

import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.planner.costs.hardware import (
    GIB,
    HARDWARE,
    HardwareSpec,
    hardware,
    match_hardware,
)


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("nvidia-a100-sxm4-80gb", "a100-sxm-80gb"),
        ("a100_sxm4_80gb", "a100-sxm-80gb"),
        ("A100", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("a100 40 GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100SXM5", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("h200", "h200-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("H200 141GB", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("AMD Instinct MI210", "mi210"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("CPU", "cpu"),
    ],
)
def test_a_drivers_name_and_usual_spellings_match(device_name: str, name: str) -> None:
    assert match_hardware(device_name) is HARDWARE[name]


@pytest.mark.parametrize(
    "device_name",
    [
        "",
        "NVIDIA",
        "80GB",
        "SXM4-80GB",
        "NVIDIA H200 MIG 3g.71gb",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM2e",
        "AMD Instinct MI308X",
        "Quadro RTX 6000",
    ],
)
def test_slices_and_other_members_of_a_family_do_not_match(device_name: str) -> None:
    assert match_hardware(device_name) is None


def test_every_entry_is_found_by_its_own_name_in_any_case() -> None:
    for name, spec in HARDWARE.items():
        assert spec.name == name
        assert hardware(name) == hardware(name.upper()) == spec


def test_the_papers_device() -> None:
    a100 = hardware("a100")
    assert a100.compute_flops == 312e12
    assert a100.bandwidth_bytes_per_s == 2.039e12
    assert a100.memory_bytes == 80 * GIB


def test_figures_are_dense_and_plausible() -> None:
    for spec in HARDWARE.values():
        # A sparsity figure taken for a dense one would put fp8 at one or four times.
        if spec.fp8_flops is not None:
            assert 1.9 < spec.fp8_flops / spec.compute_flops < 2.1, spec
        # FLOP per byte: from a CPU's and the H20's tens to an L4's hundreds.
        assert 10 < spec.compute_flops / spec.bandwidth_bytes_per_s < 450, spec


def test_measured_figures_replace_the_tables() -> None:
    spec = hardware("H200", compute_flops=788e12, bandwidth_bytes_per_s=4.3e12)
    assert (spec.compute_flops, spec.bandwidth_bytes_per_s) == (788e12, 4.3e12)
    assert spec.memory_bytes == 141 * GIB
    assert spec.fp8_flops == pytest.approx(1979e12 * 788 / 989)
    # The ratio of densities to the paper's device, with measured and datasheet rates.
    a100 = hardware("a100")
    per_byte = a100.compute_flops / a100.bandwidth_bytes_per_s
    measured = spec.compute_flops / spec.bandwidth_bytes_per_s
    table = hardware("h200").compute_flops / hardware("h200").bandwidth_bytes_per_s
    assert per_byte / measured == pytest.approx(0.835, abs=0.001)
    assert per_byte / table == pytest.approx(0.743, abs=0.001)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'tpu-v5e' is not known.*h200-sxm.*cpu"):
        hardware("tpu-v5e")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_figures_must_be_positive_numbers(value: float) -> None:
    with pytest.raises(ConfigError, match=r"compute_flops=.*h200-sxm must be"):
        hardware("h200", compute_flops=value)
    with pytest.raises(ConfigError, match="fp8_flops="):
        HardwareSpec("mine", 1e12, 1e9, GIB, fp8_flops=value)
