"""Devices, from their datasheets, and how a model is spread over several of them."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of a datasheet's figures that engines reach: four numbers for each device.

    matrix_share: of the matrix rate, in large products whose tiles fill the device.
    read_share: of the memory bandwidth.
    kernel_s: seconds in which a kernel starts and ends and the device is not busy.
    step_s: seconds of a step in which the device waits for the engine.
    """

    matrix_share: float = 0.7
    read_share: float = 0.8
    kernel_s: float = 3e-6
    step_s: float = 2e-3


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """One device.

    compute_flops: dense bf16/fp16 matrix FLOP/s, a multiply-add counted as two.
    bandwidth_bytes_per_s: read bandwidth of the device's memory.
    memory_bytes: size of the device's memory.
    fp8_flops, fp4_flops: dense fp8 and fp4 matrix FLOP/s. None if the device has no such units
        or no figure is published.
    num_cores: multiprocessors (SMs, CUs), each of which computes a tile of a product at a
        time. None: products are not divided into tiles.
    link_bytes_per_s: rate at which a device sends to the others of its server.
    efficiency: the shares of these figures that engines reach.

    Raises:
        ConfigError: a figure is not a positive finite number.
    """

    name: str
    compute_flops: float
    bandwidth_bytes_per_s: float
    memory_bytes: int
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    num_cores: int | None = None
    link_bytes_per_s: float | None = None
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None or isinstance(value, Efficiency):
                continue
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"{field.name}={value!r} of {self.name} must be a positive number."
                )


# Fitted to published throughputs by `benchmark/bench_costs.py published`, for variants with
# points of their own and by family. Others have the typical values.
_FITTED = {
    "a100-pcie": Efficiency(0.674, 0.793, 3.0e-6, 2.1e-3),
    "a100": Efficiency(0.636, 0.773, 3.1e-6, 2.3e-3),
    "h100": Efficiency(0.596, 0.792, 3.6e-6, 3.7e-3),
    "h200": Efficiency(0.610, 0.777, 3.5e-6, 3.0e-3),
    "gh200": Efficiency(0.630, 0.763, 3.4e-6, 2.7e-3),
    "b200": Efficiency(0.508, 0.573, 10e-6, 2.5e-3),
    "b300": Efficiency(0.508, 0.573, 10e-6, 2.5e-3),
    "gb200": Efficiency(0.543, 0.774, 10e-6, 8.7e-3),
    "l40": Efficiency(0.724, 0.795, 3.0e-6, 2.0e-3),
    "mi3": Efficiency(0.240, 0.790, 3.2e-6, 2.3e-3),
}


def _device(
    name: str,
    tflops: float,
    gbytes_per_s: float,
    gib: int,
    fp8: float | None = None,
    *,
    cores: int | None = None,
    link: float | None = None,
    fp4: float | None = None,
) -> HardwareSpec:
    fitted = (each for start, each in _FITTED.items() if name.startswith(start))
    return HardwareSpec(
        name=name,
        compute_flops=tflops * 1e12,
        bandwidth_bytes_per_s=gbytes_per_s * 1e9,
        memory_bytes=gib * GIB,
        fp8_flops=None if fp8 is None else fp8 * 1e12,
        fp4_flops=None if fp4 is None else fp4 * 1e12,
        num_cores=cores,
        link_bytes_per_s=None if link is None else link * 1e9,
        efficiency=next(fitted, Efficiency()),
    )


# Figures are from the vendors' product datasheets unless a comment gives another source:
# dense (half of the figure printed "with sparsity"), fp32 accumulation. The gigabytes of
# memory on a datasheet are close to GiB on the device. Measured figures are better, and
# `hardware` accepts them. The most common variant of a family comes first: a bare family
# name refers to it. Links are NVLink's or Infinity Fabric's where they join all devices of a
# server. Otherwise data pass through the host, at half the rate of its PCIe slot.
_DEVICES = (
    #       name                TFLOP/s  GB/s  GiB  fp8 TFLOP/s  SMs  GB/s of links
    _device("a100-sxm-80gb", 312, 2039, 80, cores=108, link=300),
    _device("a100-sxm-40gb", 312, 1555, 40, cores=108, link=300),
    _device("a100-pcie-80gb", 312, 1935, 80, cores=108, link=16),
    _device("a100-pcie-40gb", 312, 1555, 40, cores=108, link=16),
    _device("h100-sxm", 989, 3350, 80, 1979, cores=132, link=450),
    _device("h100-pcie", 756, 2000, 80, 1513, cores=114, link=32),
    _device("h100-nvl", 835, 3900, 94, 1671, cores=132, link=32),
    _device("h200-sxm", 989, 4800, 141, 1979, cores=132, link=450),
    _device("h200-nvl", 835, 4800, 141, 1671, cores=132, link=32),
    # No public datasheet. Press and cloud vendors agree on these figures.
    _device("h20", 148, 4000, 96, 296, cores=78, link=450),
    # The driver's names: 480 GB is the CPU's memory, the GPU has 96.
    _device("gh200-480gb", 989, 4000, 96, 1979, cores=132, link=450),
    _device("gh200-144gb", 989, 4900, 144, 1979, cores=132, link=450),
    # Blackwell in an HGX board: 180 GB are usable in a B200, 268 GiB in a B300.
    _device("b200-sxm", 2250, 8000, 180, 4500, cores=148, link=900, fp4=9000),
    _device("b300-sxm", 2250, 8000, 268, 4500, cores=148, link=900, fp4=13500),
    _device("gb200", 2500, 8000, 186, 5000, cores=152, link=900, fp4=10000),
    _device("l4", 121, 300, 24, 242, cores=58, link=16),
    _device("l40", 181, 864, 48, 362, cores=142, link=16),
    _device("l40s", 362, 864, 48, 733, cores=142, link=16),
    _device("a10", 125, 600, 24, cores=72, link=16),
    _device("a10g", 70, 600, 24, cores=80, link=16),
    _device("a30", 165, 933, 24, cores=56, link=16),
    _device("a40", 150, 696, 48, cores=84, link=16),
    # From the architecture whitepapers (GA102, Ada).
    _device("rtx-a6000", 155, 768, 48, cores=84, link=16),
    _device("rtx-4090", 165, 1008, 24, 330, cores=128, link=16),
    _device("mi210", 181, 1638, 64, cores=104, link=150),
    # One of its two dies: the driver shows each as a device.
    _device("mi250x", 191.5, 1638, 64, cores=110, link=200),
    _device("mi300x", 1307, 5300, 192, 2615, cores=304, link=448),
    _device("mi325x", 1307, 6000, 256, 2615, cores=304, link=448),
    _device("mi355x", 2516, 8000, 288, 5033, cores=256, link=537, fp4=10066),
    # No datasheet: a server CPU of 16 cores without matrix units, to plan jobs on machines
    # without an accelerator.
    _device("cpu", 1, 50, 16),
)

