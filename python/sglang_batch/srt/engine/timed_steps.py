"""Costs by the steps that engines have timed on this machine, known without SGLang."""

from __future__ import annotations

import hashlib

from ...planner.costs.cost_model import CostModel
from ...planner.costs.hardware import Parallelism
from ...planner.costs.model_spec import ModelSpec
from ...planner.costs.step_costs import StepSample
from ...planner.costs.step_law import StepLaw, fit_step_law, samples_array
from ...store import measured_costs as measured
from ...store.measured_costs import TimedSteps, TimedStepsKey

STEP_WIDTH = len(StepSample._fields)


def engine_names(device: str, spec: ModelSpec, parallel: Parallelism) -> dict[str, str]:
    """The names of an engine in :class:`TimedStepsKey`, whatever attention it has."""
    return {
        "device": device,
        "model": hashlib.sha256(repr(spec).encode()).hexdigest()[:16],
        "parallelism": f"TP{parallel.tp} ranks{parallel.attention_ranks} "
        f"EP{parallel.ep}",
    }


def planned_law(
    cost: CostModel, device: str, spec: ModelSpec, parallel: Parallelism
) -> tuple[StepLaw, bool] | None:
    """The law of the last steps of such an engine on this machine, and whether it mixes.

    For plans that start no engine. None if none has timed its steps.
    """
    kept = measured.newest_steps(**engine_names(device, spec, parallel))
    if kept is None:
        return None
    law = fit_step_law(samples_array(samples_of(kept)), cost)
    return None if law is None else (law, kept.key.mixed)


def samples_of(kept: TimedSteps | None) -> list[StepSample]:
    """The steps of an entry, without those of another version."""
    found = kept.samples if kept is not None else []
    return [StepSample(*each) for each in found if len(each) == STEP_WIDTH]


def kept_law(cost: CostModel, key: TimedStepsKey) -> StepLaw | None:
    """The law of the steps that were kept for an engine of this cost by its datasheet. None
    if they are too few."""
    kept = measured.kept_steps(key)
    return None if kept is None else fit_step_law(samples_array(samples_of(kept)), cost)
