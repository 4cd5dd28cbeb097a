"""Times of a GPU, and the figures that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import library_variants
import numpy as np
import variants
from report import Figure
from shapes import Shape
from timing import Ceilings

# Below this floor a launch and a merge are a large part of the time.
LAUNCH_BOUND_US = 50.0


@dataclass(frozen=True, slots=True)
class Time:
    """A variant's time per layer, or why it has none."""

    variant: str
    us: float = float("nan")  # median
    spread: float = float("nan")  # 10th to 90th percentile over the median
    error: float = float("nan")  # worst relative error of a token and head
    plan_us: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """All variants of one workload."""

    shape: Shape
    page_size: int
    layers: int
    unique_bytes: int
    ratio: float  # bytes without sharing over unique bytes
    bytes_us: float  # floors with the measured ceilings
    flops_us: float
    times: list[Time]

    @property
    def floor_us(self) -> float:
        return max(self.bytes_us, self.flops_us)

    def us(self, variant: str) -> float:
        """Median of a variant, or NaN if it did not run."""
        return next((t.us for t in self.times if t.variant == variant), float("nan"))

    def gain(self, over: str) -> float:
        """Time of another variant over ours."""
        return self.us(over) / self.us(variants.OURS)

    @property
    def rows(self) -> list[list[str]]:
        rows = []
        for t in self.times:
            if np.isnan(t.us):
                rows.append([self.shape.name, t.variant, *[""] * 8, t.note])
                continue
            rows.append([
                self.shape.name, t.variant, f"{t.us:.1f}", f"{100 * t.spread:.1f} %",
                f"{self.unique_bytes / t.us / 1e3:,.0f}",
                f"{100 * self.floor_us / t.us:.0f} %",
                f"{self.us(variants.UNSHARED) / t.us:.2f}",
                f"{self.us(variants.CASCADE) / t.us:.2f}",
                f"{t.error:.1e}", f"{t.plan_us:.0f}" if t.plan_us else "", t.note,
            ])  # fmt: skip
        return rows

    @property
    def as_json(self) -> dict[str, Any]:
        values = asdict(self) | {"shape": self.shape.name, "family": self.shape.family}
        values["floor_us"] = self.floor_us
        for each in values["times"]:
            for key, value in each.items():
                each[key] = None if value != value else value  # JSON has no NaN
        return values


@dataclass(slots=True)
class Measured:
    """Everything from one device."""

    device: str
    ceilings: Ceilings
    results: list[Result] = field(default_factory=list)

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "ceilings": asdict(self.ceilings),
            "results": [result.as_json for result in self.results],
        }


def figures_of(measured: Measured) -> list[Figure]:
    """The targets, each by its worst workload."""
    ran = [r for r in measured.results if not np.isnan(r.us(variants.OURS))]
    decodes = [r for r in ran if not r.shape.chunks]
    # Where arithmetic is the floor, bytes are no measure.
    targeted = [
        r for r in decodes
        if 256 <= r.shape.num_decodes <= 513 and r.shape.sharing >= 4
    ]  # fmt: skip
    read_bound = [r for r in targeted if r.bytes_us >= r.flops_us]

    def floor_share(r: Result) -> float:
        return r.floor_us / r.us(variants.OURS)

    long = [r for r in read_bound if r.floor_us >= LAUNCH_BOUND_US]
    alone = [r for r in decodes if r.shape.sharing == 1]
    mixed = [r for r in ran if r.shape.chunks]
    figures = [
        _failures(measured),
        _worst("share of the floor, 256 to 513 decodes, sharing 4 or more", read_bound,
               floor_share, (">=", 0.8)),
        _worst(f"the same with a floor of {LAUNCH_BOUND_US:.0f} us or more", long,
               floor_share, None),
    ]  # fmt: skip
    for other in (
        variants.CASCADE, library_variants.FLASHINFER, library_variants.FA3,
        *library_variants.FLASH_CASCADES.values(),
    ):  # fmt: skip
        figures += _gains(f"speed over {other}", targeted, other)
    figures += [
        _worst("nothing shared: speed over no sharing", alone,
               lambda r: r.gain(variants.UNSHARED), (">=", 1 / 1.03)),
        _worst("byte ratio above 1.3: speed over no sharing",
               [r for r in decodes if r.ratio > 1.3],
               lambda r: r.gain(variants.UNSHARED), (">=", 1.0)),
        _worst("prefill and decode in one launch: speed over two", mixed,
               lambda r: r.gain(variants.TWO_LAUNCHES), (">=", 1.2)),
    ]  # fmt: skip
    return [figure for figure in figures if figure is not None]


def _failures(measured: Measured) -> Figure:
    """How many runs of the fused kernel and of the one without sharing went wrong."""
    own = (variants.OURS, variants.OURS_UNSHARED, variants.UNSHARED)
    failed = [
        f"{result.shape.name}, {each.variant}: {each.note}"
        for result in measured.results
        for each in result.times
        if each.variant in own and np.isnan(each.us)
    ]
    note = failed[0] if failed else f"{len(measured.results)} workloads"
    return Figure("kernels that fail or are wrong", len(failed), "", ("<=", 0), note)


def _gains(name: str, results: Sequence[Result], other: str) -> list[Figure | None]:
    """Worst and mean gain over another variant, where it ran."""
    ran = [r for r in results if not np.isnan(r.us(other))]
    if not ran:
        return []
    mean = float(np.mean([r.gain(other) for r in ran]))
    return [
        _worst(f"{name}, worst", ran, lambda r: r.gain(other), (">=", 1.0)),
        Figure(f"{name}, mean", mean, "x", (">=", 1.2), f"{len(ran)} workloads"),
    ]


def _worst(
    name: str,
    results: Sequence[Result],
    value: Callable[[Result], float],
    target: tuple[str, float] | None,
) -> Figure | None:
    """The smallest value and its workload, or None if nothing was measured."""
    if not results:
        return None
    worst = min(results, key=value)
    note = f"worst of {len(results)}: {worst.shape.name}, page {worst.page_size}"
    return Figure(name, value(worst), "x", target, note)