HARDWARE: dict[str, HardwareSpec] = {device.name: device for device in _DEVICES}

# Vendor, product line and HBM3 add nothing to the model name. HBM2e does: the H100 PCIe
# has it. AMD's driver calls one die "MI250X / MI250".
_IGNORED = frozenset(
    {"nvidia", "amd", "instinct", "geforce", "tesla", "quadro", "rtx", "gpu"}
    | {"hbm3", "hbm3e", "oam", "ac", "vf", "hf", "mi250"}
)


def hardware(
    name: str,
    *,
    compute_flops: float | None = None,
    bandwidth_bytes_per_s: float | None = None,
) -> HardwareSpec:
    """A device of the table by any common spelling, with measured figures if given, which
    are reached in full. ``fp8_flops`` is scaled by the same factor as ``compute_flops``.

    Raises:
        ConfigError: the name is not in the table, or a figure is not positive.
    """
    spec = match_hardware(name)
    if spec is None:
        raise ConfigError(
            f"hardware={name!r} is not known; choose one of {', '.join(HARDWARE)}, "
            "the nearest of them with measured figures for compute_flops and "
            "bandwidth_bytes_per_s if need be."
        )
    given = {
        "compute_flops": compute_flops,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
    }
    changes: dict[str, Any] = {k: x for k, x in given.items() if x is not None}
    if compute_flops is not None:
        factor = compute_flops / spec.compute_flops
        for other in ("fp8_flops", "fp4_flops"):
            if (rate := getattr(spec, other)) is not None:
                changes[other] = rate * factor
    shares = {"compute_flops": "matrix_share", "bandwidth_bytes_per_s": "read_share"}
    reached = {share: 1.0 for rate, share in shares.items() if rate in changes}
    efficiency = dataclasses.replace(spec.efficiency, **reached)
    return dataclasses.replace(spec, **changes, efficiency=efficiency)


def match_hardware(device_name: str) -> HardwareSpec | None:
    """The device of the table for a driver's device name, or None.

    A name matches if it names a family of the table and has no word that contradicts
    the entry: ``"NVIDIA A100-SXM4-40GB"`` does, ``"NVIDIA H200 MIG 3g.71gb"`` does not.
    """
    words = _words(device_name)
    for spec in _DEVICES:
        known = _words(spec.name)
        if known[0] in words and set(words) <= {
            *known,
            f"{spec.memory_bytes // GIB}gb",
        }:
            return spec
    return None


def _words(name: str) -> list[str]:
    text = name.lower().replace("_", " ").replace("rtx", " rtx ")
    text = re.sub(r"(sxm|pcie|nvl)\d?", r" \1 ", text)
    text = re.sub(r"\b(\d+)\s*(gib|gb|g)\b", r"\1gb", text)
    return [word for word in re.findall(r"[a-z0-9]+", text) if word not in _IGNORED]


@dataclass(frozen=True, slots=True, order=True)
class Parallelism:
    """The devices of all replicas, by SGLang's options.

    tp: ``--tp-size``, devices of a stage.
    pp: ``--pp-size``, stages.
    replicas: ``--dp-size``, engines that have nothing in common.
    attention_ranks: ``--attn-dp-size``, parts of the ``tp`` devices with requests of
        their own. Feed-forward networks work on the tokens of all.
    ep: ``--ep-size``, parts of the ``tp`` devices with experts of their own.

    Raises:
        ConfigError: a number is below 1, or ``attention_ranks`` or ``ep`` does not divide
            ``tp``.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    attention_ranks: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "replicas", "attention_ranks", "ep"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name}={value!r} must be a whole number of 1 or more."
                )
        for name in ("attention_ranks", "ep"):
            if self.tp % getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} must divide tp={self.tp}."
                )

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.tp * self.pp * self.replicas

    @property
    def attention_tp(self) -> int:
        """Devices that share one request's attention."""
        return self.tp // self.attention_ranks

    @property
    def arguments(self) -> list[str]:
        """SGLang's options, those at their defaults left out."""
        options = {
            "--tp-size": self.tp,
            "--pp-size": self.pp,
            "--dp-size": self.replicas,
            "--attn-dp-size": self.attention_ranks,
            "--ep-size": self.ep,
        }
        return [word for name, x in options.items() if x > 1 for word in (name, str(x))]

    def __str__(self) -> str:
        parts = {
            "TP": self.tp,
            "PP": self.pp,
            "DP": self.replicas,
            "attention-DP": self.attention_ranks,
            "EP": self.ep,
        }
        return " ".join(f"{name}{n}" for name, n in parts.items() if n > 1) or "TP1"
