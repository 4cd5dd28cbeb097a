"""Compiles the planner functions that the scheduler calls, before the first request."""

from __future__ import annotations

from ...planner.admission_rules import kv_forecast
from ...planner.admission_rules.dual_scanner import ScanState, budgets, next_pace


def compile_planner() -> None:
    """Takes seconds once per installation, then milliseconds, from a cache on disk."""
    forecast = kv_forecast.make_forecast(1)
    bucket = kv_forecast.add(forecast, 0, 1, 1)
    kv_forecast.peak(forecast, 0, 1, 1)
    kv_forecast.remove(forecast, bucket, 1, 2)
    next_pace(1.0, False)
    times = 0.0, 1.0, 0.0, 1.0
    budgets(ScanState(1, 0, 1.0, 1.0, True, True, 1.0, 0, *times, 0, 0, 1.0, 1.0, 1.0))
