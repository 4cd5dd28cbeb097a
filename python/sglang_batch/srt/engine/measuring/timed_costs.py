"""Costs from the steps that an engine's first scheduler has timed, now and in earlier runs."""

from __future__ import annotations

import hashlib
import logging
from datetime import UTC, datetime
from typing import cast

import torch

from ....errors import StoreWriteError
from ....planner.costs.cost_model import CostModel
from ....planner.costs.hardware import Parallelism
from ....planner.costs.model_spec import ModelSpec
from ....planner.costs.step_costs import StepSample
from ....planner.costs.step_law import StepLaw, fit_step_law, samples_array
from ....planner.requests import Floats
from ....scheduling.reports.step_samples import KeptSamples
from ....store.measured.timed_steps_file import (
    TimedSteps,
    TimedStepsKey,
    keep_steps,
    kept_steps,
    newest_steps,
)
from ...compat.job_control import StepsQuery, StepsQueryOutput, channel_of
from ...compat.server_types import SchedulerState, TokenizerManager
from ...compat.support import STATE_KEY

logger = logging.getLogger(__name__)

_WIDTH = len(StepSample._fields)


def timed_steps_key(
    device: str | None, state: SchedulerState, spec: ModelSpec, parallel: Parallelism
) -> TimedStepsKey:
    """What the steps of this engine hold for.

    Args:
        device: the driver's name, None for a CPU.
    """
    backend = state.get("decode_attention_backend") or state.get("attention_backend")
    return TimedStepsKey(
        device=_device(device),
        model=_digest(spec),
        attention_backend=backend or "unknown",
        parallelism=_spread(parallel),
        mixed=bool(state[STATE_KEY]["mixed_chunk"]),
    )


def _device(name: str | None) -> str:
    return name or f"cpu, {torch.get_num_threads()} threads"


def _digest(spec: ModelSpec) -> str:
    return hashlib.sha256(repr(spec).encode()).hexdigest()[:16]


def _spread(parallel: Parallelism) -> str:
    return f"TP{parallel.tp} ranks{parallel.attention_ranks} EP{parallel.ep}"


def planned_law(
    cost: CostModel, device: str | None, spec: ModelSpec, parallel: Parallelism
) -> tuple[StepLaw, bool] | None:
    """The law of the last steps of such an engine on this machine, and whether it mixes.

    For plans that start no engine. None if none has timed its steps.
    """
    kept = newest_steps(_device(device), _digest(spec), _spread(parallel))
    if kept is None:
        return None
    law = fit_step_law(_samples(kept), cost)
    return None if law is None else (law, kept.key.mixed)


def _samples(kept: TimedSteps) -> Floats:
    samples = [StepSample(*each) for each in kept.samples if len(each) == _WIDTH]
    return samples_array(samples)


def timed_cost(cost: CostModel, key: TimedStepsKey) -> CostModel:
    """The costs by the steps that were kept for this engine, or as they are."""
    law = kept_law(cost, key)
    if law is None:
        return cost
    logger.info(
        "Planning with the costs of %d timed steps, half of which are within %.0f %%",
        law.num_samples,
        100 * law.noise,
    )
    return law.applied(cost)


def kept_law(cost: CostModel, key: TimedStepsKey) -> StepLaw | None:
    """The law of the steps that were kept for this engine. None if they are too few.

    Args:
        cost: of the engine by its datasheet.
    """
    kept = kept_steps(key)
    if kept is None:
        return None
    return fit_step_law(_samples(kept), cost)


async def keep_timed_steps(manager: TokenizerManager, key: TimedStepsKey) -> int:
    """Ask the first scheduler for its steps and keep them, with earlier ones.

    Returns:
        Steps that are kept in all. 0 if the scheduler has timed none, or the file cannot be
        written, which is logged.
    """
    channel = channel_of(manager, StepsQueryOutput)
    answers = cast(list[StepsQueryOutput], await channel(StepsQuery()))
    found = next((answer.samples for answer in answers if answer.samples), [])
    if not found:
        return 0
    before = kept_steps(key)
    known = KeptSamples(
        StepSample(*each)
        for each in (before.samples if before is not None else [])
        if len(each) == _WIDTH
    )
    for begin in range(0, len(found), _WIDTH):
        known.add(StepSample(*found[begin : begin + _WIDTH]))
    entry = TimedSteps(
        key=key,
        samples=[list(map(float, sample)) for sample in known.samples],
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    try:
        keep_steps(entry)
    except StoreWriteError as error:
        logger.warning("Timed steps are not kept: %s", error)
        return 0
    return len(entry.samples)
