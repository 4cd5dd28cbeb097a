"""Predicted against published throughput: hundreds of points on GPUs.

``data/published/throughput.csv`` has measurements of other engines' offline runs, with lengths
that are constant or known as means, on one server. Each is predicted by the closed form of
``planner/choosing/steady_state.py``. Four constants per device describe what engines reach of its
datasheet. They are fitted to the points of one engine, the one that most of the device's points
are of, and kept in ``planner/costs/hardware.py``. Fits are drawn to typical values, so that a
constant which the points say nothing about keeps its own.

Errors are those of the kept constants. A device's *held out* error is that of points which a
fit has not seen: half of them are fitted, the other half is predicted.
"""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from report import Figure, print_table
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from sglang_batch.errors import ConfigError
from sglang_batch.planner.choosing.steady_state import RequestMix, steady_state
from sglang_batch.planner.costs.hardware import (
    HARDWARE,
    Efficiency,
    HardwareSpec,
    Parallelism,
)
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.prediction.models import MODELS

DATA = Path(__file__).parents[1] / "data" / "published" / "throughput.csv"
# Sources do not say how many requests ran at once. Engines' own limits are about this.
MAX_ROWS = 1024
STEP_TOKENS = 8192
MEM_FRACTION = 0.9
_METHODS = {"fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}
# A device has a fit of its own with so many points.
MIN_POINTS = 20
# Typical values, and factors by which they differ from device to device.
_TYPICAL = Efficiency()
_SPREAD = (1.25, 1.1, 1.6, 2.0)
# How much these count against the points.
_PRIOR = 0.3
_BOUNDS = (
    Efficiency(0.15, 0.3, 0.5e-6, 1e-4),
    Efficiency(1.0, 0.95, 10e-6, 20e-3),
)
_SCALE = 0.15
MOST_MEDIAN = 0.20
LEAST_POINTS = 30

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """A published measurement: tokens per second of all devices together."""

    row: dict[str, str]
    model: ModelSpec
    parallel: Parallelism
    mix: RequestMix
    tokens_per_s: float

    @classmethod
    def of(cls, row: dict[str, str]) -> Point:
        prompt, answer = float(row["input_len"]), float(row["output_len"])
        return cls(
            row,
            ModelSpec.from_hf_config(
                MODELS[row["model"]],
                quantization=_METHODS.get(row["weights"]),
                kv_dtype=row["kv"],
            ),
            Parallelism(
                tp=int(row["tp"]),
                pp=int(row["pp"]),
                replicas=int(row["replicas"]),
                attention_ranks=int(row["attention_ranks"]),
                ep=int(row["ep"]),
            ),
            RequestMix(prompt, answer, computed=prompt, held=prompt + answer / 2),
            float(row["tokens_per_s"]),
        )

    def predicted(self, hardware: HardwareSpec) -> float:
        """Tokens per second, NaN where the weights leave no memory."""
        try:
            found = steady_state(
                self.model,
                hardware,
                self.parallel,
                self.mix,
                step_tokens=STEP_TOKENS,
                max_rows=MAX_ROWS,
                mem_fraction=MEM_FRACTION,
            )
        except ConfigError:
            return float("nan")
        counted = self.mix.output_len
        if self.row["tokens"] == "total":
            counted += self.mix.input_len
        return found.requests_per_s * counted


def points() -> list[Point]:
    """All points of the data file."""
    with DATA.open(newline="") as file:
        return [Point.of(row) for row in csv.DictReader(file)]


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. ``quick`` leaves out the fits."""
    by_device: dict[str, list[Point]] = {}
    for point in points():
        by_device.setdefault(point.row["device"], []).append(point)
    figures, table, listed = [], [], []
    of_all: list[float] = []
    for name, measured in sorted(by_device.items()):
        device = HARDWARE[name]
        engine = Counter(point.row["engine"] for point in measured).most_common(1)[0][0]
        own = [point for point in measured if point.row["engine"] == engine]
        errors = _errors(own, device)
        of_all += errors.tolist()
        others = [point for point in measured if point.row["engine"] != engine]
        held_out = float("nan")
        if not quick and len(own) >= MIN_POINTS:
            fitted = fit(own, device)
            table.append(_constants(name, device.efficiency, fitted))
            held_out = _held_out(own, device)
            figures.append(
                Figure(
                    f"{name}: held out, median error", held_out, "", ("<=", MOST_MEDIAN)
                )
            )
        figures.append(
            Figure(
                f"{name}: median error",
                float(np.median(abs(errors))),
                "",
                ("<=", MOST_MEDIAN) if len(own) >= MIN_POINTS else None,
                f"{len(errors)} points of {engine}, mean {errors.mean():+.0%}, "
                f"9 of 10 within {np.quantile(abs(errors), 0.9):.0%}",
            )
        )
        listed += _listed(own, errors) + _listed(others, _errors(others, device))
    if table:
        print_table(
            "Constants: kept, and fitted in this run",
            (
                "device",
                "of the matrix rate",
                "of the bandwidth",
                "us a kernel",
                "ms a step",
            ),
            table,
        )
    print_table(
        "Predicted and published tokens/s",
        ("model", "device", "spread", "weights", "in", "out", "engine", "published",
         "predicted", "error"),
        listed,
    )  # fmt: skip
    return [
        Figure("points", len(of_all), "", (">=", LEAST_POINTS)),
        Figure(
            "median error of all",
            float(np.median(np.abs(of_all))),
            "",
            ("<=", MOST_MEDIAN),
            f"mean {np.mean(of_all):+.1%}",
        ),
        *figures,
    ]


def _errors(measured: Sequence[Point], device: HardwareSpec) -> Floats:
    """Predicted over published, less 1, float64 ``[number of points]``."""
    found = np.array([point.predicted(device) for point in measured])
    errors: Floats = found / np.array([point.tokens_per_s for point in measured]) - 1.0
    return errors


def fit(measured: Sequence[Point], device: HardwareSpec) -> Efficiency:
    """The four constants, by least squares of logarithms, far points counting less."""
    typical = np.log(dataclasses.astuple(_TYPICAL))
    spread = np.log(_SPREAD)

    def residuals(logs: Floats) -> Floats:
        constants = Efficiency(*np.exp(logs).tolist())
        tried = dataclasses.replace(device, efficiency=constants)
        far = np.log1p(_errors(measured, tried))
        far = far[np.isfinite(far)]
        return np.concatenate([far, _PRIOR * (logs - typical) / spread])

    low, high = (np.log(dataclasses.astuple(each)) for each in _BOUNDS)
    found = least_squares(
        residuals, typical, bounds=(low, high), loss="soft_l1", f_scale=_SCALE
    )
    return Efficiency(*np.exp(found.x).tolist())


def _held_out(measured: Sequence[Point], device: HardwareSpec) -> float:
    """The median error of points that were not fitted, each half by the other's fit."""
    found: list[float] = []
    for half in range(2):
        fitted = fit(measured[half::2], device)
        seen = dataclasses.replace(device, efficiency=fitted)
        found += abs(_errors(measured[1 - half :: 2], seen)).tolist()
    return float(np.nanmedian(found))


def _constants(name: str, kept: Efficiency, fitted: Efficiency) -> list[str]:
    def both(attribute: str, factor: float) -> str:
        values = (getattr(each, attribute) * factor for each in (kept, fitted))
        return " / ".join(f"{value:.3g}" for value in values)

    return [
        name,
        both("matrix_share", 1.0),
        both("read_share", 1.0),
        both("kernel_s", 1e6),
        both("step_s", 1e3),
    ]


def _listed(measured: Sequence[Point], errors: Floats) -> list[list[str]]:
    return [
        [
            point.row["model"],
            point.row["device"],
            str(point.parallel),
            point.row["weights"],
            point.row["input_len"],
            point.row["output_len"],
            f"{point.row['engine']} {point.row['version']}".strip(),
            f"{point.tokens_per_s:,.0f}",
            f"{point.tokens_per_s * (1 + error):,.0f}",
            f"{error:+.0%}",
        ]
        for point, error in zip(measured, errors.tolist(), strict=True)
    ]
